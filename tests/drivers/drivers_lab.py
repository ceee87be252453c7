"""Real CRIU, real keepers, a small real tree. What they leave is removed."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coldsnap.drivers import n610
from coldsnap.errors import ColdSnapError
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.undo import CONTINUE, KILL

TREE = Path(__file__).with_name("small_tree.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, timeout_s=10.0, host="127.0.0.1"):
    """Ask a small tree until it answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextmanager
def removed_shared_memory(keeper):
    """Remove what the processes of a tree in the host's namespaces map in /dev/shm, under all its names."""
    inodes = set()
    for process in () if keeper.private else keeper.tree():
        with open(f"/proc/{process.pid}/maps") as maps:
            inodes |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
    yield
    for entry in list(os.scandir("/dev/shm")) if inodes else ():
        if entry.inode() in inodes:
            os.unlink(entry.path)


class Lab:
    """Keepers, trees and capsules of one test; everything is ended and removed at its end."""

    def __init__(self, directory, criu):
        self.directory, self.criu = directory, criu
        self.stack = ExitStack()
        self.keepers = []
        self.count = 0

    def keeper(self, namespace="private", run_dir=None):
        self.count += 1
        keeper = Keeper.start(run_dir or self.directory / f"run{self.count}", namespace=namespace)
        self.keepers.append(keeper)
        return keeper

    def launch(self, namespace="private", deny_io_uring=True, run_dir=None, **options):
        """Start a small tree under a keeper of its own; return keeper and port."""
        keeper, port = self.keeper(namespace, run_dir), options.setdefault("port", free_port())
        with keeper.operation("launch", [KILL]):
            argv = [sys.executable, str(TREE), json.dumps(options)]
            keeper.spawn_engine(argv, env={"PATH": os.environ["PATH"]}, cwd="/", deny_io_uring=deny_io_uring)
            ask(port)
        return keeper, port

    def capsule(self):
        self.count += 1
        path = self.directory / f"capsule{self.count}"
        path.mkdir(mode=0o700)
        return path

    def dump(self, keeper, leave="stopped", capsule=None, timeout_s=30.0):
        capsule = capsule or self.capsule()
        undo = [CONTINUE] if leave == "stopped" else []
        with keeper.operation("capture", undo):
            return capsule, n610.dump_tree(keeper, self.criu, capsule, leave=leave, timeout_s=timeout_s)

    def restore(self, capsule, namespace="private", rebind=None, run_dir=None, timeout_s=30.0, feed=None):
        keeper = self.keeper(namespace, run_dir)
        with keeper.operation("restore", [KILL]):
            staged = n610.stage_tree(keeper, capsule, rebind=rebind, feed=feed)
            return keeper, n610.thaw_tree(keeper, self.criu, staged, timeout_s=timeout_s)

    def connect(self, run_dir):
        keeper = Keeper.connect(run_dir)
        self.keepers.append(keeper)
        return keeper

    def read_only(self, path):
        """Make a directory impossible to write, also for root."""
        for command in (["mount", "--bind"], ["mount", "-o", "remount,bind,ro"]):
            subprocess.run([*command, str(path), str(path)], check=True, timeout=10)
        self.stack.callback(subprocess.run, ["umount", str(path)], check=True, timeout=10)

    def hold_pid(self, pid):
        """Occupy a pid of the host; it may be taken by somebody else already."""
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(pid - 1))
        decoy = subprocess.Popen(["sleep", "300"])
        self.stack.callback(decoy.wait, timeout=10)
        self.stack.callback(decoy.kill)
        assert os.path.exists(f"/proc/{pid}")

    def stop(self, keeper):
        """End a tree at once; in the host's namespaces nobody but us removes its shared memory then."""
        self.keepers.remove(keeper)
        with removed_shared_memory(keeper):
            keeper.stop(grace_s=0)

    def close(self):
        for keeper in self.keepers:
            try:
                with removed_shared_memory(keeper):
                    keeper.stop(grace_s=0)
            except (ColdSnapError, OSError):
                keeper.close()
        self.stack.close()
