"""Where a template waits: ``<this file> pre_exec <command>``, or ``imported <names of modules> <command>``.

The one rule: until the directive lets it go on, the process has one thread of ours, no descriptor but its output, and,
before ``exec``, nothing but the standard library; what it may become is its own command at another place.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

if __name__ == "__main__" and sys.flags.no_site:  # else it was found by -m, beside all that is installed
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from coldsnap.keeper import allowed

__all__ = ["KIND", "MODULE", "READY", "TRANSPORT", "TRANSPORT_KIND", "accelerators", "command_at", "main"]

KIND = "coldsnap-process-template"
TRANSPORT_KIND = "coldsnap-restore-transport-environment"
TRANSPORT_PATH = "COLDSNAP_RESTORE_TRANSPORT_ENVIRONMENT_PATH"
DIRECTIVE = "COLDSNAP_DIRECTIVE"
MODULE = "coldsnap.keeper.template"
READY = "template.json"
TRANSPORT: Literal["transport.json"] = "transport.json"

_POLL_S = 0.01
_MAX_BYTES = 64 << 10
_REFUSED = 78  # EX_CONFIG of sysexits(3): what it was told is not what it may do
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/infiniband", "/dev/kfd")
_LIBRARY = re.compile(r"/(libcuda\.so|libcudadebugger\.so|libnvidia-)[^/]*$")
_START = {"unit", "phase", "load_format", "environment", "transport"}


def accelerators(links: Sequence[str], maps: str) -> list[str]:
    """Return what of an accelerator a process has: devices that are open or mapped, and libraries of a driver.

    Args:
        links: What its descriptors lead to.
        maps: Its ``/proc/<pid>/maps``.
    """
    found = {f"{link} is open" for link in links if link.startswith(_DEVICES)}
    for line in maps.splitlines():
        path = line.split(None, 5)[5] if len(line.split(None, 5)) == 6 else ""
        if path.startswith(_DEVICES):
            found.add(f"{path} is mapped")
        elif _LIBRARY.search(path):
            found.add(f"{path} is loaded")
    return sorted(found)


def command_at(command: Sequence[str], host: str, port: int, load_format: str | None) -> list[str]:
    """Return the command at another place.

    Args:
        command: With ``--host`` and ``--port``, each once and followed by its value.
        host: Where it is to listen.
        port: As above.
        load_format: The value of ``--load-format``; None leaves what the command says.

    Raises:
        ValueError: It has one of them not at all, or twice.
    """
    placed = list(command)
    for name, value in (("--host", host), ("--port", str(port))):
        at = [index for index, word in enumerate(placed[:-1]) if word == name]
        if len(at) != 1:
            raise ValueError(f"the command has {name} {len(at)} times, a template needs it once")
        placed[at[0] + 1] = value
    if load_format is None:
        return placed
    while "--load-format" in placed:
        at_format = placed.index("--load-format")
        del placed[at_format : at_format + 2]
    return [*(word for word in placed if not word.startswith("--load-format=")), "--load-format", load_format]


class _Waiting:
    """One template, from its start until it goes on."""

    def __init__(self, phase: str, command: list[str]) -> None:
        self.phase, self.command = phase, command
        self.directive = os.environ[DIRECTIVE]
        self.seen: tuple[int, int] | None = None

    def announce(self) -> None:
        """Say that it stands still, and what it finds in itself."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                continue  # the listing's own descriptor
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            found = accelerators(links, file.read())
        text = json.dumps({"format": 1, "kind": KIND, "pid": os.getpid(), "phase": self.phase, "accelerators": found})
        directory = os.path.dirname(self.directive)
        temporary = os.path.join(directory, f".{READY}.{os.getpid()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, os.path.join(directory, READY))

    def start(self) -> dict[str, Any]:
        """Wait for a directive that lets it go on, and return that."""
        while True:
            try:
                status = os.stat(self.directive, follow_symlinks=False)
                if (now := (status.st_ino, status.st_mtime_ns)) != self.seen:
                    self.seen = now
                    directive = _read(self.directive)
                    if "start" in directive:
                        return directive
            except FileNotFoundError:
                pass  # the run directory of a restore is just being put in its place
            time.sleep(_POLL_S)

    def placed(self, directive: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of the engine, where the directive says.

        Raises:
            ValueError: It may not be moved so.
        """
        start = directive["start"]
        if set(start) - _START or start.get("phase") != self.phase or not isinstance(start.get("unit"), str):
            raise ValueError(f"the directive's start is not for a template that waits at {self.phase}: {start!r}"[:500])
        host, port = directive["endpoint"]["host"], directive["endpoint"]["port"]
        if type(host) is not str or not re.fullmatch(r"[0-9A-Za-z.:_-]{1,255}", host):
            raise ValueError(f"the directive's host is no address: {host!r}"[:200])
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError(f"the directive's port is not between 1 and 65535: {port!r}"[:200])
        command = command_at(self.command, host, port, start.get("load_format"))
        environment = dict(os.environ)
        if directive["operation"] == "restore":
            environment = self._at_destination(environment, directive)
        return command, environment

    def _at_destination(self, environment: Mapping[str, str], directive: Mapping[str, Any]) -> dict[str, str]:
        start = directive["start"]
        runtime = start.get("environment", {})
        if wrong := allowed.problem(runtime, transport=False):
            raise ValueError(f"the directive's environment: {wrong}")
        transport = None
        if start.get("transport") is not None:
            path = os.path.join(os.path.dirname(self.directive), TRANSPORT)
            transport = _transport(path, unit=start["unit"], incarnation=directive["incarnation"])
            environment = {**environment, TRANSPORT_PATH: path}
        return allowed.placed(environment, runtime, transport)


def _transport(path: str, *, unit: str, incarnation: str) -> dict[str, str]:
    document = _read(path)
    expected = {"format": 1, "kind": TRANSPORT_KIND, "unit": unit, "incarnation": incarnation}
    if set(document) != {*expected, "variables"}:
        raise ValueError(f"{path} has the fields {', '.join(sorted(document))}, expected {', '.join(sorted(expected))}")
    for name, value in expected.items():
        if type(document[name]) is not type(value) or document[name] != value:
            raise ValueError(
                f"{path} was not written for this restore: {name} is {document[name]!r}, expected {value!r}"
            )
    variables = document["variables"]
    if type(variables) is not dict or (wrong := allowed.problem(variables, transport=True)):
        raise ValueError(f"{path}: {wrong if type(variables) is dict else 'variables is no object'}")
    return variables


def _read(path: str) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o077:
            raise ValueError(f"{path} is not a private file of this user")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise TypeError(f"{path} holds no JSON object")
    return document


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the module of ``python -m module …`` in this process, which has imported it already."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    sys.argv = list(command[2:])
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    sys.exit(0)


def main(arguments: Sequence[str]) -> NoReturn:
    """Wait, then become the engine.

    Args:
        arguments: The phase; for ``imported`` the names of modules, separated by commas; then the command.
    """
    phase, *command = arguments
    if phase == "imported":
        names, *command = command
        for name in names.split(","):
            importlib.import_module(name)
    waiting = _Waiting(phase, command)
    waiting.announce()
    try:
        command, environment = waiting.placed(waiting.start())
    except (KeyError, TypeError, ValueError, OSError) as error:
        sys.stderr.write(f"[coldsnap] template {os.getpid()}: it does not go on: {error}\n")
        sys.stderr.flush()
        os._exit(_REFUSED)
    if phase == "pre_exec":
        os.execvpe(command[0], command, environment)  # noqa: S606 - there is no shell, on purpose
    _become(command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
