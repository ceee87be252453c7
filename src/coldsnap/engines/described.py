"""What descriptions of all engines have in common: a model, an interpreter, arguments and an environment.

The one rule: a description is checked where it is written. What is wrong in itself is a PolicyError at once; what this
library cannot do with it is told by ``refusals``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from coldsnap.engines.argument_limits import MODEL_LIMITS, Limits, last_value
from coldsnap.engines.model import (
    REVISION,
    ModelIdentity,
    hub_snapshot,
    identify_directory,
    identify_hub,
    read_config,
)
from coldsnap.errors import AdmissionError, PolicyError, UnsupportedError

__all__ = ["DescribedEngine", "with_item", "without_expandable_segments"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def _problem(name: str, message: str) -> PolicyError:
    return PolicyError([(f"$.engine.{name}", message)], what="engine")


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise _problem("args", f"expected a sequence of arguments, found one string; write {tuple(value.split())!r}")
    return tuple(value)


def _texts(_: object, attribute: Attribute[Any], value: Any) -> None:
    for text in value if not isinstance(value, Mapping) else [*value, *value.values()]:
        if not isinstance(text, str) or "\0" in text:
            raise _problem(attribute.name, f"expected strings without NUL, found {text!r}")


def _revision(instance: DescribedEngine, _: object, value: str | None) -> None:
    if value is None:
        return
    if not REVISION.fullmatch(value):
        raise _problem("revision", f"expected the 40 hex digits of a commit, found {value!r}; a branch or tag can move")
    if not _HUB_NAME.fullmatch(instance.model):
        raise _problem("revision", f"belongs to models of the hub, and {instance.model!r} is a path; leave it out")


def _model(_: object, __: object, value: str) -> None:
    if not value or "\0" in value:
        raise _problem("model", f"expected a directory or a repository of the hub, found {value!r}")


def _path(value: str | os.PathLike[str]) -> str:
    return os.fspath(value)


def _own(value: Mapping[str, str]) -> Mapping[str, str]:
    return dict(value)


def _optional_path(value: str | os.PathLike[str] | None) -> str | None:
    return None if value is None else os.path.abspath(os.fspath(value))


@frozen(kw_only=True)
class DescribedEngine:
    """The fields that every description of an engine has.

    Attributes:
        model: A repository of the hub together with ``revision``, or the directory of a model.
        revision: 40 hex digits of a commit; required for a model of the hub, not given for a directory.
        args: Further arguments of the engine; those that this library sets are refused.
        python: The interpreter of the environment that the engine is installed in.
        env: Environment on top of the caller's.
        cwd: Working directory; ``/`` when not given, so that no directory is held busy.
        served_model_name: The name in the API; the default is ``model``.
    """

    argument_limits: ClassVar[Limits]
    environment_limits: ClassVar[Limits]

    model: str = field(kw_only=False, converter=_path, validator=_model)
    revision: str | None = field(default=None, validator=_revision)
    args: tuple[str, ...] = field(default=(), converter=_words, validator=_texts)
    python: str = field(factory=lambda: sys.executable, converter=_path)
    env: Mapping[str, str] = field(factory=dict, converter=_own, validator=_texts, hash=False)
    cwd: str | None = field(default=None, converter=_optional_path)
    served_model_name: str | None = None

    @property
    def model_argument(self) -> str:
        """Return what the engine is given: the repository, or the absolute path of the directory."""
        return self.model if self.revision is not None else os.path.abspath(self.model)

    @property
    def served_model(self) -> str:
        """Return the name under which the engine serves its model."""
        return self.served_model_name or self.model_argument

    def described_refusals(self, *, gpu: bool) -> Iterator[UnsupportedError]:
        """Yield what arguments and environment ask for and cannot be done.

        Args:
            gpu: Whether the engine is to be placed on a GPU.
        """
        what = type(self).__name__
        for name, limit in self.argument_limits.of(self.args):
            yield UnsupportedError(f"{name} {limit.why}", field=f"{what}.args", works=limit.works)
        for name, value in sorted(self.env.items()):
            if refused := self.environment_limits.of_variable(name, value):
                yield UnsupportedError(f"{name} {refused.why}", field=f"{what}.env", works=refused.works)
        if gpu and "expandable_segments:True" in self.env.get("PYTORCH_CUDA_ALLOC_CONF", "").replace(" ", ""):
            why = "expandable_segments maps memory that the CUDA checkpoint does not save"
            yield UnsupportedError(why, field=f"{what}.env PYTORCH_CUDA_ALLOC_CONF", works="leaving it out")

    def identify(self, environ: Mapping[str, str]) -> ModelIdentity:
        """Read what the model is.

        Args:
            environ: The environment to start from, which may say where the hub's cache is.

        Raises:
            AdmissionError: Its files are missing, or it is of a kind that is not captured.
        """
        self.require_model(environ)
        if self.revision is not None:
            return identify_hub(self.model, self.revision, _hub_cache({**environ, **self.env}))
        return identify_directory(self.model_argument)

    def require_model(self, environ: Mapping[str, str]) -> None:
        """Refuse a model that is plainly not there, or of a kind that is not captured; its weights are not read.

        Args:
            environ: As for :meth:`identify`.

        Raises:
            AdmissionError: As for :meth:`identify`.
        """
        if self.revision is not None:
            identify_hub(self.model, self.revision, _hub_cache({**environ, **self.env}))
            return
        directory = Path(self.model_argument)
        config = read_config(directory)
        for limit in MODEL_LIMITS:
            if config.get(limit.key) is not None:
                raise UnsupportedError(f"{directory} {limit.why}", field=f"config.json {limit.key}", works=limit.works)

    def model_directory(self, environ: Mapping[str, str]) -> Path:
        """Return where the files of the model are.

        Args:
            environ: As for :meth:`identify`.
        """
        if self.revision is None:
            return Path(self.model_argument)
        return hub_snapshot(self.model, self.revision, _hub_cache({**environ, **self.env}))

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what is left of an environment that was not asked for: names refused in ``env=`` are left out."""
        limits = self.environment_limits
        return {name: value for name, value in environ.items() if not limits.of_variable(name, value)}

    def size(self, *names: str) -> int:
        """Return the number that an option asks for, 1 by default.

        Args:
            names: Its spellings, the usual one first.

        Raises:
            AdmissionError: It is no positive number.
        """
        value = last_value(self.args, *names, default="1")
        if not value.isdigit() or int(value) < 1:
            raise AdmissionError(f"{names[0]} must be a positive number, found {value!r}")
        return int(value)


def with_item(listed: str, item: str) -> str:
    """Return a list with commas that has an item at its end, unless it had it."""
    items = [name for name in listed.split(",") if name]
    return ",".join(items if item in items else [*items, item])


def without_expandable_segments(options: str) -> str:
    """Return options of torch's CUDA allocator with expandable segments off: the CUDA checkpoint refuses them."""
    kept = [option for option in options.split(",") if option and not option.strip().startswith("expandable_segments")]
    return ",".join([*kept, "expandable_segments:False"])


def _hub_cache(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
