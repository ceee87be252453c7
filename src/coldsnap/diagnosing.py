"""Look at a running server and say what would block or spoil its capture, before anything is stopped.

The one rule: only look. Nothing is paused, attached to or written, and the GPU's driver is not asked; so it is safe
beside a server in production, and what only the driver knows is named as unknown.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from attrs import frozen

from coldsnap.drivers.audit import look
from coldsnap.drivers.findings import Finding, Severity, host_finding
from coldsnap.drivers.subject import Subject
from coldsnap.engines.settings import DIRECTIVE
from coldsnap.errors import AdmissionError
from coldsnap.host.criu import find_criu
from coldsnap.host.doctor import named_problems, slow_restores
from coldsnap.host.kernel import KernelFiles
from coldsnap.host.mounts import filesystem_of
from coldsnap.host.probe import probe_kernel, probe_privileges
from coldsnap.host.record import canonical, load_record, to_plain
from coldsnap.keeper.kernel import KEEPER
from coldsnap.keeper.tree import Process, below, scan

__all__ = ["Diagnosis", "diagnose"]

FORMAT = 1
KIND = "coldsnap-diagnosis"
SEVERITIES: tuple[str, ...] = ("blocks", "spoils", "note")


@frozen(kw_only=True)
class Diagnosis:
    """What would block or spoil a capture of a server.

    Attributes:
        pid: The root of its process tree.
        comm: Its name.
        launched: Whether ColdSnap launched it.
        first_step: The first thing to do, in one line: for a foreign server, how to launch it.
        pids: Every process of the tree, the root first.
        findings: What was found, the worst first.
        seconds: How long it took, s.
        created_unix_ns: When.
    """

    pid: int
    comm: str
    launched: bool
    first_step: str
    pids: tuple[int, ...]
    findings: tuple[Finding, ...]
    seconds: float
    created_unix_ns: int

    def of(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(found for found in self.findings if found.severity == severity)

    @property
    def blocked(self) -> bool:
        """Whether a capture would be refused."""
        return bool(self.of("blocks"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON text."""
        Path(path).write_text(canonical({"format": FORMAT, "kind": KIND, **to_plain(self)}) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Diagnosis:
        """Read one that was saved.

        Raises:
            FormatError: It is no such file.
        """
        return load_record(cls, Path(path).read_text(), where=os.fspath(path), kind=KIND, version=FORMAT)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.of(severity))} {severity}" for severity in SEVERITIES)
        lines = [self.first_step, f"{len(self.pids)} processes below {self.pid} ({self.comm}): {counts}"]
        for found in self.findings:
            lines += [f"  {found.severity:<6} {found}", f"         why: {found.why}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _row(found))}</tr>" for found in self.findings
        )
        head = "<tr><th>severity</th><th>process</th><th>what</th><th>why</th><th>what to do</th></tr>"
        return f"<b>{html.escape(self.first_step)}</b><table>{head}{cells}</table>"


def _row(found: Finding) -> tuple[str, ...]:
    where = f"{found.pid} ({found.comm})" if found.pid else "the machine"
    return found.severity, where, found.what, found.why, found.remedy


