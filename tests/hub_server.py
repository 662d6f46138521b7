"""A stand-in Hub on 127.0.0.1: the routes that huggingface_hub asks, with faults to inject.

GET  /api/{models|datasets}/{id}/revision/{rev}[?blobs=True]
GET  /api/{models|datasets}/{id}/tree/{rev}
HEAD, GET  [/datasets]/{id}/resolve/{rev}/{path}      (Range honoured)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """One repository at one revision. lfs: paths that the Hub reports a sha256 for."""

    kind: str  # models | datasets
    name: str
    revision: str
    files: dict[str, bytes]
    lfs: set[str] = field(default_factory=set)
    gated: bool = False


@dataclass
class Faults:
    """What goes wrong. short: path → bytes sent before the connection breaks, once; wrong: path →
    bytes served in place of the true ones, which keep their stated size and hash."""

    short: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, bytes] = field(default_factory=dict)


class Hub:
    def __init__(self, repos: list[Repo]):
        self.repos = {(repo.kind, repo.name): repo for repo in repos}
        self.faults = Faults()
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.authorization: set[str | None] = set()
        self.url = ""

    def find(self, kind: str, name: str, revision: str) -> Repo | str:
        """The repository, or the Hub's error code."""
        repo = self.repos.get((kind, name))
        if repo is None:
            return "RepoNotFound"
        if repo.gated:
            return "GatedRepo"
        return repo if revision == repo.revision else "RevisionNotFound"

    def fetched(self, path: str) -> int:
        return sum(m == "GET" and p.endswith(path) for m, p, _ in self.requests)


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def refuse(self, code: str) -> None:
        self.send_response(403 if code == "GatedRepo" else 404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, value) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.authorization.add(self.headers.get("Authorization"))
        api = re.fullmatch(r"/api/(models|datasets)/(.+?)/(revision|tree)/([^/]+)(?:/.*)?", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api:
            repo = self.hub.find(api[1], api[2], api[4])
            if isinstance(repo, str):
                return self.refuse(repo)
            return self.send_json(self.tree(repo) if api[3] == "tree" else self.info(repo))
        if file:
            repo = self.hub.find("datasets" if file[1] else "models", file[2], file[3])
            if isinstance(repo, str):
                return self.refuse(repo)
            if file[4] not in repo.files:
                return self.refuse("EntryNotFound")
            return self.send_file(repo, file[4], body)
        self.refuse("EntryNotFound")

    def info(self, repo: Repo) -> dict:
        siblings = []
        for path, data in repo.files.items():
            entry = {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
            if path in repo.lfs:
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": repo.name, "sha": repo.revision, "siblings": siblings, "tags": []}

    def tree(self, repo: Repo) -> list[dict]:
        found = []
        for path, data in repo.files.items():
            entry = {"type": "file", "path": path, "oid": blob_id(data), "size": len(data)}
            if path in repo.lfs:
                oid = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
            found.append(entry)
        return found

    def send_file(self, repo: Repo, path: str, body: bool) -> None:
        data = self.hub.faults.wrong.get(path, repo.files[path])
        true = repo.files[path]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", repo.revision)
        etag = hashlib.sha256(true).hexdigest() if path in repo.lfs else blob_id(true)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        cut = self.hub.faults.short.pop(path, None)
        self.wfile.write(data[start:] if cut is None else data[start : start + cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


@contextlib.contextmanager
def serve_hub(repos: list[Repo]) -> Iterator[Hub]:
    hub = Hub(repos)
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
