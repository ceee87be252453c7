"""The startup matrix: how long vLLM takes from nothing to ready and to its first token, in six ways of starting it.

    python examples/qualify_startup.py --model DIR [--python ENGINE_PYTHON] [--cases CASE …] [--json FILE]

inproc-full, inproc-text: ``LLM()`` with its engine core in the same process, ready when the constructor has returned.
multiproc-full, multiproc-text: ``LLM()`` as it is by default, the core in a process of its own.
serve-full, serve-text: vLLM's own server, ready when ``/health`` answers 200.

``text`` starts with ``--language-model-only``: what a multimodal model has beyond text is left out. For a
model of text alone it changes nothing. vLLM is as it was installed: no plugin of this library is loaded, so that these
are the times that a restore is compared with.

Every case is a fresh process. The directories that vLLM and its compilers keep caches in are in the figures, and how
many bytes each held before and after: without ``--caches`` each case has empty ones of its own, with it all share what
is there.

``--json`` writes ``machine``, ``model``, ``versions`` and ``cases``: for each ``ready_s``, ``first_token_s`` (from the
start of the process), ``ttft_s`` (from the request; streamed by the server, one token by `LLM()`), for a server
``port_open_s``, and ``caches``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

import coldsnap as cs

CASES = ("inproc-full", "inproc-text", "multiproc-full", "multiproc-text", "serve-full", "serve-text")
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
PROMPT = "This License applies to"
POLL_S = 0.02
GRACE_S = 20.0

# Runs in the engine's interpreter, which need not have this library.
IN_PROCESS = """
import json, sys, time
from vllm import LLM, SamplingParams, __version__
options = json.loads(sys.argv[1])
if __name__ == "__main__":
    llm = LLM(**options["arguments"])
    ready = time.time()
    llm.generate([options["prompt"]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print("MEASURED " + json.dumps({"ready": ready, "first": time.time(), "vllm": __version__}), flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; return 0 when every case gave a token."""
    options = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a server ends with this process
    figures: dict[str, Any] = {"machine": machine(), "model": options.model, "versions": {}, "cases": {}}
    print(f"machine: {figures['machine']}", flush=True)
    with workspace(options) as work:
        for case in options.cases:
            print(f"== {case}", flush=True)
            figures["cases"][case] = measured = measure(case, work, options)
            figures["versions"].setdefault("vllm", measured.pop("vllm", ""))
            print("   " + ", ".join(f"{name} {value:.2f}" for name, value in measured.items() if name != "caches"))
    print(table(figures["cases"]))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(case: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start one case in a fresh process with the caches it is given, and stop it."""
    place = Path(options.caches or work / case)
    caches = {name: str(place / part) for name, part in CACHES.items()}
    before = {name: size(path) for name, path in caches.items()}
    environment = {**os.environ, **caches, "VLLM_PLUGINS": "", **dict(each.split("=", 1) for each in options.env)}
    how, _, what = case.partition("-")
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if how == "inproc" else "1"
    run = serve if how == "serve" else in_process
    found = run(what == "text", environment, work / f"{case}.log", options)
    found["caches"] = {
        name: {"path": path, "bytes_before": before[name], "bytes_after": size(path)} for name, path in caches.items()
    }
    return found


def in_process(text: bool, environment: Mapping[str, str], log: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Construct an ``LLM`` and let it give one token."""
    arguments_of_llm = {"model": options.model, **json.loads(options.llm)}
    if text:
        arguments_of_llm["language_model_only"] = True
    told = json.dumps({"arguments": arguments_of_llm, "prompt": PROMPT})
    began = time.time()
    with log.open("w") as stream:
        done = subprocess.run(
            [options.python, "-c", IN_PROCESS, told],
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            timeout=options.timeout,
            check=False,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED ")), None)
    if line is None:
        raise SystemExit(f"vLLM ended with {done.returncode} before its first token:\n{tail(log)}")
    seen = json.loads(line.removeprefix("MEASURED "))
    ready_s, first_s = seen["ready"] - began, seen["first"] - began
    return {"ready_s": ready_s, "first_token_s": first_s, "ttft_s": first_s - ready_s, "vllm": seen["vllm"]}


def serve(text: bool, environment: Mapping[str, str], log: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start vLLM's server, and stream one answer."""
    port = unused_port()
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options.serve]
    command += ["--language-model-only"] if text else []
    began = time.monotonic()
    with log.open("w") as stream, running(command, environment, stream) as server:
        opened_s = until(lambda: is_open(port), began, server, log, options.timeout)
        ready_s = until(lambda: is_healthy(port), began, server, log, options.timeout)
        asked = time.monotonic()
        first_token(port, options.model)
        ended = time.monotonic()
    return {
        "port_open_s": opened_s,
        "ready_s": ready_s,
        "first_token_s": ended - began,
        "ttft_s": ended - asked,
    }


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], stream: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own, and end all of it."""
    server = subprocess.Popen(
        command, env=dict(environment), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield server
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def until(condition: Any, began: float, server: subprocess.Popen[bytes], log: Path, timeout_s: float) -> float:
    """Wait for a condition; return the seconds since the start."""
    while not condition():
        if server.poll() is not None or time.monotonic() - began > timeout_s:
            raise SystemExit(f"the server was not ready, exit status {server.returncode}:\n{tail(log)}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def is_open(port: int) -> bool:
    """Tell whether somebody listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(port: int) -> bool:
    """Tell whether the server says that it is ready."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def first_token(port: int, model: str) -> None:
    """Stream one answer up to its first token."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        if not any(line.startswith("data: {") for line in response.iter_lines()):
            raise SystemExit("the server streamed no token")


def size(path: str) -> int:
    """Return how many bytes a directory holds."""
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures as a table."""
    lines = [f"{'case':<16}{'port open':>11}{'ready':>9}{'TTFT':>9}{'first token':>13}   caches, MB before → after"]
    for case, found in cases.items():
        opened = f"{found['port_open_s']:9.2f} s" if "port_open_s" in found else f"{'':>11}"
        before, after = (
            sum(one[at] for one in found["caches"].values()) / 1e6 for at in ("bytes_before", "bytes_after")
        )
        lines.append(
            f"{case:<16}{opened}{found['ready_s']:7.2f} s{found['ttft_s']:7.2f} s{found['first_token_s']:11.2f} s"
            f"   {before:,.1f} → {after:,.1f}"
        )
    return "\n" + "\n".join(lines)


def tail(log: Path) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def machine() -> str:
    """Return the machine in a line."""
    facts = cs.probe().host("local")
    gpus = ", ".join(gpu.name for gpu in facts.gpus) or "no GPU"
    return f"{facts.cpu.model}, {facts.cpu.cores} cores, {facts.memory.total_bytes / 2**30:.0f} GiB, {gpus}"


def unused_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def workspace(options: argparse.Namespace) -> Iterator[Path]:
    """Yield a directory for logs, caches and, where none is named, a small random model."""
    work = Path(tempfile.mkdtemp(prefix="coldsnap-startup-"))
    try:
        if options.model is None:
            options.model = str(work / "tiny-qwen3")
            maker = Path(__file__).parent / "make_tiny_model.py"
            subprocess.run([sys.executable, str(maker), options.model], check=True, stdout=subprocess.DEVNULL)
        yield work
    finally:
        shutil.rmtree(work)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--model", help="a model's directory or name; a small random Qwen3 is made when not given")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--caches", help="a directory of caches that all cases share; each has an empty one without")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="last: further arguments of the server")
    parser.add_argument("--llm", default="{}", help="further arguments of LLM(), as JSON")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of the engine")
    parser.add_argument("--timeout", type=float, default=1800.0, help="for each case, s")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
