"""Servers that shards are read from: HTTP with ranges and faults on demand, S3, and Google's storage."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import fsspec
from PIL import Image
from torch import Tensor

from dino_vit.data.image_set import ImageSet
from dino_vit.data.synthetic import make_textures
from tests.support.image_sets import write_tar


class Request(NamedTuple):
    """A request that was received."""

    method: str
    name: str
    start: int
    size: int
    ranged: bool


class Server(ThreadingHTTPServer):
    """Serves the files of a folder, and can be told to answer late, wrongly or not at all."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.latency = folder, latency
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        # Of the next requests for ranges: 500, cut, short, long, late or drip.
        self.faults: list[str] = []
        self.statuses: dict[str, list[int]] = {}  # of the next answers, by name
        self.down = False
        self.tells_versions = True
        self.lock = threading.Lock()

    def handle_error(self, *_: object) -> None:
        """Print nothing about clients that hang up."""

    def next_fault(self) -> str:
        with self.lock:
            return "500" if self.down else self.faults.pop() if self.faults else ""

    def requested(self) -> set[str]:
        """Return the names of the shards of which something was requested."""
        return {one.name for one in self.requests if one.ranged and one.name.endswith(".tar")}


@contextmanager
def serving(folder: Path, latency: float = 0.0) -> Iterator[Server]:
    """Serve in a thread until the block is left."""
    with Server(folder, latency) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    """Answers HEAD and GET, the latter of ranges too."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_HEAD(self) -> None:
        self.answer(content=False)

    def do_GET(self) -> None:
        self.answer(content=True)

    def answer(self, *, content: bool) -> None:
        name = unquote(urlsplit(self.path).path).lstrip("/")
        path = self.server.folder / name
        time.sleep(self.server.latency)
        whole = path.stat().st_size if path.is_file() else 0
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or whole), whole - 1) + 1
        ranged = "Range" in self.headers
        self.server.requests.append(Request(self.command, name, start, end - start, ranged))
        fault = self.server.next_fault() if ranged and content else ""
        time.sleep(2 * (fault == "late"))
        status = self.server.statuses[name].pop() if self.server.statuses.get(name) else 0
        if fault == "500" or self.server.down or status or not path.is_file():
            self.send_response(status or (404 if not path.is_file() else 500))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start) if content else b""
        length = end - start
        if fault in ("short", "long"):
            data = data[:-1] if fault == "short" else data + b"x"
            length = len(data)
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{whole}")
        self.send_header("Accept-Ranges", "bytes")
        if self.server.tells_versions:
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        self.end_headers()
        if fault == "drip":
            with suppress(OSError):  # until the client hangs up
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.2)
            self.close_connection = True
        elif fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""


@contextmanager
def s3_bucket(folder: Path) -> Iterator[str]:
    """Serve the files of a folder as the bucket `shards`, and yield the address of the server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        s3_client(url).create_bucket(Bucket="shards")
        for path in sorted(folder.iterdir()):
            put_object(url, path.name, path.read_bytes())
        yield url
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # the next server has another address


def s3_client(url: str) -> Any:
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)


def put_object(url: str, name: str, data: bytes) -> None:
    """Put an object into the bucket, or replace it."""
    s3_client(url).put_object(Bucket="shards", Key=name, Body=data)


def s3_environ(url: str) -> dict[str, str]:
    """Return the variables with which s3fs finds a server."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": url, "FSSPEC_S3_ENDPOINT_URL": url}


@contextmanager
def gcs_bucket(folder: Path, port: int) -> Iterator[Callable[[str, bytes], object]]:
    """Serve the files of a folder as a bucket of Google Cloud Storage, and yield what replaces an object."""
    from gcp_storage_emulator.server import create_server
    from gcsfs import GCSFileSystem

    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="shards")
    server.start()
    try:
        system = GCSFileSystem()
        for path in sorted(folder.iterdir()):
            system.pipe_file(f"shards/{path.name}", path.read_bytes())
        yield lambda name, data: system.pipe_file(f"shards/{name}", data)
    finally:
        server.stop()


def write_shards(folder: Path, shards: int = 8, images: int = 16) -> None:
    """Write generated textures as tar shards."""
    folder.mkdir(parents=True, exist_ok=True)
    source = make_textures(length=shards * images)
    for shard in range(shards):
        indices = range(shard * images, (shard + 1) * images)
        pictures = {f"{index:06d}.png": as_png(source, index) for index in indices}
        write_tar(folder / f"{shard:03d}.tar", pictures)


def as_png(source: ImageSet, index: int) -> bytes:
    file, image = io.BytesIO(), source.read(index)
    assert isinstance(image, Tensor)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()
