"""vLLM's own snapshot, on a machine without a GPU and driven line by line: the rival in ``qualify_peer.py``.

    unshare --pid --fork --mount --mount-proc --kill-child ENGINE_PYTHON vllm_snapshot.py WORK CRIU -- VLLM_ARGUMENTS

``qualify_peer.py`` starts it so, with the interpreter that vLLM is installed in. Each line of its input is a command,
each line of its output a JSON object: ``create``; ``restore PORT``; ``stop``. A restore is timed from the call of
vLLM's ``restore_snapshot`` until that returns, which is when vLLM has compared one token that it asked for over HTTP.
Python and vLLM have been imported before, which a user of the command ``vllm snapshot restore`` waits for too.

vLLM's code runs as it is. What it wants and a machine without an NVIDIA GPU does not have is stood in for:

* ``nvidia-smi`` names vLLM's worker as what uses the GPU; ``cuda-checkpoint`` is asked for its digest only;
* CRIU's CUDA plugin is a library without code;
* a plugin of vLLM tells it that the CPU has a sleep mode: its worker ignores the request to sleep, so the weights stay
  in the image, and vLLM loads them again from the model after the restore, as it does on a GPU;
* the server is started without io_uring (vLLM's documentation wants it turned off for the whole machine);
* dumped processes are reaped before vLLM looks whether they are gone (it does not wait for those that are not its own).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
MS_NOSUID, MS_NODEV = 2, 4

STAND_INS = {
    "nvidia-smi": """#!/bin/sh
case "$*" in
*query-compute-apps*)
    ps -eo pid=,comm= | while read -r pid name; do
        case "$name" in VLLM::Worker*) echo "$pid, GPU-00000000-0000-0000-0000-000000000000" ;; esac
    done ;;
*) echo "no GPU, GPU-00000000-0000-0000-0000-000000000000, 0" ;;
esac
""",
    "cuda-checkpoint": "#!/bin/sh\nexit 1\n",
    "criu": '#!/bin/sh\nexec {criu} "$@"\n',
    "python": "#!/bin/sh\nexec {python} -c '{deny}' \"$@\"\n",
}
DENY = (
    "import os, sys; from coldsnap.keeper.kernel import deny_io_uring; deny_io_uring(); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
SLEEPS = """
def register():
    from vllm.platforms import current_platform
    type(current_platform).is_sleep_mode_available = lambda self: True
"""


def main() -> int:
    """Answer commands until the input ends; whatever runs then ends with this pid namespace."""
    work, criu, arguments = Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[4:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to where the answers go
    prepare(work, criu)
    peer = Peer(work / "snapshot", arguments)
    for line in sys.stdin:
        command, *words = line.split()
        began, before = time.monotonic(), processor_s(peer.pids)
        try:
            getattr(peer, command)(*words)
            found: dict[str, Any] = {"seconds": time.monotonic() - began}
            found |= {"processor_s": processor_s(peer.pids) - before, "bytes": size_of(work / "snapshot")}
        except Exception as error:  # noqa: BLE001 - the other end decides
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers)
    return 0


def prepare(work: Path, criu: str) -> None:
    """Write the stand-ins, and have this process and its children find them."""
    mounted = ctypes.CDLL(None, use_errno=True).mount(b"none", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, None)
    if mounted:  # names of the machine's own /dev/shm could be in the way of a restore
        raise OSError(ctypes.get_errno(), "no /dev/shm of our own could be mounted")
    programs, plugins, site = work / "bin", work / "criu-plugins", work / "site"
    for directory in (programs, plugins, site / "cpu_sleeps-0.dist-info"):
        directory.mkdir(parents=True, exist_ok=True)
    for name, text in STAND_INS.items():
        filled = text.replace("{criu}", criu).replace("{python}", sys.executable).replace("{deny}", DENY)
        (programs / name).write_text(filled)
        (programs / name).chmod(0o700)
    command = ["cc", "-shared", "-o", str(plugins / "cuda_plugin.so"), "-x", "c", "/dev/null"]
    subprocess.run(command, check=True, timeout=60)
    (site / "cpu_sleeps.py").write_text(SLEEPS)
    info = site / "cpu_sleeps-0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-sleeps\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_sleeps = cpu_sleeps:register\n")
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(site)
    os.environ["CRIU_CUDA_PLUGIN_DIR"] = str(plugins)
    os.environ["VLLM_PLUGINS"] = "cpu_sleeps"  # and no other: this library's own has no place in its rival


class Peer:
    """One snapshot of vLLM's."""

    def __init__(self, snapshot: Path, arguments: tuple[str, ...]) -> None:
        # Not installed where this script is checked.
        from vllm.snapshot import controller, manifest, runtime

        self.controller, self.manifest = controller, manifest
        self.snapshot, self.arguments = snapshot, arguments
        self.pids: tuple[int, ...] = ()

        class Tools(runtime.LocalSnapshotTools):  # type: ignore[misc, name-defined, unused-ignore]
            def verify_dead(self, inventory: Any) -> None:
                reap(inventory.process_tree)
                self._children.pop(inventory.root_pid).returncode = 0
                super().verify_dead(inventory)

        self.tools = Tools

    def create(self) -> None:
        """Have vLLM start a server and make its snapshot."""
        model, served = self.arguments[0], self.arguments[0]
        wanted = argparse.Namespace(
            snapshot_dir=str(self.snapshot), model=model, model_tag=None, revision="0" * 40, tokenizer_revision=None
        )
        wanted.served_model_name = [served]
        interpreter, sys.executable = sys.executable, str(self.snapshot.parent / "bin" / "python")
        try:
            self.controller.create_snapshot(wanted, engine_argv=self.arguments, tools=self.tools())
        finally:
            sys.executable = interpreter

    def restore(self, port: str) -> None:
        """Have vLLM restore it, up to the token that vLLM compares."""
        wanted = argparse.Namespace(snapshot_dir=str(self.snapshot), host="127.0.0.1", port=int(port))
        pids = self.manifest.read_manifest(self.snapshot).process_tree
        try:
            self.controller.restore_snapshot(wanted, tools=self.tools())
        except BaseException:
            reap(pids)  # vLLM has killed them, and the next restore needs their pids
            raise
        self.pids = pids

    def stop(self) -> None:
        """End the restored server."""
        pids, self.pids = self.pids, ()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(pids)


def reap(pids: tuple[int, ...]) -> None:
    """Wait for the end of killed processes that are children of this one, or become so: it is pid 1."""
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                time.sleep(0.001)  # its parent has not ended yet


def processor_s(pids: tuple[int, ...]) -> float:
    """Return the processor time of this process, of its ended children, and of processes, s."""
    found = 0.0
    for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(whose)
        found += used.ru_utime + used.ru_stime
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def size_of(directory: Path) -> int:
    """Return the bytes of all files of a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    if shutil.which("cc") is None:
        sys.exit("a C compiler (cc) is needed for the stand-in of CRIU's plugin")
    sys.exit(main())
