"""A small process tree with everything an engine's tree has: the subject of the driver tests, run as a script.

Root: an HTTP server with threads and an "answer" (digests of its memory), a spawned child that bumps a counter in POSIX
shared memory, a semaphore, an established loopback TCP pair and a Unix socket pair between the two, and files of its
TMPDIR. Options switch on what a dump must refuse.
"""

import hashlib
import http.server
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory


def child(name, port, path, semaphore, quiet):
    shared = shared_memory.SharedMemory(name)
    tcp = socket.create_connection(("127.0.0.1", port))
    unix = socket.socket(socket.AF_UNIX)
    unix.connect(path)
    while True:
        request = tcp.recv(64)
        if not request:
            return
        with semaphore:
            shared.buf[0] = (shared.buf[0] + 1) % 250
        tcp.sendall(request[::-1])
        unix.sendall(request)


def main():
    options = json.loads(sys.argv[1])
    memory = hashlib.sha256(b"seed").digest() * (32768 * options.get("memory_mib", 4))
    private = os.urandom(4096)
    directory = tempfile.mkdtemp()
    open(os.path.join(directory, "kept"), "w").write("kept")
    shared = shared_memory.SharedMemory(create=True, size=8 << 20)
    shared.buf[4 << 20] = 7  # sparse: a hole before and after
    listener = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(os.path.join(directory, "ipc"))
    unix.listen()
    spawn = multiprocessing.get_context("spawn")
    semaphore = spawn.Semaphore(1)
    arguments = (shared.name, listener.getsockname()[1], unix.getsockname(), semaphore, True)
    process = spawn.Process(target=child, args=arguments, daemon=True)
    process.start()
    tcp, stream = listener.accept()[0], unix.accept()[0]
    counter, lock = [0], threading.Lock()

    def tick():
        while True:
            counter[0] += 1
            time.sleep(0.005)

    for _ in range(4):
        threading.Thread(target=tick, daemon=True).start()
    held = []
    if options.get("log"):
        held.append(open(options["log"], "w"))
        held[-1].write("first\n")
        held[-1].flush()
    if options.get("external"):
        held.append(socket.create_connection(("127.0.0.1", options["external"])))
    if options.get("unix"):
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].connect(options["unix"])
    if options.get("userfaultfd"):
        import ctypes

        held.append(ctypes.CDLL(None).syscall(323, 1))
    if options.get("io_uring"):
        import ctypes

        held.append(ctypes.CDLL(None, use_errno=True).syscall(425, 8, ctypes.create_string_buffer(120)))
    if options.get("huge_ghost"):
        held.append(tempfile.TemporaryFile(dir="/tmp"))
        held[-1].truncate((128 << 20) + 1)
    if options.get("fill_shm_mib"):
        held.append(shared_memory.SharedMemory(create=True, size=options["fill_shm_mib"] << 20))
        held[-1].buf[:] = bytes([9]) * len(held[-1].buf)
    if options.get("nvidia"):
        held.append(os.open(options["nvidia"], os.O_RDWR))
    if options.get("library"):
        import ctypes

        held.append(ctypes.CDLL(options["library"]))
    if options.get("pty"):
        held.append(os.openpty())

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            with lock:
                tcp.sendall(b"abc")
                echo = tcp.recv(64) + stream.recv(64)
            answer = {
                "pid": os.getpid(),
                "child": process.pid,
                "counter": counter[0],
                "shared": shared.buf[0],
                "mark": shared.buf[4 << 20],
                "echo": echo.decode(),
                "digest": hashlib.sha256(memory).hexdigest(),
                "private": hashlib.sha256(private).hexdigest(),
                "kept": open(os.path.join(directory, "kept")).read(),
                "held": repr(held),
            }
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http.server.ThreadingHTTPServer(("127.0.0.1", options["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
