"""``directive.json``, which tells every rank what it is now, and the acknowledgements of the ranks.

A restored rank has the environment, the code and the paths of its capture; what changed since stands in the
directive, at a path fixed at launch. The one rule: whoever reads either file gets a typed object or a FormatError
with its rule.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from typing import Literal, Self, TypeAlias

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.private import require_private
from coldsnap.keeper import layout
from coldsnap.keeper.layout import IN_PROCESS_DIR, TMP_DIR
from coldsnap.keeper.start import Checkpoint, Export, Hydration, Loader, Start, WorkerSource

__all__ = [
    "ACCEPTED_ABIS",
    "DIRECTIVE_VARIABLE",
    "FORMAT",
    "IN_PROCESS_DIR",
    "PLUGIN_ABI",
    "TMP_DIR",
    "Ack",
    "Checkpoint",
    "Directive",
    "Endpoint",
    "Export",
    "Hydration",
    "Loader",
    "Provider",
    "Start",
    "WorkerSource",
    "new_incarnation",
    "read_acks",
    "read_directive",
    "write_directive",
]

FORMAT: Literal[1] = 1
PLUGIN_ABI = 1
# Of ranks that this library can restore: its own, and the one before when there was one.
ACCEPTED_ABIS = frozenset({PLUGIN_ABI, max(1, PLUGIN_ABI - 1)})
DIRECTIVE_VARIABLE = "COLDSNAP_DIRECTIVE"

Provider: TypeAlias = Literal["image", "native", "recovery", "checkpoint"]

_MAX_BYTES = 64 << 10


@frozen(kw_only=True)
class Endpoint:
    """Where the engine answers.

    Attributes:
        host: Address or name.
        port: TCP port.
    """

    host: str
    port: int = field(validator=record.at_least(1))

    @property
    def url(self) -> str:
        """``http://host:port``, an IPv6 address in brackets."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@frozen(kw_only=True)
class Directive:
    """What a rank is told.

    Attributes:
        format: Of this file.
        plugin_abi: What the ranks speak.
        incarnation: 32 hex digits, new at every launch and every restore.
        operation: What brought the ranks up.
        seed: 16 hex digits, for the randomness that the user did not seed.
        provider: Where the weights come from.
        endpoint: Where the engine answers.
        created_unix_ns: When it was written.
        start: Lets a template go on; absent, it waits.
        hydration: What the load of a started engine reads, for the providers native and recovery.
        export: What the load of a captured engine writes for such a start.
        checkpoint: Where the load format coldsnap finds the checkpoint, for a load that is not native.
    """

    format: Literal[1] = FORMAT
    plugin_abi: int = field(default=PLUGIN_ABI, validator=record.at_least(1))
    incarnation: str = field(validator=record.matching("[0-9a-f]{32}", "32 hex digits"))
    operation: Literal["launch", "restore"]
    seed: str = field(validator=record.matching("[0-9a-f]{16}", "16 hex digits"))
    provider: Provider = "image"
    endpoint: Endpoint
    created_unix_ns: int = field(validator=record.at_least(0))
    start: Start | None = None
    hydration: Hydration | None = None
    export: Export | None = None
    checkpoint: Checkpoint | None = None

    @property
    def fills(self) -> bool:
        """Tell whether a load is brought byte by byte, out of packs or files, and not by the engine's own loader."""
        return self.provider == "native" or (self.provider == "recovery" and self.hydration is not None)

    @classmethod
    def new(
        cls,
        *,
        operation: Literal["launch", "restore"],
        endpoint: Endpoint,
        provider: Provider = "image",
        plugin_abi: int = PLUGIN_ABI,
    ) -> Self:
        """Make a directive with an incarnation and a seed that nobody had before."""
        return cls(
            plugin_abi=plugin_abi,
            incarnation=new_incarnation(),
            operation=operation,
            seed=secrets.token_hex(8),
            provider=provider,
            endpoint=endpoint,
            created_unix_ns=time.time_ns(),
        )


@frozen(kw_only=True)
class Ack:
    """What a rank answered to its directive.

    Attributes:
        pid: In the tree's namespace.
        role: ``api``, ``engine`` or ``worker``.
        incarnation: That it has taken.
        plugin_abi: That it speaks.
        engine: Name of the engine.
        versions: By distribution name.
        reseeded: The generators that were seeded anew.
    """

    pid: int
    role: str
    incarnation: str
    plugin_abi: int
    engine: str
    versions: Mapping[str, str]
    reseeded: tuple[str, ...]


def new_incarnation() -> str:
    """Return 32 random hex digits."""
    return secrets.token_hex(16)


def write_directive(rank_dir: str | os.PathLike[str], directive: Directive) -> None:
    """Replace the directive; a rank that reads at this moment sees the old one or the new one, whole."""
    dir_fd = os.open(rank_dir, layout.DIRECTORY)
    try:
        layout.replace(dir_fd, layout.DIRECTIVE, canonical.encode(record.write(directive)))
    finally:
        os.close(dir_fd)


def read_directive(path: str | os.PathLike[str]) -> Directive:
    """Read a directive.

    Raises:
        FormatError: It breaks a rule of docs/format/json.md, or it is not ours alone (evidence.1 to evidence.3).
        OSError: It cannot be read, or is a symbolic link.
    """
    return record.read(Directive, canonical.decode(_read(path), path=str(path), max_bytes=_MAX_BYTES), path=str(path))


def read_acks(rank_dir: str | os.PathLike[str]) -> tuple[Ack, ...]:
    """Read what the ranks answered so far, by pid.

    Raises:
        FormatError: One breaks a rule of docs/format/json.md.
    """
    directory = os.path.join(rank_dir, layout.ACK)
    paths = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".json")]
    acks = [
        record.read(Ack, canonical.decode(_read(path), path=path, max_bytes=_MAX_BYTES, exact=False), path=path)
        for path in paths
    ]
    return tuple(sorted(acks, key=lambda ack: ack.pid))


def _read(path: str | os.PathLike[str]) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        require_private(os.fstat(stream.fileno()), os.fspath(path), "file")
        return stream.read(_MAX_BYTES + 1)
