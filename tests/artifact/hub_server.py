"""A small model hub: enough of the real one's HTTP interface for its real client, and a schedule of faults.

Content goes in through the client's own calls (preupload, LFS batch, PUT, commit) and comes out through ``resolve``
with ranges.

>>> with HubServer() as hub:
...     api = huggingface_hub.HfApi(endpoint=hub.endpoint, token="hf_test")
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote


class HubServer:
    """Repositories in memory.

    Attributes:
        commits: Repository → commits, each a mapping from path to (sha256, size).
        blobs: SHA-256 → content.
        uploads: SHA-256 of every upload, in order.
        ranges: The Range header of every download, in order.
        cut_after: Close the connection after this many bytes of a download; None: never.
        bytes_per_s: Speed of downloads; None: full.
    """

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, tuple[str, int]]]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.ranges: list[str | None] = []
        self.cut_after: int | None = None
        self.bytes_per_s: int | None = None
        self.lie: bytes | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def create(self, repository: str) -> None:
        self.commits.setdefault(repository, [(hashlib.sha1(repository.encode()).hexdigest(), {})])

    def commit(self, repository: str, added: dict[str, tuple[str, int]]) -> str:
        parent, files = self.commits[repository][-1]
        oid = hashlib.sha1(f"{parent}{sorted(added)}".encode()).hexdigest()
        self.commits[repository].append((oid, {**files, **added}))
        return oid

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, tuple[str, int]]] | None:
        commits = self.commits.get(repository)
        if commits is None:
            return None
        return commits[-1] if revision == "main" else next((one for one in commits if one[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, value: object, status: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.reply({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self) -> None:
        data, path = self.body(), unquote(self.path.partition("?")[0])
        if path == "/api/repos/create":
            name = json.loads(data)
            repository = f"{name.get('organization') or 'owner'}/{name['name']}"
            self.hub.create(repository)
            self.reply({"url": f"{self.hub.endpoint}/{repository}"})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/(.+)", path):
            self.paths_info(*match.groups(), parse_qs(data.decode()), data)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            files = [
                {"path": one["path"], "uploadMode": "lfs", "shouldIgnore": False} for one in json.loads(data)["files"]
            ]
            self.reply({"files": files})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.reply({"transfer": "basic", "objects": [self.lfs(one) for one in json.loads(data)["objects"]]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self.do_commit(match[1], [json.loads(line) for line in data.splitlines()])
        else:
            self.refuse(404, "NotFound")

    def lfs(self, one: dict) -> dict:
        if one["oid"] in self.hub.blobs:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}"}}}

    def do_PUT(self) -> None:
        data = self.body()
        digest = hashlib.sha256(data).hexdigest()
        if self.path != f"/lfs/{digest}":
            self.refuse(400, "WrongContent")
            return
        self.hub.blobs[digest] = data
        self.hub.uploads.append(digest)
        self.reply(b"", ETag=f'"{digest}"')

    def do_commit(self, repository: str, lines: list[dict]) -> None:
        added = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                added[value["path"]] = (value["oid"], value["size"])
            elif line["key"] == "file":
                content = base64.b64decode(value["content"])
                digest = hashlib.sha256(content).hexdigest()
                self.hub.blobs[digest] = content
                added[value["path"]] = (digest, len(content))
        oid = self.hub.commit(repository, added)
        self.reply({"commitUrl": f"{self.hub.endpoint}/{repository}/commit/{oid}", "commitOid": oid})

    def paths_info(self, repository: str, revision: str, form: dict, data: bytes) -> None:
        found = self.hub.files(repository, revision)
        if found is None:
            self.refuse(404, "RepoNotFound")
            return
        wanted = form.get("paths") or json.loads(data)["paths"]
        self.reply(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": size,
                    "oid": oid[:40],
                    "lfs": {"oid": oid, "size": size, "pointerSize": 1},
                }
                for path, (oid, size) in found[1].items()
                if path in wanted
            ]
        )

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            found = self.hub.files(match[1], match[2] or "main")
            if found is None:
                self.refuse(404, "RepoNotFound")
            else:
                self.reply(
                    {"id": match[1], "sha": found[0], "siblings": [], "private": True, "tags": [], "downloads": 0}
                )
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(*match.groups())
        else:
            self.refuse(404, "NotFound")

    def resolve(self, repository: str, revision: str, path: str) -> None:
        found = self.hub.files(repository, revision)
        if found is None:
            self.refuse(404, "RevisionNotFound" if repository in self.hub.commits else "RepoNotFound")
        elif path not in found[1]:
            self.refuse(404, "EntryNotFound")
        else:
            digest, size = found[1][path]
            headers = {
                "X_Repo_Commit": found[0],
                "ETag": f'"{digest}"',
                "X_Linked_ETag": f'"{digest}"',
                "X_Linked_Size": str(size),
            }
            self.send(self.hub.lie or self.hub.blobs[digest], headers)

    def send(self, content: bytes, headers: dict[str, str]) -> None:
        if self.command == "HEAD":
            self.reply(content, **headers)
            return
        asked = self.headers.get("Range")
        self.hub.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        rest = content[start:]
        limit = len(rest) if self.hub.cut_after is None else min(self.hub.cut_after, len(rest))
        step = max(1, (self.hub.bytes_per_s or 1 << 30) // 50)
        for position in range(0, limit, step):
            self.wfile.write(rest[position : min(position + step, limit)])
            self.wfile.flush()
            if self.hub.bytes_per_s:
                time.sleep(0.02)
        self.close_connection = limit < len(rest)
