"""A small engine for the tests: an HTTP server with a child, shared memory, a control socket and orphans.

Usage: engine_target.py. It writes ``port N`` to its log when it answers.
"""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from multiprocessing import shared_memory


def control():
    path = os.path.join(os.path.dirname(os.environ["COLDSNAP_DIRECTIVE"]), "control", f"api.{os.getpid()}.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection:
            request = json.loads(connection.recv(65536))
            print("control", request["op"], flush=True)
            connection.send(json.dumps({"ok": True}).encode())


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        memory.buf[0] = (memory.buf[0] + 1) % 250
        body = json.dumps({"pid": os.getpid(), "child": child.pid, "count": memory.buf[0]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


child = subprocess.Popen([sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(1)"])
memory = shared_memory.SharedMemory(create=True, size=1 << 16, name="coldsnap_test_ring_" + os.environ["TAG"])
# An orphan that ends at once: its new parent must reap it.
subprocess.run(["sh", "-c", "(sleep 0.05; exit 7) & exit 0"], check=True)
threading.Thread(target=control, daemon=True).start()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("port", server.server_address[1], flush=True)
server.serve_forever()
