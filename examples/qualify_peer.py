"""Restores of this library beside those of vLLM's own snapshot: the same model, the same machine and run, in turns.

    python examples/qualify_peer.py --python ENGINE_PYTHON [--criu CRIU] [--rounds 5] [--work DIR] [--json FILE]

Both start one vLLM server of a tiny model, dump it with the same CRIU, and restore it in turns from files that are in
the page cache. Each restore is timed from the call that asks for it to the first token of an answer: this library's
from before ``probe()`` (admission and verification are in it), vLLM's from ``restore_snapshot()``. Then both must give
the same tokens. Processor time counts the caller, CRIU and the restored tree: unlike the seconds it means nearly the
same on a busy machine. It runs where there is no GPU (what that takes: ``vllm_snapshot.py``), as root, and needs a vLLM
that has ``vllm.snapshot`` (0.31), util-linux and a C compiler.

``--json`` writes: ``machine``, ``load`` (before and after), ``restores`` (name → ``first_token_s``, ``processor_s``, a
list each), ``medians``, ``ratio`` (of the medians of seconds, this library's to vLLM's), ``processor_ratio``,
``capture_s``, ``bytes``, ``failed`` (why a restore of vLLM's failed; it is in no median), ``exact``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import coldsnap as cs
import quickstart  # type: ignore[import-not-found]  # beside this script

OURS, PEER = "coldsnap", "vllm snapshot"
TICKS = os.sysconf("SC_CLK_TCK")
CREATE_S, RESTORE_S = 900.0, 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 0 when every restored server gave the same tokens."""
    options = arguments(argv)
    if cs.probe(criu=options.criu).host("local").gpus:
        print("this comparison stands in for NVIDIA's tools, and here they are real: run it without a GPU")
        return 1
    try:
        with quickstart.workspace(options.work) as work:
            result = measure(work, options)
    except (cs.ColdSnapError, PeerError) as error:
        print(f"\nthe comparison failed: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["exact"] else 1


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Capture both ways, restore both ways in turns; return the figures."""
    engine = quickstart.tiny_vllm(work, options)
    load = [os.getloadavg()[0]]
    artifact, capture_s = quickstart.capture(engine, work / "artifact", options)
    restores: dict[str, dict[str, list[float]]] = {
        name: {"first_token_s": [], "processor_s": []} for name in (OURS, PEER)
    }
    answers, failed = list[list[int]](), list[str]()
    with Peer(work / "peer", engine, options) as peer:
        quickstart.say("vLLM starts a server and makes its snapshot")
        created = peer.do("create", timeout_s=CREATE_S)
        for number in range(options.rounds):
            quickstart.say(f"round {number + 1} of {options.rounds}")
            for name in (OURS, PEER) if number % 2 else (PEER, OURS):
                try:
                    took, answer = ours(artifact, engine, options) if name == OURS else peer.restored(options.port)
                except PeerError as error:  # the next round may do
                    failed.append(str(error))
                    print(f"  {name:<15} failed: {failed[-1].splitlines()[0]}", flush=True)
                    continue
                answers.append(answer)
                for key, value in took.items():
                    restores[name][key].append(value)
                print(f"  {name:<15} {took['first_token_s']:.3f} s, processors {took['processor_s']:.2f} s", flush=True)
    if not restores[PEER]["processor_s"]:
        raise PeerError(f"vLLM restored nothing: {failed[-1]}")
    medians = {name: {key: statistics.median(each) for key, each in row.items()} for name, row in restores.items()}
    return {
        "machine": quickstart.machine(),
        "load": [*load, os.getloadavg()[0]],
        "restores": restores,
        "medians": medians,
        "ratio": medians[OURS]["first_token_s"] / medians[PEER]["first_token_s"],
        "processor_ratio": medians[OURS]["processor_s"] / medians[PEER]["processor_s"],
        "capture_s": {OURS: capture_s, PEER: created["seconds"]},
        "bytes": {OURS: sum(artifact.size_bytes.values()), PEER: created["bytes"]},
        "failed": failed,
        "exact": all(answer == answers[0] and answer for answer in answers),
    }


def ours(artifact: cs.Artifact, engine: cs.VLLM, options: argparse.Namespace) -> tuple[dict[str, float], list[int]]:
    """Restore with this library, ask, stop."""
    into_page_cache(artifact.path)
    began, before = time.monotonic(), own_processor_s()
    plan = cs.resolve(
        cs.Policy(), cs.Restore(artifact, placement=quickstart.place(options)), cs.probe(criu=options.criu)
    )
    planned_s = time.monotonic() - began
    report = cs.execute(plan)
    with report.serving as restored:
        used = own_processor_s() - before + keeper_processor_s(restored)
        answer, _ = quickstart.ask(restored.endpoint.url, engine.served_model)
    assert report.answer_s is not None  # noqa: S101 - a restore that succeeded has compared an answer
    return {"first_token_s": planned_s + report.answer_s, "processor_s": used}, answer


class PeerError(Exception):
    """vLLM's snapshot cannot be made or restored here; the message says why."""


class Peer:
    """vLLM's own snapshot, in namespaces of its own, where every captured pid stays free."""

    def __init__(self, work: Path, engine: cs.VLLM, options: argparse.Namespace) -> None:
        criu = cs.probe(criu=options.criu).host("local").criu
        if criu is None:
            raise PeerError("CRIU was not found")
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.work, self.engine = work, engine
        script = Path(__file__).with_name("vllm_snapshot.py")
        command = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child", options.python, str(script)]
        command += [str(work), criu.path, "--", engine.model, *engine.args]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        with (work / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **engine.env, **quiet},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with killed_after(self.process, 10), suppress(BrokenPipeError), self.process:
            pass  # it ends when its input does

    def do(self, command: str, *, timeout_s: float) -> Mapping[str, Any]:
        """Send a command, return what it took.

        Raises:
            PeerError: It failed.
        """
        assert self.process.stdin is not None and self.process.stdout is not None  # noqa: S101, PT018
        with killed_after(self.process, timeout_s):
            with suppress(BrokenPipeError):
                print(command, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        found: Mapping[str, Any] = json.loads(line or '{"error": "its process has ended"}')
        if "error" in found:
            tail = "\n".join((self.work / "log").read_text(errors="replace").splitlines()[-20:])
            raise PeerError(f"vLLM could not {command}: {found['error']}\n{tail}")
        return found

    def restored(self, port: int) -> tuple[dict[str, float], list[int]]:
        """Restore with vLLM, ask, stop."""
        into_page_cache(self.work / "snapshot")
        took = self.do(f"restore {port}", timeout_s=RESTORE_S)
        answer, _ = quickstart.ask(f"http://127.0.0.1:{port}", self.engine.model)
        self.do("stop", timeout_s=RESTORE_S)
        return {"first_token_s": took["seconds"], "processor_s": took["processor_s"]}, answer


@contextmanager
def killed_after(process: subprocess.Popen[str], timeout_s: float) -> Iterator[None]:
    """Kill a process that does not answer in time, so that who reads from it comes to an end."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def into_page_cache(directory: Path) -> None:
    """Read every file of a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 22):
                    pass


def own_processor_s() -> float:
    """Return the processor time of this process, s."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def keeper_processor_s(engine: cs.Engine) -> float:
    """Return the processor time of an engine's keeper, of CRIU, and of the restored tree, s."""
    found = 0
    for pid in (1, *(process.pid for process in engine.processes())):
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=engine.keeper.proc_fd)) as file:
            fields = file.read().rpartition(")")[2].split()
        found += sum(map(int, fields[11 : 15 if pid == 1 else 13]))  # of pid 1 with its ended children: CRIU
    return found / TICKS


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    load = " to ".join(f"{each:.1f}" for each in result["load"])
    lines = [
        "",
        f"{result['machine']}, load {load}",
        "",
        "| restore to first token | median s | all s | processor s | MB |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, row in result["restores"].items():
        each = " ".join(f"{value:.2f}" for value in row["first_token_s"])
        medians = result["medians"][name]
        lines.append(
            f"| {name} | {medians['first_token_s']:.2f} | {each} | {medians['processor_s']:.2f} | "
            f"{result['bytes'][name] / 1e6:,.1f} |"
        )
    lines.append(f"| {OURS} of {PEER} | {result['ratio']:.2f} | | {result['processor_ratio']:.2f} | |")
    if result["failed"]:
        lines += ["", f"restores of {PEER} that failed: {len(result['failed'])}"]
    lines += ["", f"tokens {'identical' if result['exact'] else 'DIFFERENT'}"]
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--work", help="directory to keep model, caches and both images in; it must not hold images")
    parser.add_argument("--rounds", type=int, default=5, help="restores of each kind")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("nothing can be compared without a restore of each kind")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
