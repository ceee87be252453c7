"""Prove the CUDA helper, and with CRIU the whole n610 driver, on a real torch process tree, on a machine with a GPU.

    PYTHONPATH=src python3 tests/gpu/check_cuda_helper.py [--criu PATH] [--json FILE] [--namespace private|host]

The tree has a parent and a child that both hold CUDA memory, the parent also a captured CUDA graph. Checked, in a
private pid namespace and in the host's: lock, checkpoint, restore, unlock; the rollback of a helper closed in between;
and with ``--criu`` a dump, the end of the tree, two restores and the same answers. Exit status 0 when all of it holds.

``--driver fake_cuda:open_driver --device cpu`` runs the same without a GPU, to check this script itself.
"""

import argparse
import contextlib
import hashlib
import http.server
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

CHILD_MIB, PARENT_MIB = 64, 256


# ---- the tree: this file again, with "serve" -----------------------------------------------------------------------


def digest(tensor):
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).numpy().tobytes()).hexdigest()[:16]


def child(device, connection):
    import torch

    memory = torch.arange(CHILD_MIB << 18, dtype=torch.float32, device=device)
    while connection.recv():
        connection.send(digest(memory * 2))


def serve(port, device):
    import torch

    torch.manual_seed(7)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(device, theirs), daemon=True)
    process.start()
    theirs.close()
    memory = torch.rand(PARENT_MIB << 18, device=device)
    weight, source, target = (torch.rand(512, 512, device=device) for _ in range(3))

    def compute():
        target.copy_(torch.tanh(source @ weight))

    graph = None
    if device != "cpu":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            with lock:
                target.zero_()
                graph.replay() if graph is not None else compute()
                ours.send(True)
                answer = {"memory": digest(memory), "graph": digest(target), "child": ours.recv(), "pid": os.getpid()}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


# ---- the checks ------------------------------------------------------------------------------------------------------


