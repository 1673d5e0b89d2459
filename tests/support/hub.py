"""A stand-in for the Hugging Face hub on this machine: what its client sends to upload a model, recorded."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from huggingface_hub import ModelCard

LARGE = ".safetensors"  # stored apart from the repository


class Request(NamedTuple):
    """A request that was received."""

    method: str
    path: str
    token: str | None
    body: bytes


class Hub(ThreadingHTTPServer):
    """A server that knows repositories, files in storage, and commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.repositories: dict[str, bool] = {}  # whether they are private
        self.storage: dict[str, bytes] = {}  # by SHA-256
        self.commits: list[dict[str, bytes]] = []  # the files of each
        self.refusals: dict[str, tuple[int, str]] = {}  # of a path that contains the key

    def refuse(self, part: str, status: int, message: str = "") -> None:
        """Answer requests to a path with an error from now on."""
        self.refusals[part] = (status, message)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve in a thread until the block is left."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.server.requests.append(Request(self.command, path, token, body))
        refused = next((reply for part, reply in self.server.refusals.items() if part in path), None)
        status, content = (refused[0], {"error": refused[1]}) if refused else self.reply(path, body)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = answer

    def reply(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the content of an answer."""
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200 if ModelCard(json.loads(body)["content"]).data.license else 400, {}
        if path.startswith("/storage/"):
            digest = hashlib.sha256(body).hexdigest()
            self.server.storage[digest] = body
            return 200 if path.endswith(digest) else 400, {}
        name = next((name for name in self.server.repositories if f"/{name}" in path), None)
        if name is None:
            return 404, {"error": "Repository not found"}
        if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
            return 200, {"id": name, "private": self.server.repositories[name], "tags": [], "siblings": []}
        if path == f"/api/models/{name}/preupload/main":
            return 200, {"files": [self.mode(file["path"]) for file in json.loads(body)["files"]]}
        if path == f"/{name}.git/info/lfs/objects/batch":
            return 200, {"objects": [self.action(one) for one in json.loads(body)["objects"]]}
        if path == f"/api/models/{name}/commit/main":
            return self.commit(name, [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"{path} is not known here"}

    def create(self, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            return 409, {"error": "You already created this model repo", "url": url}
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.server.repositories[name] = private
        return 200, {"url": url}

    def mode(self, path: str) -> dict[str, Any]:
        return {
            "path": path,
            "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
            "shouldIgnore": False,
        }

    def action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.server.url}/storage/{wanted['oid']}"}}}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.storage[value["oid"]]
        self.server.commits.append(files)
        oid = f"{len(self.server.commits):040}"
        return 200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""
