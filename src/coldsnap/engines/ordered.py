"""Loads that the directive has something to say about: one that is exported, one that is read from a pack.

A worker reads the directive when it loads its model. The one rule: what was ordered happens, or the load ends with an
error; a worker that serves other weights than those it was told to has no excuse that anybody reads.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coldsnap.engines.settings import directive_path
from coldsnap.errors import ContractError
from coldsnap.keeper.directive import Checkpoint, Directive, read_directive
from coldsnap.keeper.load_failure import noted

if TYPE_CHECKING:
    from coldsnap.engines.rank import Operation
    from coldsnap.engines.weights.load_record import LoadRecord

__all__ = ["LOAD_FORMAT", "Ordered", "ordered"]

LOAD_FORMAT = "coldsnap"


class Ordered:
    """What this process was told about its load, and what it did."""

    def __init__(self) -> None:
        self._model: Any = None  # a weak reference to the one that the order was about
        self._report: Mapping[str, Any] = {"skipped": True}

    @property
    def directive(self) -> Directive | None:
        """Return the directive, None in a process that this library did not launch."""
        path = directive_path()
        return None if path is None else read_directive(path)

    def exports(self) -> bool:
        """Tell whether the directive asks for what a load leaves."""
        return (directive := self.directive) is not None and directive.export is not None

    def awaits(self) -> bool:
        """Tell whether a template was started whose load is ordered, and has not happened."""
        directive = self.directive
        if directive is None or directive.start is None or "task" in self._report:
            return False
        return directive.checkpoint is not None or directive.hydration is not None

    def operations(self) -> Mapping[str, Operation]:
        """Return what a rank answers about its ordered load."""
        return {"load_report": lambda _request: self._report}

    def loaded(self, model: Any, seen: LoadRecord) -> None:
        """Export what a load left, when that is ordered; a reload of the same model changes nothing.

        Args:
            model: What was loaded a moment ago.
            seen: What the load was seen to copy.
        """
        directive = self.directive
        if directive is None or directive.export is None or self._is_done(model):
            return
        from coldsnap.engines.weights.exporting import export  # noqa: PLC0415  torch is there once a model is
        from coldsnap.engines.weights.requests import ReleaseRequest, read_request  # noqa: PLC0415

        request = directive.export.request(_worker())
        self._report = export(model, seen, read_request(ReleaseRequest, request))

    def start(self, model: Any, directive: Directive) -> None:
        """Fill a model from what the directive names; a reload of the same model changes nothing.

        Args:
            model: Its parameters are allocated.
            directive: One that ``fills``.

        Raises:
            ContractError: It says nothing of this worker.
        """
        from coldsnap.engines.weights.fresh import StartRequest, start  # noqa: PLC0415
        from coldsnap.engines.weights.requests import read_request  # noqa: PLC0415

        worker = _worker()
        if directive.hydration is None:
            raise ContractError(
                f"the directive has the provider {directive.provider} and no hydration: nothing says what to read"
            )
        try:
            request = directive.hydration.request(worker)
        except KeyError:
            told = f"the directive's hydration says nothing of {worker}; start as many workers as were captured"
            raise ContractError(told) from None
        if self._is_done(model):
            return
        asked = read_request(StartRequest, {**request, "provider": directive.provider})
        with noted(os.path.dirname(directive_path() or ""), worker):
            self._report = start(model, asked, worker=worker)
        source = "the pack" if asked.provider == "native" else "the checkpoint"
        _log(f"{worker} has its weights: {self._report['matched']['extents']} extents from {source}")

    def order(self) -> Directive:
        """Return what a load of the format ``coldsnap`` goes by.

        Raises:
            ContractError: This library did not start the engine.
        """
        if (directive := self.directive) is None:
            raise ContractError(f"--load-format {LOAD_FORMAT} belongs to engines that this library starts; use auto")
        return directive

    def checkpoint(self, directive: Directive) -> Checkpoint:
        """Return the checkpoint that a directive names.

        Raises:
            ContractError: It names none.
        """
        if directive.checkpoint is None:
            raise ContractError(f"the directive has the provider {directive.provider} and names no checkpoint")
        return directive.checkpoint

    def loaded_from(self, path: str, directive: Directive) -> None:
        """Report that the weights came from a checkpoint, unless there is more to report."""
        if "task" not in self._report:
            told = "recovery" if directive.provider == "recovery" else "checkpoint"
            self._report = {"task": "recover", "worker": _worker(), "provider": told, "model": path}

    def _is_done(self, model: Any) -> bool:
        """Tell whether the order was carried out for this model already.

        Raises:
            ContractError: It was, for another one: files and names are one worker's, and so one model's.
        """
        done = None if self._model is None else self._model()
        if done is not None and done is not model:
            raise ContractError("this worker loads a second model, and only one can be exported or started from a pack")
        self._model = weakref.ref(model)
        return done is model


def _worker() -> str:
    import torch  # noqa: PLC0415

    # vLLM makes its world group before it makes a model, for a single worker too.
    distributed = torch.distributed
    number = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return f"worker-{number}"


def _log(message: str) -> None:
    # One write for a whole line: the processes of an engine share their log.
    sys.stderr.write(f"[coldsnap] {message}\n")
    sys.stderr.flush()


ordered = Ordered()
"""The one of this process."""
