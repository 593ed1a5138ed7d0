"""A small HTTP server on loopback, in this process, with range requests, and with faults as of cloud storage."""

from __future__ import annotations

import contextlib
import gzip
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

PAGE = b"<!doctype html><title>Log in</title>"


class Server(ThreadingHTTPServer):
    """A server of files in memory.

    Attributes:
        files: path → bytes, without a leading slash.
        faults: the outcomes of the next GET requests, in order: a status such as 503, "stall" (no answer), "reset"
            (closed without an answer), "short" (half of the body), "less" (a complete answer with half the range),
            "entire" (the entire file, ignoring the range), "cut" (also ignores the range, and sends half of the file as
            if that were all), "other" (a shifted range, declared as such), "page" (status 200 and a login page),
            "empty" (status 200 and an empty body), "gzip" (compressed if the client accepts that), "packed"
            (compressed in any case), "endless" (a body without end), "200" (the range with status 200, like rclone's
            S3), or "fine".
        always: the outcome of all requests after `faults`.
        requests: path, range and method of each request.
        max_concurrent: the maximum number of concurrent requests.
        sent: the bytes sent in endless bodies.
        awaited_requests: the number of requests that must arrive before the first is answered, which then waits a
            moment for one more.
    """

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(files)
        self.faults: list[int | str] = []
        self.always: int | str = "fine"
        self.requests: list[tuple[str, str, str]] = []
        self.max_concurrent = self.concurrent = 0
        self.awaited_requests = self.sent = 0
        self.version = "1"
        self.lock = threading.Condition()
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, ending: str = "") -> list[str]:
        """Return the requested ranges of files whose names end with `ending`."""
        return [span for path, span, method in self.requests if method == "GET" and path.endswith(ending)]


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        server = self.server
        with server.lock:
            server.concurrent += 1
            server.max_concurrent = max(server.max_concurrent, server.concurrent)
            if server.awaited_requests:
                server.lock.notify_all()
                server.lock.wait_for(lambda: server.max_concurrent >= server.awaited_requests, 60)
                server.lock.wait_for(lambda: server.max_concurrent > server.awaited_requests, 0.05)
            server.concurrent -= 1  # before the client can receive its answer and send another request
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        name, span = unquote(self.path.partition("?")[0]).lstrip("/"), self.headers.get("Range", "")
        with self.server.lock:
            self.server.requests.append((name, span, self.command))
            fault = self.server.always
            if with_body and self.server.faults:
                fault = self.server.faults.pop(0)
        if isinstance(fault, int):
            self.reply(fault, b"", {})
        elif fault == "stall":
            self.server.stopping.wait(20)
            self.close_connection = True
        elif fault == "reset":
            self.close_connection = True
        elif fault == "page":
            self.reply(200, PAGE, {"Content-Type": "text/html"}, with_body=with_body)
        elif fault == "empty":
            self.reply(200, b"", {}, with_body=with_body)
        elif fault == "endless" and with_body:
            self.send_without_end(span)
        elif any(path.startswith(folder := name.rstrip("/") + "/" if name else "") for path in self.server.files):
            self.reply(200, self.listing(folder), {"Content-Type": "text/html"}, with_body=with_body)
        elif name not in self.server.files:
            self.reply(404, b"", {})
        else:
            self.send(self.server.files[name], span, str(fault), with_body)

    def send(self, data: bytes, span: str, fault: str, with_body: bool) -> None:
        headers = {"ETag": f'"{len(data)}-{self.server.version}"', "Accept-Ranges": "bytes"}
        status = 200
        if fault == "cut":
            span, data = "", data[: len(data) // 2]
        if fault == "packed" or (fault == "gzip" and "gzip" in self.headers.get("Accept-Encoding", "")):
            span, data, headers["Content-Encoding"] = "", gzip.compress(data), "gzip"
        if (byte_range := re.fullmatch(r"bytes=(\d+)-(\d+)", span)) and fault != "entire":
            begin, end = int(byte_range[1]), min(int(byte_range[2]) + 1, len(data))
            if fault == "less":
                end = (begin + end) // 2
            if fault == "other":
                begin, end = begin + 1, end + 1
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            data, status = data[begin:end], 200 if fault == "200" else 206
        self.reply(status, data, headers, cut=len(data) // 2 if fault == "short" else None, with_body=with_body)

    def reply(
        self, status: int, data: bytes, headers: dict[str, str], cut: int | None = None, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    def send_without_end(self, span: str) -> None:
        """Send a chunked body until the client disconnects."""
        self.send_response(206 if span else 200)
        if byte_range := re.fullmatch(r"bytes=(\d+)-(\d+)", span):
            self.send_header("Content-Range", f"bytes {byte_range[1]}-{byte_range[2]}/{1 << 40}")
        self.send_header("Content-Type", "text/html")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while not self.server.stopping.is_set():
                self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
                self.server.sent += 0x10000

    def listing(self, folder: str) -> bytes:
        names_in_folder = [name[len(folder) :] for name in self.server.files if name.startswith(folder)]
        names = {name.partition("/")[0] + ("/" if "/" in name else "") for name in names_in_folder}
        return "".join(f'<a href="{quote(name)}">{name}</a>\n' for name in ["../", *sorted(names)]).encode()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(files: Mapping[str, bytes]) -> Iterator[Server]:
    """Run a server of these files for the duration of the block."""
    server = Server(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
