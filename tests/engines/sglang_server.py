"""A real SGLang on a processor, with the plugin in each of its processes, and no keeper around it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import attrs
import httpx

from coldsnap.engines.control import Ranks
from coldsnap.engines.settings import inherited_environment
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import Directive, Endpoint, write_directive

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from make_tiny_model import make_tiny_model  # noqa: E402

PROMPT = "the cold engine of"


class Server:
    """One server; its files are in ``directory``."""

    def __init__(self, directory, python, *args, tensor_parallel=1, model=None, orders=None, **env):
        self.directory, self.python, self.workers = directory, python, tensor_parallel
        self.rank_dir, self.log = directory / "rank", directory / "engine.log"
        for path in (self.rank_dir, self.rank_dir / "control", self.rank_dir / "ack"):
            path.mkdir(mode=0o700)
        self.model = model or make_tiny_model(directory / "tiny")
        self.endpoint = Endpoint(host="127.0.0.1", port=free())
        directive = Directive.new(operation="launch", endpoint=self.endpoint)
        write_directive(self.rank_dir, attrs.evolve(directive, **(orders or {})))
        self.ranks, self.url = Ranks(self.rank_dir), f"http://127.0.0.1:{self.endpoint.port}"
        command = [python, "-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(self.endpoint.port)]
        command += ["--max-total-tokens", "2048", "--mem-fraction-static", "0.1", "--enable-memory-saver"]
        command += ["--skip-server-warmup", "--sleep-on-idle", "--tp", str(tensor_parallel), *args]
        names = {name: value for name, value in inherited_environment().items() if name != "PYTHONPATH"}
        names |= {
            "COLDSNAP_DIRECTIVE": str(self.rank_dir / "directive.json"),
            "COLDSNAP_EXPORT_MODEL_PAYLOAD": "1",
            "COLDSNAP_RUNTIME_DIR": str(directory / "runtime"),
            "SGLANG_PLUGINS": "coldsnap",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(n % (os.cpu_count() or 1)) for n in range(tensor_parallel)),
            "HF_HUB_OFFLINE": "1",
            **env,
        }
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=names, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def await_ready(self, timeout_s=400):
        until(lambda: self.process.poll() is not None or self.status("/ready") == 200, timeout_s, every_s=0.25)
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return self

    def stop(self):
        """End it at once; what its processes have in /dev/shm goes with it."""
        shared = shared_memory_of(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for path in shared:
            path.unlink(missing_ok=True)

    # SGLang's own API

    def status(self, path, timeout_s=5):
        try:
            return httpx.get(self.url + path, timeout=timeout_s).status_code
        except httpx.TransportError:
            return 0

    def post(self, path, body=None):
        return httpx.post(self.url + path, json=body or {}, timeout=120, headers={"connection": "close"})

    def answer(self, tokens=12, rid=None, prompt=PROMPT):
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, **({"rid": rid} if rid else {})}
        return self.post("/generate", body).json()["output_ids"]

    def checksums(self):
        reply = self.post("/weights_checker", {"action": "checksum"}).json()
        return [rank["per_gpu_checksum"] for rank in reply["ranks"]]

    # Our operations

    def control(self, op, role, **arguments):
        (reply,) = request_control(self.rank_dir, op, roles=[role], timeout_s=120, **arguments).values()
        return reply

    def quiesce(self, timeout_s=60):
        self.ranks.quiesce(timeout_s=timeout_s)

    def release(self, **more):
        requests = {
            rank: {
                "worker": worker,
                "directory": str(self.directory / "generation" / worker),
                "store": str(self.directory / "store"),
                "capture_id": "capture-1",
                "backend": "python",
                "reserve_bytes": 0,
                **more,
            }
            for rank, worker in self.ranks.workers().items()
        }
        return self.ranks.release(requests, timeout_s=120)

    def hydrate(self, **more):
        return self.ranks.hydrate(dict.fromkeys(self.ranks.workers(), more), timeout_s=120)

    # Its memory

    def pids(self, role):
        return [rank.pid for rank in self.ranks.present() if rank.role == role]

    def resident_bytes(self):
        return sum(anonymous(pid) for pid in self.pids("worker"))

    def memory(self, into):
        """Write everything private that the processes can write to into files, and return them."""
        return [image(pid, into / f"{pid}.memory") for role in ("api", "worker") for pid in self.pids(role)]


def shared_memory_of(group):
    """Return the files in /dev/shm that the processes of a group have mapped, by whatever name they did."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == group:
                inodes |= {line.split()[4] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return [path for path in Path("/dev/shm").iterdir() if str(path.stat().st_ino) in inodes]


def anonymous(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def image(pid, path):
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory, open(path, "wb") as out:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, access, *_ = line.split()
            if access.startswith("rw") and access.endswith("p"):
                begin, end = (int(one, 16) for one in span.split("-"))
                copy(pid, memory, begin, end, out)
    return path


def copy(pid, memory, begin, end, out):
    """Copy the pages of a mapping that are there; a large one is mostly not."""
    page, entry = 4096, 8
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(begin // page * entry)
        flags = pagemap.read((end - begin) // page * entry)
    present = [n for n in range(len(flags) // entry) if flags[n * entry + 7] & 0x80]
    for first, count in runs(present):
        memory.seek(begin + first * page)
        left = count * page
        while left and (data := memory.read(min(left, 8 << 20))):
            out.write(data)
            left -= len(data)


def runs(numbers):
    first = last = None
    for number in numbers:
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            yield first, last - first + 1
        first = last = number
    if first is not None:
        yield first, last - first + 1


def free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, timeout_s=60, every_s=0.01):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(every_s)
