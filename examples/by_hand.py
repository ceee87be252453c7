#!/usr/bin/env python3
"""The rival without this library: vLLM, its own sleep, the driver's checkpoint and CRIU, one after the other by hand.

    python examples/by_hand.py --model MODEL --work DIR --criu CRIU --json FILE [--restores 3] -- VLLM_ARGUMENT ...

On a GPU the weights are dropped by vLLM's sleep level 2 and loaded again from the checkpoint after each restore;
without one they stay in the image. Times run from the start of CRIU to the first token. Nothing is admitted, verified,
moved or kept apart: one restore at a time, at the captured pids and port, with whatever is in ``/dev/shm`` put back.

Keys of the JSON: ``capture_s``, ``image_bytes``, ``restore_s`` and ``split`` (one for each restore: ``criu``, ``cuda``,
``weights``, ``request``), ``different`` (answers).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from coldsnap.host.probe import probe
from coldsnap.keeper import kernel

SHM = Path("/dev/shm")  # noqa: S108  what engines use
PROMPT = "Reply with exactly: coldsnap"
FLAGS = ("--tcp-established", "--network-lock", "skip", "--link-remap", "--ghost-limit", "128M", "--file-locks")


class ByHand:
    """A vLLM server that is frozen and thawed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        self.images, self.kept, self.log = (self.work / name for name in ("images", "shm", "server.log"))
        self.url = f"http://127.0.0.1:{options.port}"
        self.gpu = bool(probe(criu=options.criu).host("local").gpus)
        self.pids: list[int] = []
        self.log_bytes = 0

    def start(self) -> None:
        """Start the server, without io_uring, which CRIU cannot dump, and wait for its first answer."""
        for path in (self.images, self.kept):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        options = self.options
        command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(options.port)]
        command += [*(["--enable-sleep-mode"] if self.gpu else []), *options.engine_args]
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}
        env |= dict(one.split("=", 1) for one in options.env)
        with open(self.log, "wb") as log:
            self.server = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=kernel.deny_io_uring,  # noqa: PLW1509  no thread has been started yet
            )
        self.root = self.server.pid
        deadline = time.monotonic() + options.ready_timeout_s
        while time.monotonic() < deadline and self.server.poll() is None:
            with suppress(httpx.HTTPError):
                self.answer = self.ask()
                return
            time.sleep(0.2)
        raise SystemExit(f"the server did not come up; the end of {self.log}:\n{self.log.read_text()[-2000:]}")

    def ask(self) -> list[int]:
        """Ask on an empty prefix cache; return the token ids."""
        self.post("reset_prefix_cache")
        body = {"model": "m", "prompt": PROMPT, "max_tokens": self.options.tokens, "temperature": 0, "ignore_eos": True}
        reply = self.post("v1/completions", **body, return_token_ids=True)
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a request whose connection ends with it."""
        reply = httpx.post(f"{self.url}/{path}", json=body or None, timeout=300, headers={"Connection": "close"})
        return reply.raise_for_status()

    def capture(self) -> float:
        """Drop the weights, freeze, dump; the tree is gone afterwards."""
        began = time.monotonic()
        if self.gpu:
            self.post("sleep?level=2")
        self.pids = tree(self.root)
        self.on_driver = [pid for pid in self.pids if holds_a_gpu(pid)]
        for_each("cuCheckpointProcessLock", self.on_driver)
        for_each("cuCheckpointProcessCheckpoint", self.on_driver)
        mapped = {path for pid in self.pids for path in mapped_in_shm(pid)}
        self.criu("dump", "-t", str(self.root))
        self.keep([*mapped, *SHM.glob("link_remap.*")])
        self.log_bytes = self.log.stat().st_size
        self.gone()
        return time.monotonic() - began

    def keep(self, paths: Sequence[Path]) -> None:
        """Copy what is in /dev/shm: a restore uses it up. One copy of all, which keeps hard links."""
        there = [str(path) for path in paths if path.exists()]
        if there:
            subprocess.run(["cp", "-a", "--sparse=always", *there, str(self.kept)], check=True)

    def restore(self) -> tuple[dict[str, float], bool]:
        """Restore and ask; return the split, and whether the answer is the same."""
        if kept := [str(path) for path in self.kept.iterdir()]:
            subprocess.run(["cp", "-a", "--sparse=always", *kept, str(SHM)], check=True)
        os.truncate(self.log, self.log_bytes)
        marks = [time.monotonic()]
        self.criu("restore", "--restore-detached")
        marks.append(time.monotonic())
        for_each("cuCheckpointProcessRestore", self.on_driver)
        for_each("cuCheckpointProcessUnlock", self.on_driver)
        marks.append(time.monotonic())
        if self.gpu:
            self.post("wake_up?tags=weights")
            self.post("collective_rpc", method="reload_weights")
            self.post("wake_up?tags=kv_cache")
        marks.append(time.monotonic())
        first_s = self.first_token_s()
        names = ("criu", "cuda", "weights")
        split = {name: end - begin for name, begin, end in zip(names, marks, marks[1:], strict=False)}
        return {**split, "request": first_s}, self.ask() == self.answer

    def first_token_s(self) -> float:
        """Return the seconds to the first token of an answer."""
        self.post("reset_prefix_cache")
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True}
        began = time.monotonic()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=300) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    return time.monotonic() - began
        raise SystemExit("an answer without a token")

    def stop(self) -> None:
        """Kill the tree, and wait until its pids are free again."""
        for pid in self.pids or tree(self.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.gone()

    def gone(self) -> None:
        """Reap: this process is the reaper of all orphans below it."""
        while any(Path(f"/proc/{pid}").exists() for pid in self.pids):
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)

    def criu(self, action: str, *arguments: str) -> None:
        """Run CRIU."""
        log = self.work / f"{action}.log"
        command = [self.options.criu, action, *arguments, "-D", str(self.images), "-o", str(log), "-v4", *FLAGS]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            wrong = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
            raise SystemExit(f"criu {action} failed: {wrong[-5:]}")


def for_each(name: str, pids: Sequence[int]) -> None:
    """Call a function of the driver for each process."""
    if not pids:
        return
    from cuda.bindings import driver

    driver.cuInit(0)
    for pid in pids:
        arguments = None
        if name == "cuCheckpointProcessLock":
            arguments = driver.CUcheckpointLockArgs()
            arguments.timeoutMs = 10_000
        (status,) = getattr(driver, name)(pid, arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise SystemExit(f"{name} of process {pid}: {status}")


def tree(root: int) -> list[int]:
    """Return a process and all below it."""
    children = [int(one) for one in Path(f"/proc/{root}/task/{root}/children").read_text().split()]
    # A child may have been started by another thread than the first.
    for task in Path(f"/proc/{root}/task").iterdir():
        if task.name != str(root):
            children += [int(one) for one in (task / "children").read_text().split()]
    return [root, *(pid for child in children for pid in tree(child))]


def holds_a_gpu(pid: int) -> bool:
    """Tell whether a process has a device of the driver open."""
    fds = Path(f"/proc/{pid}/fd")
    return any("/dev/nvidia" in os.readlink(fds / name) for name in os.listdir(fds))


def mapped_in_shm(pid: int) -> list[Path]:
    """Return the files of /dev/shm that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [Path(line.split(None, 5)[5]) for line in lines if f" {SHM}/" in line and "(deleted)" not in line]


def measured(options: argparse.Namespace) -> Mapping[str, Any]:
    """Do all of it."""
    kernel.become_subreaper()
    rival = ByHand(options)
    rival.start()
    try:
        result: dict[str, Any] = {"capture_s": rival.capture(), "restore_s": [], "split": [], "different": 0}
        result["image_bytes"] = sum(path.stat().st_size for path in rival.images.iterdir())
        for _ in range(options.restores):
            split, same = rival.restore()
            result["split"].append(split)
            result["restore_s"].append(sum(split.values()))
            result["different"] += not same
            rival.stop()
    finally:
        rival.stop()
        for path in (*SHM.glob("link_remap.*"), *(SHM / path.name for path in rival.kept.iterdir())):
            path.unlink(missing_ok=True)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory for the images")
    parser.add_argument("--criu", required=True)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--port", type=int, default=18100)
    parser.add_argument("--restores", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ready-timeout-s", type=float, default=1800)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("engine_args", nargs="*", metavar="-- VLLM_ARGUMENT")
    options = parser.parse_args(argv)
    result = measured(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
