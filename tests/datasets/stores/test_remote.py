"""`Client` and `RemoteIO`: requests for URLs, further attempts, limits, caches, and errors of servers."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import lacking
from helpers.http_server import PAGE, Server, served
from helpers.jpeg_dataset import jpegs
from helpers.processes import exit_code_in_fork, wait_until

import gpuload as gl
from gpuload.datasets import files
from gpuload.datasets.stores import remote as remote_module
from gpuload.datasets.stores import remote_failures
from gpuload.datasets.stores.opening import client as client_of
from gpuload.datasets.stores.remote import Client, Remote, RemoteFile, RemoteIO

DATA = os.urandom(300_000)
JPEG = jpegs()[0]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote_failures, "FIRST_WAIT_S", 0.01)
    with served({"a.bin": DATA, "b.bin": DATA[::-1], "c.jpg": JPEG, "folder/c d.bin": b"c"}) as server:
        yield server


def make_client(**options: Any) -> Client:
    return Client(Remote(**options))


def read(client: Client, server: Server, *spans: tuple[int, int], version: int = 1) -> list[bytes]:
    """Read spans of a.bin in one call, without a request for its size."""
    file = RemoteFile(client, f"{server.url}/a.bin", len(DATA), version, 0)
    return client.read([(file, begin, end - begin) for begin, end in spans])


def test_client_read_merges_near_ranges_and_requests_distant_ranges_concurrently(server: Server) -> None:
    server.awaited_requests = 3
    client = make_client(gap_bytes=1000)
    spans = [(200_000, 200_010), (0, 10), (900, 1000), (2000, 2100), (100_000, 100_005), (1000, 1000)]
    assert read(client, server, *spans) == [DATA[begin:end] for begin, end in spans]
    assert sorted(server.ranges()) == ["bytes=0-2099", "bytes=100000-100004", "bytes=200000-200009"]
    assert server.max_concurrent == 3
    server.requests.clear()
    server.max_concurrent, server.awaited_requests = 0, 2
    client = make_client(gap_bytes=0, in_flight=2)
    assert read(client, server, *spans[:5]) == [DATA[begin:end] for begin, end in spans[:5]]
    assert (len(server.ranges()), server.max_concurrent) == (5, 2)


def test_client_read_of_nested_ranges_requests_the_longest(server: Server) -> None:
    spans = [(100, 9000), (200, 300), (100, 150), (8000, 9000)]
    assert read(make_client(gap_bytes=0), server, *spans) == [DATA[begin:end] for begin, end in spans]
    assert server.ranges() == ["bytes=100-8999"]


def test_client_read_of_two_files_sends_two_requests(server: Server) -> None:
    client = make_client()
    file_a, file_b = (RemoteFile(client, f"{server.url}/{name}.bin", len(DATA), 1, 0) for name in "ab")
    assert client.read([(file_a, 0, 100), (file_b, 50, 100)]) == [DATA[:100], DATA[::-1][50:150]]
    assert sorted(server.requests) == [("a.bin", "bytes=0-99", "GET"), ("b.bin", "bytes=50-149", "GET")]


def test_client_and_file_system_of_a_host_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that opens a client or a file system waits a moment, so that a second thread could open one as well."""
    opened: list[str] = []
    barriers = {kind: threading.Barrier(2) for kind in ("client", "system")}

    def record_and_wait(kind: str) -> None:
        opened.append(kind)
        with contextlib.suppress(threading.BrokenBarrierError):
            barriers[kind].wait(0.1)

    original_init, open_system = Client.__init__, remote_module._open_file_system
    monkeypatch.setattr(Client, "__init__", lambda *args: record_and_wait("client") or original_init(*args))
    monkeypatch.setattr(
        remote_module, "_open_file_system", lambda *args: record_and_wait("system") or open_system(*args)
    )
    remote = Remote()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: client_of(remote)._file_system(f"http://host/{n}"), range(8)))
    assert sorted(opened) == ["client", "system"]
    assert len({id(system) for system, _ in results}) == 1