def ask(port, timeout_s=180.0):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Check:
    """One namespace's checks, with their timings."""

    def __init__(self, options, namespace, directory):
        self.options, self.namespace, self.directory = options, namespace, directory
        self.times = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def timed(self, name, call, *arguments, **named):
        began = time.monotonic()
        value = call(*arguments, **named)
        self.times[name] = round(time.monotonic() - began, 4)
        print(f"  {self.namespace:8}{name:32}{self.times[name]:9.3f} s", flush=True)
        return value

    def same(self, what):
        answer = self.timed(f"answer {what}", ask, self.port)
        assert answer == self.expected, f"{what}: expected {self.expected}, got {answer}"

    def helper(self, keeper, pids, state="running"):
        from coldsnap.drivers.cuda import CudaHelper

        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths if path)}
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        environment |= {
            "FAKE_CUDA_PIDS": " ".join(map(str, pids)),
            "FAKE_CUDA_LOG": os.devnull,
            "FAKE_CUDA_STATE": state,
        }
        helper = self.timed(
            "helper start", CudaHelper.start, keeper, environment=environment, driver=self.options.driver
        )
        self.timed("helper ready (cuInit)", helper.memory)
        return helper

    def nvidia_pids(self, keeper):
        from coldsnap.drivers import n610

        audit = self.timed("audit", n610.prepare_dump, keeper)
        return audit.nvidia_pids if self.options.device != "cpu" else audit.pids[::-1]

    def run(self):
        from coldsnap.keeper.client import Keeper
        from coldsnap.keeper.undo import KILL

        run_dir = self.directory / f"run-{self.namespace}"
        with Keeper.start(run_dir, namespace=self.namespace) as keeper:
            with keeper.operation("launch", [KILL]):
                argv = [sys.executable, os.path.abspath(__file__), "serve", str(self.port), self.options.device]
                keeper.spawn_engine(argv, env=dict(os.environ), cwd="/")
                self.expected = self.timed("cold start to answer", ask, self.port)
            try:
                self.in_place(keeper)
                if self.options.criu:
                    self.over_criu(keeper, run_dir)
                else:
                    keeper.stop(grace_s=0)
            except BaseException:
                print(keeper.log_tail(30))
                for log in sorted(keeper.work_dir.glob("*.log")):
                    print(f"--- {log.name}:\n{log.read_text(errors='replace')[-1500:]}")
                with contextlib.suppress(
                    Exception
                ):  # it may have ended already; the error in flight is the one to tell of
                    keeper.stop(grace_s=0)
                raise

    def in_place(self, keeper):
        pids = self.nvidia_pids(keeper)
        print(f"  {self.namespace:8}processes that hold the driver, children first: {pids}")
        assert len(pids) >= 2, "parent and child should both hold the driver"
        helper = self.helper(keeper, pids)
        print(f"  {self.namespace:8}device memory (free, total): {self.timed('memory', helper.memory)}")
        self.timed("lock", helper.lock, pids, timeout_s=60)
        self.timed("checkpoint", helper.checkpoint, timeout_s=120)
        assert set(helper.states(pids)) == {"checkpointed"}, helper.states(pids)
        self.timed("restore", helper.restore, pids, timeout_s=120)
        self.timed("unlock", helper.unlock, timeout_s=60)
        self.same("after checkpoint and restore in place")
        self.timed("lock again", helper.lock, pids, timeout_s=60)
        self.timed("checkpoint again", helper.checkpoint, timeout_s=120)
        keeper.signal(19, whom="tree")
        self.timed("rollback of a stopped tree", helper.close)
        keeper.signal(18, whom="tree")
        self.same("after the rollback")

    def over_criu(self, keeper, run_dir):
        from coldsnap.drivers import n610
        from coldsnap.keeper.client import Keeper
        from coldsnap.keeper.undo import CONTINUE, KILL

        capsule = self.directory / f"capsule-{self.namespace}"
        capsule.mkdir(mode=0o700)
        pids = self.nvidia_pids(keeper)
        helper = self.helper(keeper, pids)
        with keeper.operation("capture", [CONTINUE]):
            self.timed("lock for the dump", helper.lock, pids, timeout_s=60)
            self.timed("checkpoint for the dump", helper.checkpoint, timeout_s=120)
            dumped = self.timed(
                "dump",
                n610.dump_tree,
                keeper,
                self.options.criu,
                capsule,
                leave="stopped",
                timeout_s=300,
                nvidia_pids=pids,
            )
        print(f"  {self.namespace:8}image {dumped.image_bytes >> 20} MiB, {dumped.details}")
        keeper.signal(9, whom="tree")
        helper.release()
        helper.close()
        keeper.stop(grace_s=0)
        if self.namespace == "host":
            n610.remove_leftovers(dumped.volatile)
        for number in (1, 2):
            with Keeper.start(run_dir, namespace=self.namespace) as again:
                with again.operation("restore", [KILL]):
                    helper = self.helper(again, pids, "checkpointed")
                    rebind = n610.Rebind(port=self.port, to_port=self.port)
                    staged = self.timed(f"stage {number}", n610.stage_tree, again, capsule, rebind=rebind)
                    thawed = self.timed(
                        f"thaw {number}", n610.thaw_tree, again, self.options.criu, staged, timeout_s=300
                    )
                    self.timed(f"cuda restore {number}", helper.restore, thawed.nvidia_pids, timeout_s=120)
                    self.timed(f"cuda unlock {number}", helper.unlock, timeout_s=60)
                    helper.close()
                    self.same(f"after restore {number}")
                again.stop(grace_s=0)
                if self.namespace == "host":
                    n610.remove_leftovers(dumped.volatile)
        shutil.rmtree(capsule)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--criu")
    parser.add_argument("--json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--driver")
    parser.add_argument("--namespace", choices=["private", "host"], action="append")
    options = parser.parse_args()
    results, failed = {}, False
    directory = Path(tempfile.mkdtemp(prefix="cuda-helper-"))
    try:
        for namespace in options.namespace or ["private", "host"]:
            check = Check(options, namespace, directory)
            try:
                check.run()
                results[namespace] = {"ok": True, "seconds": check.times}
            except Exception as error:  # the other namespace is checked all the same
                failed = True
                results[namespace] = {"ok": False, "error": repr(error), "seconds": check.times}
                print(f"{namespace}: FAILED: {error!r}", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    text = json.dumps(results, indent=1)
    print(text)
    if options.json:
        Path(options.json).write_text(text)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
