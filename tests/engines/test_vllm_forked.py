"""A rank that is forked out of an imported template is one of its own."""

import os
import sys
from types import SimpleNamespace

from coldsnap.engines.vllm import plugin


def test_a_forked_process_loads_its_plugins_although_its_parent_has(monkeypatch):
    plugins = SimpleNamespace(plugins_loaded=True)
    monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)
    monkeypatch.setattr(plugin, "_started", True)

    plugin.forget()

    assert plugins.plugins_loaded is False
    assert plugin._started is False


def test_importing_the_plugin_imports_next_to_nothing():
    code = "import sys; import coldsnap.engines.vllm.plugin; print(len({'attrs', 'vllm', 'torch'} & set(sys.modules)))"

    with os.popen(f'{sys.executable} -c "{code}"') as out:
        assert out.read().strip() == "0"