def test_client_read_requests_a_long_range_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "PIECE_BYTES", 100_000)
    assert read(make_client(), server, (5, 250_000)) == [DATA[5:250_000]]
    assert sorted(server.ranges()) == ["bytes=100005-200004", "bytes=200005-249999", "bytes=5-100004"]


@pytest.mark.parametrize("fault", [503, 429, 500, "reset", "short", "less", "stall"])
def test_client_read_returns_the_bytes_after_two_failures(server: Server, fault: Any) -> None:
    server.faults = [fault, fault]
    client = make_client(timeout_s=0.2 if fault == "stall" else 60)
    assert read(client, server, (10, 5000)) == [DATA[10:5000]]
    if fault != "stall":  # a further attempt may time out on a busy machine
        assert len(server.ranges()) == 3


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (503, OSError, r"the server answered 503, in each of 3 attempts: 'http://.*/a.bin'"),
        ("reset", ConnectionError, r"the connection failed or was closed early \(ServerDisconnected.*each of 3 att"),
        ("short", ConnectionError, r"the response has fewer bytes than announced .*in each of 3 attempts"),
        ("less", ConnectionError, r"response has fewer bytes than announced \(ShortResponse: bytes 10-54/300000 for a"),
        ("stall", TimeoutError, r"no complete response within 0.1.* s, in each of 3 attempts"),
    ],
)  # fmt: skip
def test_client_read_names_a_lasting_fault_and_the_number_of_attempts(
    server: Server, fault: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.always = fault
    client = make_client(retries=2, timeout_s=0.1 if fault == "stall" else 60)  # a busy server may be slow
    waits, original_wait_s = [], remote_failures.Failure.wait_s

    def record_wait_s(*arguments: Any) -> float:
        waits.append(original_wait_s(*arguments))
        return waits[-1]

    monkeypatch.setattr(remote_failures.Failure, "wait_s", record_wait_s)
    with pytest.raises(kind, match=message) as caught:
        read(client, server, (10, 100))
    assert caught.value.filename == f"{server.url}/a.bin"
    assert len(waits) == 2
    if fault != "stall":  # on a busy machine, the time may be up before the request arrives
        assert len(server.ranges()) in (3, 6)  # aiohttp itself tries a lost connection once more


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (403, PermissionError, r"permission denied \(the server answered 403\); check the credentials in stor"),
        (401, PermissionError, r"permission denied \(the server answered 401\)"),
        (404, FileNotFoundError, r"the file does not exist"),
        (418, OSError, r"the server answered 418"),
    ],
)
def test_client_raises_client_errors_at_once(server: Server, status: int, kind: type[Exception], message: str) -> None:
    server.always = status
    for call in (lambda client: read(client, server, (10, 100)), lambda client: client.stat([server.url + "/x"])):
        server.requests.clear()
        with pytest.raises(kind, match=message):
            call(make_client())
        assert len(server.ranges()) == 1


@pytest.mark.parametrize(
    ("fault", "begin", "answer"),
    [
        ("entire", 10, "the entire file to a request for 90 bytes: it does not support ranges"),
        ("other", 10, "'bytes 11-100/300000' to a request for bytes 10-99:"),
        ("other", 0, "'bytes 1-90/300000' to a request for bytes 0-89:"),
    ],
)
def test_client_read_refuses_an_unrequested_range(server: Server, fault: str, begin: int, answer: str) -> None:
    server.always = fault
    with pytest.raises(OSError, match=f"the server answered {answer}"):
        read(make_client(), server, (begin, begin + 90))


