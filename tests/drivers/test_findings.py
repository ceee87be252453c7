"""Each finding, provoked for real by a small process, and named before anything is stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import pytest

import coldsnap as cs
from coldsnap.diagnosing import Diagnosis
from coldsnap.drivers.findings import KINDS
from coldsnap.errors import FormatError
from coldsnap.keeper.tree import below, scan

PREAMBLE = """
import ctypes, fcntl, mmap, os, shutil, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
"""
WAIT = "\nopen('ready', 'w').close()\ntime.sleep(60)\n"

OWN_MOUNTS = "libc.unshare(0x20000); libc.mount(b'none', b'/', None, 0x44000, None)\n"
OWN_DEVICES = OWN_MOUNTS + "assert libc.mount(b'none', b'/dev', b'tmpfs', 0, None) == 0\n"
CHILD_WITH_NAMESPACE = """
if os.fork() == 0:
    libc.unshare(0x04000000)
    open('ready', 'w').close()
time.sleep(60)
"""
# A breakpoint is an instruction written over another: here into a copy of a library under the driver's name.
BREAKPOINT = """
lib = ctypes.CDLL(os.path.abspath(shutil.copy(sys.argv[3], 'libcuda.so.1')))
line = next(line for line in open('/proc/self/maps') if 'libcuda' in line and 'r-xp' in line)
memory = open('/proc/self/mem', 'r+b', buffering=0)
memory.seek(int(line.split('-')[0], 16))
memory.write(bytes([0xCC]))
"""
GROWING = """
def grow():
    with open('log', 'w') as log:
        while True:
            log.write('x')
            log.flush()
            time.sleep(0.0002)
threading.Thread(target=grow, daemon=True).start()
"""
ON_TMPFS = (
    OWN_MOUNTS
    + """
os.mkdir('disk')
assert libc.mount(b'none', b'disk', b'tmpfs', 0, None) == 0
open('disk/a', 'w').write('a')
f = open('disk/a')
"""
)
SHARED_GPU = (
    OWN_DEVICES
    + """
os.mknod('/dev/nvidia7', 0o20600, os.makedev(1, 5))
f = os.open('/dev/nvidia7', os.O_RDWR)
m = mmap.mmap(f, 4096, mmap.MAP_PRIVATE)
child = os.fork()
"""
)
MANAGED = (
    OWN_DEVICES
    + """
