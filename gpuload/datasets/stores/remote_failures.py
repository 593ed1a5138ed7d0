"""Which answers are refused, which errors are worth another attempt, and words for them.

Each library behind fsspec has its own errors. They are told apart by what they have in common (the HTTP status, the
name of the class, the code of the service), so that no library is imported for it.

fsspec takes any answer over HTTP, of any length, unpacks it, and leaves out folders that it cannot list; s3fs takes
other bytes than were asked for. `http_system` and `s3_system` do not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from typing import Any, Final, NamedTuple

from gpuload.datasets import files
from gpuload.errors import visible

__all__ = ["Failure", "check_whole", "failure_of", "http_system", "s3_system", "shown"]

LISTING_BYTES: Final = 1 << 28  # the longest page of links that is read
FIRST_WAIT_S: Final = 0.25
LONGEST_WAIT_S: Final = 10.0
NO_CREDENTIALS: Final = re.compile(r"(No|Default|Partial)Credentials|ProfileNotFound")
CUT_SHORT: Final = re.compile(r"Short|ContentLengthError|IncompleteRead")
CLOSED: Final = re.compile(
    r"Connect|Disconnect|ChunkedEncoding|ClientOSError|ClientPayload|HTTPClientError|Protocol|\bReadError|ResponseStreaming"
)
EXPIRED: Final = re.compile(r"expired|RequestTimeTooSkewed|RefreshError", re.IGNORECASE)
BUSY_CODES: Final = {"SlowDown", "Throttling", "ThrottlingException", "InternalError", "RequestTimeout", "503", "500"}
START: Final = 1024  # bytes that say of what kind a file is
TEXT: Final = 300  # characters of a library's own words


class Short(ConnectionError):
    """An answer of fewer bytes than were asked for."""


class Failure(NamedTuple):
    """A kind of error: whether another attempt may succeed, and how long the server asks to be left alone."""

    kind: type[OSError]
    number: int
    text: str
    again: bool = False
    after_s: float | None = None

    def error(self, url: str, attempts: int) -> OSError:
        """Return what is raised for it."""
        times = f", in each of {attempts} attempts" if self.again and attempts > 1 else ""
        return self.kind(self.number, self.text + times, shown(url))

    def wait_s(self, attempt: int) -> float:
        """Return how long to wait before the attempt after this one."""
        wait = FIRST_WAIT_S * 2 ** (attempt - 1) if self.after_s is None else self.after_s
        # Not all at once again: half of it is drawn, from no generator that anybody seeds.
        return min(LONGEST_WAIT_S, wait) * (0.5 + os.urandom(1)[0] / 512)


def shown(url: str) -> str:
    """Return a URL as messages have it: without a password, and without the query, which may be a signature."""
    start, between, after_scheme = url.partition("://")
    host, slash, path = after_scheme.partition("/")
    name = host.rpartition("@")[2]
    return f"{start}{between}{name}{slash}{path.partition('?')[0] if start.endswith(('http', 'https')) else path}"


def failure_of(error: BaseException, url: str, timeout_s: float) -> Failure:
    """Return what went wrong with a request."""
    chain = [error]
    while len(chain) < 8 and (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)):
        chain.append(error := cause)
    names = " ".join({cls.__name__ for one in chain for cls in type(one).__mro__})
    statuses, codes, waits = zip(*map(_facts, chain), strict=True)
    status, code, after_s = (next(filter(None, facts), None) for facts in (statuses, codes, waits))
    words = visible(" ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split()))[:TEXT]
    refused = functools.partial(Failure, PermissionError, errno.EACCES)
    lost = functools.partial(Failure, ConnectionError, again=True)
    if NO_CREDENTIALS.search(names):
        return refused(
            f"there are no credentials for it ({words}); give them in storage_options, or where its library looks for "
            "them, and ask for public data without them (s3: storage_options={'anon': True})"
        )
    if "Timeout" in names:
        return Failure(TimeoutError, errno.ETIMEDOUT, f"no whole answer within {timeout_s:g} s", again=True)
    if CUT_SHORT.search(names) or any("ContentLengthError" in str(one) for one in chain):
        return lost(errno.EIO, f"the answer has fewer bytes than it announced ({words})")
    if status == 429 or (status or 0) >= 500 or (status is None and code in BUSY_CODES):
        answer = " ".join(str(fact) for fact in (status, code) if fact)
        return Failure(OSError, errno.EIO, f"the server answered {answer}", again=True, after_s=after_s)
    if status is None and CLOSED.search(names):
        return lost(errno.ECONNRESET, f"the connection failed, or was closed early ({words})")
    is_refused = "PermissionError" in names
    if (status in (400, 401, 403) or code or is_refused) and EXPIRED.search(f"{words} {code}"):
        return refused(
            f"the credentials have expired ({words}); renew them, and make the dataset again, or take credentials that "
            "renew themselves"
        )
    if status in (401, 403) or is_refused:
        what = f"the server answered {status}" if status else words
        return refused(
            f"no permission to read it ({what}); look at the credentials in storage_options. Some servers say so of "
            "files that do not exist"
        )
    if status in (404, 410) or (status is None and "FileNotFoundError" in names):
        more = "; what is in memory:// belongs to one process, so it takes num_workers=0"
        text = "there is no such file" + more * url.startswith("memory://")
        return Failure(FileNotFoundError, errno.ENOENT, text)
    return Failure(OSError, errno.EIO, words if status is None else f"the server answered {status} ({words})")


def _facts(error: Any) -> tuple[int | None, str, float | None]:
    """Return what an error of aiohttp, botocore, requests or httpx says: the HTTP status, the name that an S3-like
    service gives the error, and for how many seconds the server asks to be left alone."""
    answer: Any = getattr(error, "response", None)
    headers: Any = getattr(error, "headers", None) or getattr(answer, "headers", None)
    status, code, after_s = getattr(answer, "status_code", None) or getattr(error, "status", None), "", None
    if isinstance(answer, dict):
        code = str(answer.get("Error", {}).get("Code") or "")
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or status
    with contextlib.suppress(TypeError, KeyError, ValueError):
        after_s = float(headers["Retry-After"])
    return (status if type(status) is int and 400 <= status < 600 else None), code, after_s


@functools.cache
def http_system() -> Any:
    """Return fsspec's file system for HTTP, with answers that are looked at before their body is taken, and read no
    further than is allowed; and with folders that cannot be listed as an error."""
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                body = bytearray()
                try:
                    range_asked = self.request_info.headers.get("Range", "") if self.status < 300 else ""
                    limit = _limit_bytes(self.status, range_asked, self.headers.get("Content-Range", ""))
                    async for part in self.content.iter_any():
                        body += part
                        if len(body) <= limit:
                            continue
                        if not range_asked:
                            raise OSError(
                                f"it answered more than {limit:,} bytes, where the list of a folder's files was "
                                "expected"
                            )
                        if self.status != 200 or limit != files.LARGE_BYTES:
                            raise _no_ranges(f"more than {limit:,} bytes", limit)
                        # From a server without ranges.
                        files.check_large(len(body), bytes(body[:START]), shown(str(self.url)))
                except BaseException:
                    self.close()
                    raise
                self._body = bytes(body)
            return self._body

    class BoundedHTTP(HTTPFileSystem):
        def __init__(self, client_kwargs: Any = None, **options: Any) -> None:
            settings = {"response_class": Bounded, **(client_kwargs or {})}
            settings["headers"] = {"Accept-Encoding": "identity", **(settings.get("headers") or {})}
            super().__init__(client_kwargs=settings, **options)

        async def _ls(self, url: str, detail: bool = True, **options: Any) -> Any:
            try:
                return await super()._ls(url, detail, **options)
            except FileNotFoundError:
                raise
            except OSError as error:  # then fsspec would leave the folder out: a lost connection, a smaller data set
                raise RuntimeError(f"the folder {shown(url)!r} cannot be listed") from error

    return BoundedHTTP


@functools.cache
def s3_system() -> Any:
    """Return s3fs's file system, with answers that are looked at before their body is taken."""
    from s3fs import S3FileSystem

    class CheckedS3(S3FileSystem):
        async def _call_s3(self, method: str, *more: Any, **options: Any) -> Any:
            answer = await super()._call_s3(method, *more, **options)
            if "Range" in options and "Body" in answer:
                status = answer["ResponseMetadata"]["HTTPStatusCode"]
                limit = _limit_bytes(status, options["Range"], answer.get("ContentRange", ""))
                if (nbytes := answer.get("ContentLength", 0)) > limit:
                    raise _no_ranges(f"{nbytes:,} bytes", limit)
            return answer

    return CheckedS3