def test_client_read_files_needs_no_support_of_ranges(server: Server) -> None:
    server.always = "entire"
    assert make_client().read_files([server.url + "/a.bin"]) == [DATA]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other", r"the server answered 'bytes 11-100/300000' to a request for bytes 10-99"),
        ("entire", r"the server answered the entire file to a request for 90 bytes: it does not support ranges"),
        ("less", r"the response has fewer bytes than announced \(ShortResponse: bytes 10-54/300000 for a"),
    ],
)
def test_client_read_checks_the_responses_of_s3(server: Server, fault: str, message: str) -> None:
    lacking.require("s3fs")
    server.files["bucket/a.bin"] = DATA
    client = make_client(options={"anon": True, "endpoint_url": server.url}, retries=0)
    (file,) = client.stat(["s3://bucket/a.bin"])
    for server.always in ("fine", "200"):
        assert file.read_at(10, 90) == DATA[10:100]
    server.always = fault
    with pytest.raises(OSError, match=message):
        file.read_at(10, 90)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda client, server: read(client, server, (10, 100)),
            r"the server answered more than 90 bytes to a request for 90 bytes",
        ),
        (
            lambda client, server: client.read_files([server.url + "/a.bin"]),
            "more than 100,000 bytes to a request for 100,000 bytes",
        ),
        (
            lambda client, server: client.list_files(server.url),
            r"the server answered more than 100,000 bytes; expected the list of a",
        ),
    ],
    ids=["read", "read_files", "list_files"],
)
def test_client_refuses_endless_body(server: Server, call: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE_BYTES", 100_000)
    monkeypatch.setattr(remote_failures, "LISTING_BYTES", 100_000)
    server.always = "endless"
    with pytest.raises(OSError, match=message):
        call(make_client(), server)
    assert server.sent < 32 << 20  # what fits into the kernel's buffers


def test_client_list_files_and_glob_refuse_an_endless_listing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_failures, "LISTING_BYTES", 1000)
    for list_folder in (lambda client: client.list_files(server.url), lambda client: client.glob(server.url + "/**/*")):
        server.faults = ["fine", "endless"]
        with pytest.raises(OSError, match="expected the list of a folder's files"):
            list_folder(make_client())


def test_client_does_not_accept_compressed_responses(server: Server) -> None:
    server.files["zeros.bin"] = bytes(1 << 20)
    server.always = "gzip"
    assert make_client().read_files([server.url + "/zeros.bin"]) == [bytes(1 << 20)]
    assert server.ranges() == [f"bytes=0-{files.LARGE_BYTES - 1}"]
    assert read(make_client(), server, (10, 100)) == [DATA[10:100]]


def test_client_decompresses_a_response_up_to_the_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE_BYTES", 100_000)
    server.files |= {"zeros.jpg": JPEG[:3] + bytes(50 << 20), "zeros.bin": bytes(50 << 20)}
    server.always = "packed"
    checked_sizes: list[int] = []
    check = files.check_large
    monkeypatch.setattr(files, "check_large", lambda n, *arguments: checked_sizes.append(n) or check(n, *arguments))
    with (
        files.size_limits(1 << 20),
        pytest.raises(gl.DecodeError, match=r"zeros.jpg': the file has .* bytes, more than"),
    ):
        make_client().read_files([server.url + "/zeros.jpg"])
    with pytest.raises(gl.DecodeError, match=r"zeros.bin': not an image that gpuload decodes"):
        make_client().read_files([server.url + "/zeros.bin"])
    assert max(checked_sizes) < 4 << 20  # of the 50 MiB, little was decompressed