os.mknod('/dev/nvidia-uvm', 0o20600, os.makedev(1, 5))
f = os.open('/dev/nvidia-uvm', os.O_RDWR)
m = mmap.mmap(f, 8192, mmap.MAP_PRIVATE)
"""
)

# Kind → code that brings it about, what is said of it. The last field: what the document's table promises.
PROVOKED = {
    "io-uring": ("libc.syscall(425, 8, ctypes.create_string_buffer(120))", r"descriptor \d+: an io_uring ring"),
    "userfaultfd": ("libc.syscall(323, 1)", r"descriptor \d+: a userfaultfd"),
    "anonymous-file": (
        "assert libc.syscall(444, ctypes.byref(ctypes.c_uint64(1)), 8, 0) >= 0",
        r"does not know, anon_inode:\[landlock-ruleset\]",
    ),
    "pidfd": ("f = os.pidfd_open(os.getppid())", rf"a pidfd of process {os.getpid()}, outside the tree"),
    "terminal": ("f = os.openpty()", r"descriptor \d+: a terminal"),
    "namespace": (CHILD_WITH_NAMESPACE, r"it has its own uts namespace"),
    "device": ("f = os.open('/dev/net/tun', os.O_RDWR)", r"the device /dev/net/tun"),
    "huge-unlinked": (
        "f = open('big', 'w+b'); f.truncate((128 << 20) + 1); os.unlink('big')",
        r"an unlinked file of 134217729 bytes, .*/big \(deleted\), above the limit of 134217728",
    ),
    "hugetlb": (
        # Reserves nothing, and is never touched: there may be no pool at all.
        "assert libc.mmap(None, 2 << 20, 3, 0x44022, -1, 0) != 2**64 - 1",
        r"memory in huge pages of the reserved pool, 2097152 bytes",
    ),
    "sysv-memory": (
        "i = libc.shmget(0, 8192, 0o1600); assert libc.shmat(i, None, 0) > 0; libc.shmctl(i, 0, None)",
        r"a shared memory segment of System V, 8192 bytes",
    ),
    "inotify": ("assert libc.inotify_add_watch(libc.inotify_init(), b'/proc/self', 2) > 0", r"no usable handle"),
    "socket-kind": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_MPTCP)",
        r"a socket of the kind MPTCP",
    ),
    "tcp-peer": (
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))",
        rf"with 127.0.0.1:\d+, outside the tree \(held by process {os.getpid()}, ",
    ),
    "unix-peer": (
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[2])",
        r"a Unix socket connected to one outside the tree",
    ),
    "secret-name": ("", r"environment names that look secret: SOME_API_KEY;"),
    "driver-breakpoint": (BREAKPOINT, r"a breakpoint or uprobe in .*/libcuda.so.1 \(4 KiB of its code differ"),
    "pipe": ("", r"pipe:\[\d+\], whose other end is outside the tree"),
    "growing-file": (GROWING, r"/log, which grew by \d+ bytes while we looked"),
    "memory-mount": (ON_TMPFS, r"/disk/a, on a tmpfs in memory"),
    "gpu-shared": (SHARED_GPU, r"/dev/nvidia7 is mapped by the processes \d+, \d+ of the tree"),
    "managed-memory": (MANAGED, r"8192 bytes in 1 mappings of /dev/nvidia-uvm \(from /proc/\d+/maps"),
    "deleted-file": ("f = open('gone', 'w+'); f.write('abc'); f.flush(); os.unlink('gone')", r"an unlinked file of 3 "),
    "written-file": ("f = open('log', 'w')", r"/log, open for writing"),
    "lock": ("f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)", r"a lock on .*/lock"),
}
# What the table has besides, with the test that shows it.
ELSEWHERE = {"foreign", "criu", "capability", "seccomp", "session", "tracer", "network", "outside-file", "unix-waiting"}
ELSEWHERE |= {"huge-pages", "criu-cache"}


@pytest.fixture
def process(tmp_path):
    """Start a small process that has gone wrong in one way."""
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(tmp_path / "outside"))
        unix.listen()
        with open("/proc/self/maps") as maps:
            library = next(line.split()[-1] for line in maps if "/libm." in line)

        def start(code="", *, env=None, **options):
            arguments = [str(tcp.getsockname()[1]), str(tmp_path / "outside"), library]
            child = subprocess.Popen(
                [sys.executable, "-c", PREAMBLE + code + WAIT, *arguments],
                cwd=tmp_path,
                env={"PATH": os.environ["PATH"], **(env or {})},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **{"stdout": subprocess.DEVNULL, "start_new_session": True, **options},
            )
            stack.callback(end, child)
            deadline = time.monotonic() + 20
            while not (tmp_path / "ready").exists():
                assert child.poll() is None, "the process that should go wrong went too wrong"
                assert time.monotonic() < deadline
                time.sleep(0.005)
            if "create_connection" in code:
                # Behind a descriptor that is gone when it is looked at: the one through which all are listed.
                with tcp.accept()[0] as accepted:
                    os.dup2(accepted.fileno(), 500)
                stack.callback(os.close, 500)
            return child

        yield start


def end(child):
    for pid in below(scan(), child.pid):
        os.kill(pid, signal.SIGKILL)
    child.communicate(timeout=10)


def of(pid, kind, **options):
    """Return the findings of one kind."""
    return [found for found in cs.diagnose(pid, **options).findings if found.kind == kind]


@pytest.mark.parametrize("kind", PROVOKED)
def test_what_would_block_or_spoil_a_capture_is_named_with_process_and_remedy(process, kind):
    code, words = PROVOKED[kind]
    options = {"env": {"SOME_API_KEY": "hush-hush"}} if kind == "secret-name" else {}
    child = process(code, stdout=subprocess.PIPE if kind == "pipe" else subprocess.DEVNULL, **options)

    found = of(child.pid, kind)

    assert found, f"no {kind} was found"
    assert re.search(words, str(found[0]))
    assert found[0].severity == KINDS[kind].severity
    assert found[0].pid in below(scan(), child.pid)
    assert found[0].remedy in str(found[0])
    assert "hush-hush" not in str(cs.diagnose(child.pid))


def test_every_kind_of_the_table_is_provoked_by_a_test():
    assert set(PROVOKED) | ELSEWHERE == set(KINDS)
    assert not set(PROVOKED) & ELSEWHERE


def test_a_quiet_process_has_nothing_but_being_foreign(process):
    diagnosis = cs.diagnose(process("r, w = os.pipe(); e = os.eventfd(1); p = os.pidfd_open(os.getpid())").pid)

    assert [found.kind for found in diagnosis.findings if found.pid] == ["foreign"]


def test_a_session_that_began_outside_is_named(process):
    (found,) = of(process(start_new_session=False).pid, "session")

    assert str(found).endswith("began outside the tree; start the engine under the keeper, or with setsid")


def test_a_tracer_is_named(process):
    child = process("child = os.fork()\nif child: libc.ptrace(0x4206, child, None, None)")
    deadline = time.monotonic() + 10
    while not (found := of(child.pid, "tracer")) and time.monotonic() < deadline:
        time.sleep(0.01)

    assert found[0].what == f"it is traced by process {child.pid}"


def test_another_network_namespace_is_named_where_connections_cannot_be_seen(process):
    assert of(process("assert libc.unshare(0x40000000) == 0").pid, "network")


def test_a_client_that_waits_for_a_unix_socket_of_the_tree_is_named(process, tmp_path):
    child = process("s = socket.socket(socket.AF_UNIX); s.bind('inside'); s.listen()")
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.connect(str(tmp_path / "inside"))

        (found,) = of(child.pid, "unix-waiting")

    assert "waits to be accepted" in found.what
    assert found.passing


def test_a_file_of_another_mount_namespace_is_named(process):
    code = (
        "libc.unshare(0x20000); libc.mount(b'none', b'/', None, 0x44000, None); os.mkdir('disk')\n"
        "libc.mount(b'none', b'disk', b'tmpfs', 0, None); f = open('disk/a', 'w'); libc.umount2(b'disk', 2)"
    )

    found = of(process(code).pid, "outside-file")

    assert "/a" in [each.path for each in found]  # the descriptors from before unshare(2) are outside as well


def test_a_pipe_whose_other_end_was_merely_closed_is_none(process):
    assert not of(process("r, w = os.pipe(); os.close(r); r2, w2 = os.pipe(); os.close(w2)").pid, "pipe")


def test_a_watch_of_a_directory_on_disk_is_none(process):
    assert not of(process("assert libc.inotify_add_watch(libc.inotify_init(), b'.', 2) > 0").pid, "inotify")


def test_names_that_look_secret_are_a_note_where_the_policy_allows_them(process):
    child = process(env={"SOME_API_KEY": "hush-hush"})

    assert [found.severity for found in of(child.pid, "secret-name", secrets="note")] == ["note"]


def test_secret_names_of_a_child_alone_are_found(process):
    child = process("subprocess.Popen(['sleep', '60'], env={'HF_TOKEN': 'x'}); time.sleep(0.3)")

    (found,) = of(child.pid, "secret-name")

    assert found.pid != child.pid
    assert "HF_TOKEN" in found.what


def test_the_first_line_says_how_to_launch_a_server_of_vllm(process, tmp_path):
    script = tmp_path / "vllm"
    script.write_text("import time; open('ready', 'w').close(); time.sleep(60)")
    child = subprocess.Popen(
        [sys.executable, str(script), "serve", "some/model", "--api-key", "hush-hush", "--port=8123"], cwd=tmp_path
    )
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.005)
        diagnosis = cs.diagnose(child.pid)
    finally:
        child.kill()
        child.communicate()

    first = str(diagnosis).splitlines()[0]
    assert "was not launched by ColdSnap" in first
    assert "Launch(VLLM('some/model', args=(…)), placement=local(port=8123))" in first
    assert "hush-hush" not in str(diagnosis)
    assert not diagnosis.launched
    assert diagnosis.blocked


def test_nobody_is_told_to_stop_the_first_process_of_a_container():
    code = "import coldsnap as cs; print(cs.diagnose(1))"
    path = os.pathsep.join(path for path in sys.path if path)
    alone = ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", code]

    answer = subprocess.run(alone, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60)

    first = answer.stdout.partition("\n")[0]
    assert "is the first process of its machine or container, which ends with it: start the server below" in first
    assert "stop it" not in first


def test_a_missing_process_is_refused():
    with pytest.raises(cs.AdmissionError, match="there is no process 4194999"):
        cs.diagnose(4194999)


def test_a_process_of_another_user_is_refused_with_what_to_do():
    code = (
        "import os, sys, coldsnap as cs\nfrom pathlib import Path\nos.setuid(65534)\n"
        "try: cs.diagnose(int(sys.argv[1]))\nexcept cs.AdmissionError as error: print(error)"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    answer = subprocess.run(
        [sys.executable, "-c", "import coldsnap.diagnosing\n" + code, str(os.getpid())],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        timeout=60,
    )

    assert "belongs to another user" in answer.stdout, answer.stderr


def test_what_the_machine_lacks_is_in_the_diagnosis_too(process):
    child = process()
    code = "import sys, coldsnap as cs; print(cs.diagnose(int(sys.argv[1]), criu='/nowhere/criu'))"
    path = os.pathsep.join(path for path in sys.path if path)
    command = [
        "setpriv",
        "--bounding-set=-sys_time",
        "--inh-caps=-sys_time",
        sys.executable,
        "-c",
        code,
        str(child.pid),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60)

    assert "criu at /nowhere/criu cannot be used" in answer.stdout, answer.stderr
    assert "capabilities that CRIU needs are missing: CAP_SYS_TIME" in answer.stdout


def test_a_seccomp_filter_above_the_caller_is_in_the_diagnosis(process):
    child = process()
    # no_new_privs, then strict enough to be a filter: a program of one instruction that allows everything.
    code = (
        "import ctypes, sys, coldsnap as cs, coldsnap.diagnosing\n"
        "libc = ctypes.CDLL(None)\n"
        "code = ctypes.create_string_buffer(b'\\x06' + bytes(5) + b'\\xff\\x7f', 8)\n"
        "class Program(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_void_p)]\n"
        "program = Program(1, ctypes.addressof(code))\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0\n"
        "print(cs.diagnose(int(sys.argv[1])))"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    answer = subprocess.run(
        [sys.executable, "-c", code, str(child.pid)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
    )

    assert "this process runs under a seccomp filter that comes from python" in answer.stdout, answer.stderr


def test_a_diagnosis_is_saved_and_loaded_and_shown(process, tmp_path):
    diagnosis = cs.diagnose(process("f = os.openpty()").pid)
    diagnosis.save(tmp_path / "diagnosis.json")

    assert Diagnosis.load(tmp_path / "diagnosis.json") == diagnosis
    assert "<td>a terminal</td>" in diagnosis._repr_html_()
    assert json.loads((tmp_path / "diagnosis.json").read_text())["kind"] == "coldsnap-diagnosis"
    (tmp_path / "diagnosis.json").write_text("{}")
    with pytest.raises(FormatError, match="coldsnap-diagnosis"):
        Diagnosis.load(tmp_path / "diagnosis.json")
