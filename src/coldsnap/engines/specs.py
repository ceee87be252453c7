"""Engines as text: what is kept beside a running engine and inside an artifact, so that another process can take it up.

The one rule: a kind is found by its registered name, never by an import path that a file could choose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar, cast

from attrs import frozen

from coldsnap.artifact import record
from coldsnap.engines.base import Engine
from coldsnap.engines.environment import EngineEnvironment
from coldsnap.errors import AdmissionError, FormatError

__all__ = [
    "COMMAND",
    "RELEASING",
    "SPEC",
    "EngineRecord",
    "register",
    "spec_from_text",
    "spec_of_running",
    "spec_to_text",
    "was_launched_releasing",
]

SPEC = "spec"
"""The keeper's label with the specification of its engine."""
COMMAND = "command"
"""The keeper's label with argv, environment and cwd of the engine."""
RELEASING = {"COLDSNAP_EXPORT_MODEL_PAYLOAD": "1"}
"""What the environment of a launch has so that weights can leave the process later."""

T = TypeVar("T")

_KINDS: dict[str, type[Any]] = {}
# Imported where one is met, and not before.
_PROVIDED = {"vllm": ("coldsnap.engines.vllm", "VLLM"), "sglang": ("coldsnap.engines.sglang", "SGLang")}


def register(kind: type[T]) -> type[T]:
    """Make a specification class known by its ``kind``; usable as a decorator."""
    _KINDS[cast("type[Engine]", kind).kind] = kind
    return kind


def spec_to_text(spec: Engine) -> str:
    """Return a specification as JSON text."""
    return json.dumps({"kind": spec.kind, **cast("Any", record.write(spec))}, sort_keys=True, separators=(",", ":"))


def spec_from_text(text: str) -> Engine:
    """Read a specification.

    Raises:
        AdmissionError: Its kind is not known here.
        FormatError: It is no specification.
    """
    try:
        data = json.loads(text)
        kind = data.pop("kind")
    except (ValueError, KeyError, AttributeError) as error:
        raise FormatError(f"not the specification of an engine: {error}", path="spec", rule="json.1") from error
    if kind in _PROVIDED and kind not in _KINDS:
        module, name = _PROVIDED[kind]
        register(getattr(import_module(module), name))
    if kind not in _KINDS:
        known = ", ".join(sorted({*_KINDS, *_PROVIDED}))
        raise AdmissionError(
            f"the engine kind {kind!r} is not known here (known: {known}); import the module that defines it"
        )
    return cast("Engine", record.read(_KINDS[kind], data, path="spec"))


def spec_of_running(labels: Mapping[str, str], *, run_dir: object) -> Engine:
    """Return the specification of a running engine, from what was written down when it was started.

    Raises:
        AdmissionError: Nothing was: it was not launched or restored by a plan.
    """
    if SPEC not in labels:
        raise AdmissionError(f"the engine in {run_dir} was not started by a plan: nobody wrote down what it is")
    return spec_from_text(labels[SPEC])


def was_launched_releasing(labels: Mapping[str, str]) -> bool:
    """Tell whether a running engine was launched so that its weights can leave it."""
    environment: dict[str, str] = json.loads(labels.get(COMMAND, "{}")).get("environment", {})
    return RELEASING.items() <= environment.items()


@frozen(kw_only=True)
class EngineRecord:
    """``engine.json`` of a capsule: how the engine was described and what its interpreter had installed.

    Attributes:
        format: 1.
        spec: The specification as text.
        environment: The description of its interpreter.
    """

    format: int = 1
    spec: str
    environment: EngineEnvironment

    def to_text(self) -> str:
        """Return it as JSON text."""
        return json.dumps(record.write(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str, *, path: str) -> EngineRecord:
        """Read it.

        Raises:
            FormatError: It is no such record.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise FormatError(f"not JSON: {error}", path=path, rule="json.1") from error
        found = record.read(cls, data, path=path)
        if found.format != 1:
            raise FormatError(f"expected format 1, found {found.format}", path=path, rule="json.2")
        return found