@pytest.mark.parametrize("fault", ["page", "empty", "cut"])
def test_client_does_not_cache_a_bad_response_with_status_200(server: Server, fault: str, tmp_path: Path) -> None:
    options = {"cache_bytes": 1 << 20, "cache_folder": tmp_path}
    server.faults = [fault]
    bad = {"page": PAGE, "empty": b"", "cut": JPEG[: len(JPEG) // 2]}[fault]
    assert make_client(**options).read_files([server.url + "/c.jpg"]) == [bad]
    for _ in range(2):
        assert make_client(**options).read_files([server.url + "/c.jpg"]) == [JPEG]
    assert len(server.ranges()) == 2


def test_client_names_a_refused_connection() -> None:
    with socket.socket() as occupied:  # bound, so that no program can listen at its port
        occupied.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match=r"the connection failed.*, in each of 2 attempts"):
            Client(Remote(retries=1)).read_files([f"http://127.0.0.1:{occupied.getsockname()[1]}/x"])


def test_client_errors_hide_secrets(server: Server) -> None:
    server.always = 403
    url = server.url.replace("//", "//user:hidden@") + "/a.bin?signature=hidden"
    with pytest.raises(PermissionError, match=r"'http://127.*/a.bin'") as caught:
        make_client().read_files([url])
    assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(Remote({"key": "hidden"}))


def test_client_stat_list_files_and_glob_describe_files(server: Server) -> None:
    client = make_client()
    (first_version,) = client.stat([server.url + "/a.bin"])
    server.version = "2"
    (second_version,) = client.stat([server.url + "/a.bin"])
    assert first_version.size == second_version.size == len(DATA)
    assert 0 < first_version.mtime_ns != second_version.mtime_ns < 1 << 63
    assert client.list_files(server.url) == [
        ("a.bin",) * 2, ("b.bin",) * 2, ("c.jpg",) * 2, ("folder/c%20d.bin", "folder/c d.bin")
    ]  # fmt: skip
    assert client.glob(f"{server.url}/*.bin") == [f"{server.url}/a.bin", f"{server.url}/b.bin"]


def test_client_of_a_remote_is_shared_in_a_process_and_new_in_a_fork(server: Server) -> None:
    def has_new_client() -> bool:
        new_client = client_of(remote)
        return new_client is not client and new_client.stat([server.url + "/a.bin"])[0].size == len(DATA)

    remote = Remote({"headers": {"x": "y"}}, retries=1)
    client = client_of(remote)
    assert client_of(remote) is client
    copy = pickle.loads(pickle.dumps(remote))
    assert (copy.options, copy.retries) == ({"headers": {"x": "y"}}, 1)
    assert client_of(copy) is not client
    client.stat([server.url + "/a.bin"])
    assert exit_code_in_fork(has_new_client) == 0


def test_client_opens_in_a_child_forked_while_a_thread_held_the_lock() -> None:
    is_locked, may_release = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with remote_module._lock:
            is_locked.set()
            may_release.wait()

    def open_client() -> Client:
        signal.alarm(20)  # instead of blocking forever
        return client_of(Remote())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold_lock)
        is_locked.wait()
        try:
            assert exit_code_in_fork(open_client) == 0
        finally:
            may_release.set()


def test_client_is_collected_with_its_remote() -> None:
    remote = Remote()
    client_reference = weakref.ref(client_of(remote))
    del remote
    assert client_reference() is None
    assert client_of(None) is client_of(None)


def test_client_cache_is_shared_and_depends_on_the_version(server: Server, tmp_path: Path) -> None:
    options = {"cache_bytes": 1 << 20, "cache_folder": tmp_path, "gap_bytes": 0}
    spans = [(10, 20), (131_000, 132_000), (299_990, 300_000)]
    for expected_requests in (1, 0):  # one request for three adjacent blocks, then the cache
        server.requests.clear()
        assert read(make_client(**options), server, *spans) == [DATA[b:e] for b, e in spans]
        assert len(server.ranges()) == expected_requests
    read(make_client(**options), server, (10, 20), version=2)
    assert len(server.ranges()) == 1
    for expected_requests in (1, 1):  # in total
        assert make_client(**options).read_files([server.url + "/c.jpg"]) == [JPEG]
        assert len(server.ranges("c.jpg")) == expected_requests


def test_remote_io_windows_grow_in_sequential_reads(server: Server) -> None:
    file = make_client().stat([f"{server.url}/a.bin"])[0]
    server.requests.clear()
    sequential = RemoteIO(file)
    for offset in range(0, 299_000, 2000):
        assert sequential.read_at(offset, 512) == DATA[offset : offset + 512], offset
    assert len(server.ranges()) == 3  # windows of 64, 128 and 256 KiB
    server.requests.clear()
    scattered = RemoteIO(file)
    assert [scattered.read_at(offset, 512) for offset in (0, 200_000)] == [DATA[:512], DATA[200_000:200_512]]
    assert server.ranges() == ["bytes=0-65535", "bytes=200000-265535"]  # windows of 64 KiB
    assert scattered.read_at(299_999, 512) == DATA[299_999:]