def _limit_bytes(status: int, range_asked: str, answered: str) -> int:
    """Return how many bytes an answer may have, by its status, the Range that was asked for and its
    Content-Range. Refuse another part of the file than was asked for."""
    span = re.fullmatch(r"bytes=(\d+)-(\d+)", range_asked)
    if span is None:
        return LISTING_BYTES
    begin, end = int(span[1]), int(span[2]) + 1
    if status == 206 or answered:  # rclone's S3 answers a range with 200
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answered)
        if match is None or int(match[1]) != begin or int(match[2]) >= end:
            raise OSError(
                f"its answer is {answered or 'no Content-Range'!r} where the bytes {begin}-{end - 1} were asked for; "
                "the server, or a proxy before it, serves ranges wrongly: copy the file, or serve it otherwise"
            )
        if int(match[2]) + 1 < end and match[3] not in ("*", str(int(match[2]) + 1)):
            raise Short(f"{answered} where the bytes {begin}-{end - 1} were asked for")
    elif begin:
        raise _no_ranges("the whole file", end - begin)
    return end - begin


def _no_ranges(what: str, nbytes: int) -> OSError:
    return OSError(
        f"it answered {what} where {nbytes:,} were asked for: it does not serve ranges, which all but whole images "
        "take; copy the file, or serve it otherwise"
    )


def check_whole(begin: int, end: int, data: bytes) -> bytes:
    if len(data) < end - begin:
        raise Short(f"{len(data):,} bytes from {begin:,} on, where {end - begin:,} were asked for")
    if len(data) > end - begin:
        raise _no_ranges(f"{len(data):,} bytes", end - begin)
    return data
