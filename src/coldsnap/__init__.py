"""Capture a warmed-up LLM inference engine and restore it in seconds, answering exactly as before.

::

    import coldsnap as cs

    engine = cs.VLLM("Qwen/Qwen3-8B", revision="<40 hex>", python="/opt/vllm/bin/python")
    facts = cs.probe()
    capture = cs.Capture(engine, output="artifacts/qwen3-8b", placement=cs.local(port=8000))
    cs.execute(cs.resolve(cs.Policy(), capture, facts), on_event=cs.progress())

    artifact = cs.Artifact.open("artifacts/qwen3-8b")
    report = cs.execute(cs.resolve(cs.Policy(), cs.Restore(artifact, placement=cs.local(port=8001)), cs.probe()))
    report.engine.endpoint.url

The one rule: importing this module imports nothing heavy; every name is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldsnap import errors, policy
    from coldsnap.artifact import Artifact
    from coldsnap.diagnosing import diagnose
    from coldsnap.engines.sglang import SGLang
    from coldsnap.engines.vllm import VLLM
    from coldsnap.errors import AdmissionError, ColdSnapError
    from coldsnap.execute import execute
    from coldsnap.host.facts import Facts
    from coldsnap.host.probe import probe
    from coldsnap.host.qualify import qualify_host
    from coldsnap.keeper.handle import Engine
    from coldsnap.operation import (
        Capture,
        Delete,
        Launch,
        Materialize,
        Placement,
        Prepare,
        Publish,
        Restore,
        Sleep,
        Status,
        Stop,
        Verify,
        Wake,
        local,
    )
    from coldsnap.policy import Policy
    from coldsnap.progress import progress
    from coldsnap.receipts import Report
    from coldsnap.resolve import resolve

_HOMES = {
    "coldsnap.artifact": ("Artifact",),
    "coldsnap.diagnosing": ("diagnose",),
    "coldsnap.engines.sglang": ("SGLang",),
    "coldsnap.engines.vllm": ("VLLM",),
    "coldsnap.errors": ("AdmissionError", "ColdSnapError"),
    "coldsnap.execute": ("execute",),
    "coldsnap.host.facts": ("Facts",),
    "coldsnap.host.probe": ("probe",),
    "coldsnap.host.qualify": ("qualify_host",),
    "coldsnap.keeper.handle": ("Engine",),
    "coldsnap.operation": (
        "Capture",
        "Delete",
        "Launch",
        "Materialize",
        "Placement",
        "Prepare",
        "Publish",
        "Restore",
        "Sleep",
        "Status",
        "Stop",
        "Verify",
        "Wake",
        "local",
    ),
    "coldsnap.policy": ("Policy",),
    "coldsnap.progress": ("progress",),
    "coldsnap.receipts": ("Report",),
    "coldsnap.resolve": ("resolve",),
}
_MODULES = ("errors", "policy")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "VLLM",
    "AdmissionError",
    "Artifact",
    "Capture",
    "ColdSnapError",
    "Delete",
    "Engine",
    "Facts",
    "Launch",
    "Materialize",
    "Placement",
    "Policy",
    "Prepare",
    "Publish",
    "Report",
    "Restore",
    "SGLang",
    "Sleep",
    "Status",
    "Stop",
    "Verify",
    "Wake",
    "diagnose",
    "errors",
    "execute",
    "local",
    "policy",
    "probe",
    "progress",
    "qualify_host",
    "resolve",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"coldsnap.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'coldsnap' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """This package, with functions where modules of the same name would be.

    ``resolve``, ``execute`` and ``progress`` are functions in modules of those names. The import system binds a module
    to its package once it has loaded it, whoever imports it first; the function is bound instead.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _HOME_OF:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