def test_remote_io_seeks_and_reads_loaded_ranges_without_requests(server: Server) -> None:
    file = RemoteIO(make_client().stat([f"{server.url}/a.bin"])[0])
    file.load([(100, 200), (250_000, 250_010)])
    server.requests.clear()
    assert (file.seek(150), file.read(50), file.tell()) == (150, DATA[150:200], 200)
    assert (file.seek(-50_000, 2), file.read(10)) == (250_000, DATA[250_000:250_010])
    assert server.ranges() == []
    assert (file.seek(-5, 2), file.read(50)) == (299_995, DATA[-5:])


def test_client_reads_synchronous_file_systems() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe({"/test-client/a": DATA, "/test-client/b": b"b"})
    client = make_client()
    urls = ["memory://test-client/a", "memory://test-client/b"]
    assert client.read_files(urls) == [DATA, b"b"]
    assert [file.size for file in client.stat(urls)] == [len(DATA), 1]
    assert client.glob("memory://test-client/*") == ["memory:///test-client/a", "memory:///test-client/b"]
    with pytest.raises(FileNotFoundError, match=r"the file does not exist; data in memory:// belongs to one process"):
        client.stat(["memory://test-client/none"])
    with pytest.raises(IsADirectoryError):
        client.stat(["memory://test-client"])


def test_client_read_of_a_synchronous_file_system_times_out() -> None:
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.registry import register_implementation

    released = threading.Event()

    class Stalled(MemoryFileSystem):
        protocol = "stalled"

        def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
            released.wait(20)
            return super().cat_file(path, start, end)

    register_implementation("stalled", Stalled, clobber=True)
    file = RemoteFile(make_client(timeout_s=0.1, retries=1), "stalled://a", 10, 1, 0)
    try:
        with pytest.raises(TimeoutError, match=r"no complete response within .* s, in each of 2 attempts"):
            file.read_at(0, 10)
    finally:
        released.set()


def test_client_ignores_listings_that_a_file_system_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec import AbstractFileSystem
    from fsspec.registry import _registry

    sizes = {"a.bin": 10}

    class Listing(AbstractFileSystem):
        protocol = "listing"

        def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
            if path not in self.dircache:
                files = [{"name": f"host/{name}", "size": size, "type": "file"} for name, size in sizes.items()]
                self.dircache[path] = files
            return self.dircache[path]

        def invalidate_cache(self, path: str | None = None) -> None:
            self.dircache.clear()

    monkeypatch.setitem(_registry, "listing", Listing)
    client = make_client()
    for nbytes in (10, 20):
        sizes["a.bin"] = nbytes
        assert [file.size for file in client.stat(["listing://host/a.bin"])] == [nbytes]
    for name in ("b.bin", "c.bin"):
        sizes[name] = 1
        assert [listed for listed, _ in client.list_files("listing://host")] == list(sizes)
    for name in ("d.bin", "e.bin"):
        sizes[name] = 1
        assert client.glob("listing://host/*.bin") == [f"listing://host/{name}" for name in sizes]


def test_client_uses_a_file_system_that_the_user_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.http import HTTPFileSystem
    from fsspec.registry import _registry

    class UserFileSystem(HTTPFileSystem):
        async def _cat_file(self, url: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
            return JPEG

    assert make_client()._file_system("http://host/x")[0].__class__.__name__ == "BoundedHTTP"
    monkeypatch.setitem(_registry, "http", UserFileSystem)
    assert make_client().read_files(["http://host/x.jpg"]) == [JPEG]


def test_client_refuses_an_unknown_scheme() -> None:
    with pytest.raises(ValueError, match=r"'nonesuch://x/y' cannot be opened: Protocol not known"):
        make_client().read_files(["nonesuch://x/y"])


def test_client_read_of_ranges_that_time_out_waits_for_all_of_them_at_once(server: Server) -> None:
    server.always = "stall"
    client = make_client(timeout_s=0.1, retries=1, gap_bytes=0)
    with pytest.raises(TimeoutError):
        read(client, server, *((begin, begin + 5) for begin in range(0, 300_000, 50_000)))
    wait_until(lambda: len({*server.ranges()}) == 6, "all six ranges are requested, although the first one fails")
