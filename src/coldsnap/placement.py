"""Where an operation takes place: units on hosts. Frozen data; nothing here looks at a machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from attrs import field, frozen

from coldsnap.errors import PolicyError

__all__ = ["Placement", "UnitPlacement", "absolute", "absolute_each", "local", "optional_absolute"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _port(_instance: object, _attribute: object, value: int) -> None:
    if not 1 <= value <= 65535:
        raise PolicyError(
            [("$.placement.port", f"expected a TCP port from 1 to 65535, found {value}")], what="operation"
        )


def _name(_instance: object, _attribute: object, value: str | None) -> None:
    if value is not None and not NAME.fullmatch(value):
        raise PolicyError(
            [("$.placement.name", f"expected letters, digits, '.', '_' and '-' (at most 64), found {value!r}")],
            what="operation",
        )


def absolute(value: str | os.PathLike[str]) -> str:
    """Return a path, absolute.

    Raises:
        PolicyError: It is no path.
    """
    try:
        text = os.fspath(value)
    except TypeError:
        raise PolicyError([("$", f"expected a path, found {value!r}")], what="operation") from None
    if not isinstance(text, str):
        raise PolicyError([("$", f"expected a path of text, found {text!r}")], what="operation")
    if not text or "\0" in text:
        # Of an empty one, as of an unset variable, the working directory would be made.
        raise PolicyError(
            [("$", f"expected paths that are not empty and without NUL, found {text!r}")], what="operation"
        )
    return os.path.abspath(text)


def absolute_each(value: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return one path or several, absolute."""
    # A text is a sequence of texts too: each letter of it would be a directory.
    return tuple(map(absolute, (value,) if isinstance(value, str | os.PathLike) else value))


def optional_absolute(value: str | os.PathLike[str] | None) -> str | None:
    """Return a path, absolute, or None."""
    return None if value is None else absolute(value)


@frozen(kw_only=True)
class UnitPlacement:
    """Where one unit (the processes of one host) lives.

    Attributes:
        unit: The unit's id, ``unit-0`` for the first.
        host: A host name of ``Facts.hosts``.
        devices: GPU ordinals on that host, in rank order; empty means none.
        address: The address the HTTP front end listens on.
        port: Its TCP port.
    """

    unit: str = "unit-0"
    host: str = "local"
    devices: tuple[int, ...] = ()
    address: str = "127.0.0.1"
    port: int = field(validator=_port)


@frozen(kw_only=True)
class Placement:
    """Units on hosts.

    Attributes:
        units: At least one; the first owns the HTTP front end.
        name: The name of the run directory below the run root; made up when ``None``.
        run_dir: The run directory itself, absolute; overrides ``name``.
    """

    units: tuple[UnitPlacement, ...]
    name: str | None = field(default=None, validator=_name)
    run_dir: str | None = field(default=None, converter=optional_absolute)

    def __attrs_post_init__(self) -> None:
        ids = [unit.unit for unit in self.units]
        if not ids or len(set(ids)) != len(ids):
            raise PolicyError(
                [("$.placement.units", f"expected distinct units, at least one, found {ids}")], what="operation"
            )

    @property
    def front(self) -> UnitPlacement:
        """Return the unit with the HTTP front end."""
        return self.units[0]


def local(
    *,
    port: int,
    address: str = "127.0.0.1",
    devices: Sequence[int] = (),
    name: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> Placement:
    """Place everything on the probed host ``local``.

    Args:
        port: The TCP port of the HTTP front end.
        address: The address it listens on.
        devices: GPU ordinals in rank order.
        name: The name of the run directory below the run root.
        run_dir: The run directory itself.

    Raises:
        PolicyError: A port outside 1 to 65535, or a name that cannot be a directory name.
    """
    unit = UnitPlacement(devices=tuple(devices), address=address, port=port)
    return Placement(units=(unit,), name=name, run_dir=None if run_dir is None else os.fspath(run_dir))