def diagnose(
    pid: int, *, criu: str | os.PathLike[str] | None = None, secrets: Severity = "blocks", namespace: str = "private"
) -> Diagnosis:
    """Say what would block or spoil a capture of a running server, without touching it.

    Args:
        pid: The root of its process tree, for example what ``vllm serve`` runs as; its descendants belong to it.
        criu: The CRIU to use, as for ``probe``.
        secrets: How severe an environment name is that looks secret; ``note`` for ``process.secrets = "allow"``.
        namespace: ``process.namespace`` of the policy.

    Raises:
        AdmissionError: There is no such process, it is another user's and may not be looked at, or it is the keeper of
            an engine instead of the engine.
    """
    began, created = time.monotonic(), time.time_ns()
    processes = _tree(pid)
    _require_no_keeper(processes)
    proc_fd = os.open("/proc", os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    try:
        root = Subject(processes[0], proc_fd)
        launched = DIRECTIVE in root.environment_names
        audit = look(processes, proc_fd, secrets=secrets, own=_own(root))
        arguments = [word for word in root.read("cmdline").split("\0") if word]
    except PermissionError as error:
        raise AdmissionError(
            f"process {pid} belongs to another user, whose processes this one may not look at; run it as root"
        ) from error
    finally:
        os.close(proc_fd)
    own = () if launched else (root.finding("foreign"),)
    found = (*own, *_about_the_machine(criu, namespace), *audit.findings)
    return Diagnosis(
        pid=pid,
        comm=processes[0].comm,
        launched=launched,
        first_step=_first_step(processes[0], arguments, launched=launched),
        pids=audit.pids,
        findings=tuple(sorted(found, key=lambda each: SEVERITIES.index(each.severity))),
        seconds=time.monotonic() - began,
        created_unix_ns=created,
    )


def _tree(pid: int) -> list[Process]:
    every = scan()
    if pid not in every or every[pid].state == "Z":
        raise AdmissionError(f"there is no process {pid} to look at; name the root of a server that runs")
    tree = sorted(below(every, pid), key=lambda each: (each != pid, each))
    return [every[each] for each in tree if every[each].state != "Z"]


def _require_no_keeper(tree: list[Process]) -> None:
    """Refuse a keeper or its guard: they stay when the engine is captured, and nothing is wrong with them."""
    root = tree[0].pid
    for keeper in (each for each in tree if each.comm == KEEPER and root in (each.pid, each.ppid)):
        engines = [each for each in tree if each.ppid == keeper.pid]
        told = f"name {engines[0].pid} ({engines[0].comm}) instead" if engines else "it has no engine now"
        raise AdmissionError(f"process {root} keeps an engine, and the engine is what can be looked at: {told}")


def _own(root: Subject) -> tuple[str, ...]:
    """Return the directory of an engine's directive: what lies there is made anew at every restore."""
    entries = (entry.partition("=") for entry in root.read("environ").split("\0"))
    return tuple(os.path.dirname(path) for name, _, path in entries if name == DIRECTIVE)


def _about_the_machine(criu: str | os.PathLike[str] | None, namespace: str) -> Iterator[Finding]:
    kernel = KernelFiles()
    privileges = probe_privileges(kernel)
    boot_id = kernel.text("/proc/sys/kernel/random/boot_id") or "unknown"
    found = find_criu(criu, boot_id=boot_id, privileges=privileges)
    facts = probe_kernel(kernel, privileges)
    slow = slow_restores(facts.transparent_huge_pages, filesystem_of("/run", kernel).type)
    for kind, sentence in (*named_problems(found, privileges, facts.namespaces, namespace=namespace), *slow):
        yield host_finding(kind, sentence)


def _first_step(root: Process, arguments: list[str], *, launched: bool) -> str:
    who = f"process {root.pid} ({root.comm})"
    if launched:
        return f"{who} was launched by ColdSnap: capture it with Capture(Engine.attach(NAME), output=…)"
    model, port = _served(arguments)
    if root.pid == 1:
        stop = (
            "it is the first process of its machine or container, which ends with it: start the server below another "
            "first process, and then run"
        )
    else:
        stop = "stop it and run"
    spec = f"VLLM({model!r}, args=(…))" if model else "VLLM(MODEL, args=(…))"
    return (
        f"{who} was not launched by ColdSnap: {stop} "
        f"execute(resolve(policy, Launch({spec}, placement=local(port={port})), probe()))"
    )


def _served(arguments: list[str]) -> tuple[str, str]:
    """Return model and port of a vLLM command line; other arguments are not repeated, they may hold secrets."""
    options = dict(pairwise(arguments))
    options |= dict(word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    model = options.get("serve") or options.get("--model") or ""
    port = options.get("--port", "8000")
    return ("" if model.startswith("-") else model), port if port.isdigit() else "8000"
