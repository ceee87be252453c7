"""What a plan refuses to write packs of."""

import types

import pytest

from coldsnap.errors import UnsupportedError
from coldsnap.planning.materialize import POLICY, require_materializable


def artifact(kind, payloads=("pack",), driver="n610"):
    descriptor = types.SimpleNamespace(
        weights=types.SimpleNamespace(payloads=payloads),
        engine=types.SimpleNamespace(kind=kind),
        snapshot_driver=types.SimpleNamespace(id=driver),
    )
    return types.SimpleNamespace(path="artifacts/one", descriptor=descriptor)


@pytest.mark.parametrize("value", ["async", "required"])
def test_an_engine_out_of_a_template_has_no_pack_in_its_memory(value):
    with pytest.raises(UnsupportedError, match="is not what its load has left") as caught:
        require_materializable(value, artifact("vllm", driver="n580"))
    assert "Materialize of the artifact" in str(caught.value)


@pytest.mark.parametrize("value", ["async", "required"])
def test_an_artifact_of_sglang_is_not_materialized(value):
    with pytest.raises(UnsupportedError, match="SGLang") as caught:
        require_materializable(value, artifact("sglang"))
    assert caught.value.field == POLICY


@pytest.mark.parametrize("value", ["async", "required"])
def test_an_artifact_without_packs_is_not_materialized(value):
    with pytest.raises(UnsupportedError, match="names no pack"):
        require_materializable(value, artifact("vllm", payloads=None))


@pytest.mark.parametrize(("value", "kind"), [("off", "sglang"), ("async", "vllm"), ("required", "reference")])
def test_everything_else_goes_on(value, kind):
    require_materializable(value, artifact(kind))
