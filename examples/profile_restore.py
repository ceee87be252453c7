"""Restore an artifact and say where the time went: our steps, CRIU's phases, every process; then stop the engine.

    python examples/profile_restore.py ARTIFACT [--port 8000] [--json FILE]

Faults and processor time are counts: unlike the seconds they mean the same on a busy machine. A mean load above the
number of processors says that the seconds are those of a queue.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

import coldsnap as cs
from coldsnap.drivers.dump import IMAGES, opened_directory
from coldsnap.drivers.pagemap import PAGE_BYTES, Pagemap

LINE = re.compile(r"\((\d+\.\d+)\) +(?:pie: +)?(?:(\d+): )?(.*)")
IMAGES_OPENED = "Reading image tree"
RESTORER = "Switched to the restorer"
COPIED = re.compile(r"`- returned (\d+)")
TICKS = os.sysconf("SC_CLK_TCK")


@frozen(kw_only=True)
class Phase:
    """A stretch of CRIU's work; those of processes overlap.

    Attributes:
        name: What it did.
        start_s: Since CRIU began, s.
        seconds: How long, s.
        bytes: Memory copied in, 0 where that is not what it did.
    """

    name: str
    start_s: float
    seconds: float
    bytes: int = 0


@frozen(kw_only=True)
class Restored:
    """A process of the restored tree, after its first answer.

    Attributes:
        pid: In its own namespace.
        comm: Its name.
        threads: How many.
        mappings: How many.
        image_bytes: Its private pages in the image.
        faults: Page faults that needed no disk.
        huge_bytes: Its memory in transparent huge pages.
        system_s: Processor time in the kernel, s.
        user_s: Processor time outside, s.
        sockets: Descriptors of sockets.
    """

    pid: int
    comm: str
    threads: int
    mappings: int
    image_bytes: int
    faults: int
    huge_bytes: int
    system_s: float
    user_s: float
    sockets: int


def main(argv: Sequence[str] | None = None) -> int:
    """Restore, look, stop, print."""
    options = arguments(argv)
    facts = cs.probe(criu=options.criu)
    operation = cs.Restore(cs.Artifact.open(options.artifact), placement=cs.local(port=options.port, name=options.name))
    try:
        report = cs.execute(cs.resolve(cs.Policy(), operation, facts))
    except cs.ColdSnapError as error:
        print(f"not restored: {error}", file=sys.stderr)
        return 1
    with report.serving as engine:
        phases = criu_phases((engine.run_dir / "work" / "restore.log").read_text(errors="replace").splitlines())
        processes = restored(engine, Path(options.artifact))
    machine = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "load": os.getloadavg()[0],
        "processors": len(os.sched_getaffinity(0)),
        "huge_pages": facts.host("local").kernel.transparent_huge_pages,
    }
    print(told(machine, report, phases, processes))
    if options.json:
        steps = {span.name: span.seconds for span in report.timeline.spans}
        found = {"machine": machine, "steps_s": steps, "answer_s": report.answer_s}
        found |= {"criu": [asdict(one) for one in phases], "processes": [asdict(one) for one in processes]}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def criu_phases(log: Iterable[str]) -> list[Phase]:
    """Read CRIU's log of a restore.

    Args:
        log: Its lines, at level 4.
    """
    opened, end, restorer, copied = 0.0, 0.0, dict[str, float](), dict[str, tuple[float, int]]()
    for match in filter(None, map(LINE.match, log)):
        end, pid, text = float(match[1]), match[2] or "", match[3]
        if text.startswith(IMAGES_OPENED):
            opened = end
        elif RESTORER in text:
            restorer[pid] = end
        elif (size := COPIED.search(text)) and pid in restorer:
            copied[pid] = end, copied.get(pid, (0.0, 0))[1] + int(size[1])
    first = min(restorer.values(), default=end)
    last = max((at for at, _ in copied.values()), default=first)
    each = [
        Phase(name=f"memory of {pid}", start_s=restorer[pid], seconds=at - restorer[pid], bytes=size)
        for pid, (at, size) in sorted(copied.items(), key=lambda one: int(one[0]))
    ]
    return [
        Phase(name="asking the kernel what it can", start_s=0.0, seconds=opened),
        Phase(name="images, files, processes", start_s=opened, seconds=first - opened),
        *each,
        Phase(name="the rest: threads, registers, timers", start_s=last, seconds=end - last),
    ]


def restored(engine: cs.Engine, artifact: Path) -> list[Restored]:
    """Look at every process of a restored engine."""
    (capsule,) = cs.Artifact.open(artifact).descriptor.capsule.units
    with opened_directory(artifact / capsule.path / IMAGES) as images_fd:
        return [_process(engine.keeper.proc_fd, process.pid, images_fd) for process in engine.processes()]


def _process(proc_fd: int, pid: int, images_fd: int) -> Restored:
    def read(name: str) -> str:
        with open(os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=proc_fd), errors="replace") as file:
            return file.read()

    head, _, tail = read("stat").rpartition(")")
    stat = tail.split()  # proc(5) counts from 1, and this begins with the third field
    huge = re.search(r"AnonHugePages: +(\d+)", read("smaps_rollup"))
    fds = os.open(f"{pid}/fd", os.O_RDONLY, dir_fd=proc_fd)
    try:
        links = [os.readlink(name, dir_fd=fds) for name in os.listdir(fds)]
    finally:
        os.close(fds)
    return Restored(
        pid=pid,
        comm=head.partition("(")[2],
        threads=int(stat[17]),
        mappings=read("maps").count("\n"),
        image_bytes=PAGE_BYTES * Pagemap.read(images_fd, f"pagemap-{pid}.img").pages,
        faults=int(stat[7]),
        huge_bytes=int(huge[1]) << 10 if huge else 0,
        system_s=int(stat[12]) / TICKS,
        user_s=int(stat[11]) / TICKS,
        sockets=sum(link.startswith("socket:") for link in links),
    )


def told(machine: dict[str, Any], report: cs.Report, phases: Sequence[Phase], processes: Sequence[Restored]) -> str:
    """Return the tables."""
    where = f"{machine['date']}, load {machine['load']:.1f} on {machine['processors']} processors"
    what = f"transparent huge pages: {machine['huge_pages']}; first token after {report.answer_s:.3f} s"
    lines = [f"{where}, {what}", "", str(report.timeline), "", "CRIU, since it began:"]
    for one in phases:
        size = f"{one.bytes / 1e6:9.1f} MB" if one.bytes else ""
        lines.append(f"  {one.name:<38} {one.start_s:7.3f} s {one.seconds:8.3f} s {size}")
    lines += ["", "  pid  name             threads  mappings  image MB   faults  huge MB  system s  user s  sockets"]
    lines += [
        f"{one.pid:>5}  {one.comm:<15} {one.threads:>8} {one.mappings:>9} {one.image_bytes / 1e6:>9.1f} "
        f"{one.faults:>8} {one.huge_bytes / 1e6:>8.1f} {one.system_s:>9.2f} {one.user_s:>7.2f} {one.sockets:>8}"
        for one in processes
    ]
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", help="name of the engine while it runs; made up when not given")
    parser.add_argument("--json", help="write the figures to this file too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
