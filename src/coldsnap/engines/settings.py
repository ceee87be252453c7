"""Environment names of the table, read and written: what a launch sets, what a user may, what a rank was told.

The one rule: the environment is read and written here alone. The module loads inside engine ranks: it needs attrs and
nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coldsnap.engines.setting_table import DIRECTIVE, SETTINGS, Engine, Owner, Setting
from coldsnap.errors import AdmissionError
from coldsnap.keeper.allowed import is_transport

if TYPE_CHECKING:
    from coldsnap.policy import Policy
__all__ = [
    "DIRECTIVE",
    "INHERITED",
    "PREFIX",
    "SETTINGS",
    "Engine",
    "Owner",
    "Setting",
    "check_user_environment",
    "directive_path",
    "inherited_environment",
    "project",
    "setting",
    "transport_environment",
]

PREFIX = "COLDSNAP_"

# What finds programs, libraries, devices, caches and a locale here; nothing that may hold a credential.
INHERITED = frozenset(
    {
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NVIDIA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "PATH",
        "TRANSFORMERS_OFFLINE",
        "TZ",
        "USER",
        "XDG_CACHE_HOME",
    }
)

_BY_NAME: Mapping[str, Setting] = {row.name: row for row in SETTINGS}


def project(policy: Policy, engine: Engine, extra: Mapping[str, str]) -> dict[str, str]:
    """Write a resolved policy as the environment of an engine's first launch.

    Args:
        policy: The policy after ``resolve``; no leaf of it is refused or unsettled.
        engine: The engine.
        extra: Values that are no matter of policy, by name, such as the path of the directive.

    Returns:
        Names and values of the rows that this version acts on.

    Raises:
        AdmissionError: ``extra`` has a name that is not in the table, not read by this engine or not acted on.
    """
    wrong = [f"{name} {_objection(name, engine)}" for name in extra if _objection(name, engine)]
    if wrong:
        raise AdmissionError(f"the environment of a {engine} launch has names that nothing would act on:", wrong)
    rows = (row for row in SETTINGS if row.implemented and row.read_by(engine))
    values = {row.name: text for row in rows if (text := row.value(policy)) is not None}
    return values | dict(extra)


def check_user_environment(env: Mapping[str, str], engine: Engine) -> None:
    """Refuse names in an engine's ``env=`` that are the library's own, unknown, or without effect.

    Args:
        env: What the user gave; names without the prefix are not looked at.
        engine: The engine it is for.

    Raises:
        AdmissionError: Every such name, never a value.
    """
    names = sorted(name for name in env if name.startswith(PREFIX))
    wrong = [f"{name} {text}" for name in names if (text := _user_objection(name, engine))]
    if wrong:
        raise AdmissionError(f"the environment given to the {engine} engine sets names it must not:", wrong)


def _user_objection(name: str, engine: Engine) -> str:
    row = _BY_NAME.get(name)
    if row is None or row.owner == "user":
        return _objection(name, engine)
    instead = f"set the policy's {row.path} instead" if row.path else "drop it"
    return f"is set by this library alone; {instead}"


def _objection(name: str, engine: Engine) -> str:
    row = _BY_NAME.get(name)
    if row is None:
        import difflib  # noqa: PLC0415  ranks never get here

        close = difflib.get_close_matches(name, _BY_NAME, n=1)
        return f"is no name of this library{f'; did you mean {close[0]}?' if close else ''}"
    if not row.read_by(engine):
        return f"is read by {row.engine} only; drop it"
    return "" if row.implemented else "has no effect in this version; drop it"


def directive_path(environ: Mapping[str, str] | None = None) -> str | None:
    """Return where a rank finds its directive, or ``None`` in a process that this library did not launch.

    Args:
        environ: Defaults to the process's own environment.
    """
    return (os.environ if environ is None else environ).get(DIRECTIVE) or None


def setting(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return what a rank was told under a name of the table, or the default.

    Args:
        name: One that this version acts on.
        environ: Defaults to the process's own environment.
    """
    return (os.environ if environ is None else environ).get(name) or _BY_NAME[name].default


def inherited_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the part of the caller's environment that an engine inherits.

    An allow-list, because the whole environment of a process ends up in its image: a token exported in the caller's
    shell must not. Anything else is given in ``env=``, where a plan shows it.

    Args:
        environ: Defaults to the process's own environment.
    """
    source = os.environ if environ is None else environ
    return {name: value for name, value in source.items() if name in INHERITED or name.startswith("LC_")}


def transport_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return how peers are reached from here: what a restored template takes in place of the names of its capture."""
    return {name: value for name, value in (environ or os.environ).items() if is_transport(name)}
