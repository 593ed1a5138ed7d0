"""What may be wrong with an answer: what is refused of HTTP, whether another attempt may help, and words for it.

Every library behind fsspec has errors of its own. They are told apart by what they have in common (the HTTP status, the
name of the class, the service's code), so that none of these libraries is imported here.

fsspec takes any answer over HTTP, of any length, unpacks it, and leaves out folders that it cannot list; s3fs takes
other bytes than were asked for. `http_system` and `s3_system` do not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gpuload.datasets import files
from gpuload.errors import visible

__all__ = ["Failure", "check_whole", "failure_of", "http_system", "s3_system", "shown"]

LISTING_BYTES: Final = 1 << 28  # the longest page of links that is read
FIRST_WAIT_S: Final = 0.25
LONGEST_WAIT_S: Final = 10.0
NO_CREDENTIALS: Final = re.compile(r"(No|Default|Partial)Credentials|ProfileNotFound")
TIMEOUT: Final = re.compile(r"Timeout")
CUT_SHORT: Final = re.compile(r"Short|ContentLengthError|IncompleteRead")
CLOSED: Final = re.compile(
    r"Connect|Disconnect|ChunkedEncoding|ClientOSError|ClientPayload|HTTPClientError|Protocol|^ReadError|ResponseStreaming"
)
EXPIRED: Final = re.compile(r"expired|RequestTimeTooSkewed|RefreshError", re.IGNORECASE)
BUSY_CODES: Final = {"SlowDown", "Throttling", "ThrottlingException", "InternalError", "RequestTimeout", "503", "500"}
TEXT: Final = 300  # characters of a library's own words


class Short(ConnectionError):
    """An answer of fewer bytes than were asked for."""


class Failure(NamedTuple):
    """What an error amounts to.

    `again`: another attempt may succeed; `after_s`: how long the server wants it to be waited, or None.
    """

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
    start, between, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    name = host.rpartition("@")[2]
    return f"{start}{between}{name}{slash}{path.partition('?')[0] if start.endswith(('http', 'https')) else path}"


def failure_of(error: BaseException, url: str, timeout_s: float) -> Failure:
    """Return what went wrong with a request."""
    chain = list(_chain(error))
    classes = {cls.__name__ for one in chain for cls in type(one).__mro__}
    statuses, named, waits = zip(*map(_facts, chain), strict=True)
    status, after_s = next(filter(None, statuses), None), next(filter(None, waits), None)
    codes = set(filter(None, named))
    words = visible(" ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split()))[:TEXT]
    refused = functools.partial(Failure, PermissionError, errno.EACCES)
    lost = functools.partial(Failure, ConnectionError, again=True)

    def is_a(pattern: re.Pattern[str]) -> bool:
        return any(map(pattern.search, classes))

    if is_a(NO_CREDENTIALS):
        return refused(
            f"there are no credentials for it ({words}); give them in storage_options, or where its library looks for "
            "them, and ask for public data without them (s3: storage_options={'anon': True})"
        )
    if is_a(TIMEOUT):
        return Failure(TimeoutError, errno.ETIMEDOUT, f"no whole answer within {timeout_s:g} s", again=True)
    if is_a(CUT_SHORT) or any("ContentLengthError" in str(one) for one in chain):
        return lost(errno.EIO, f"the answer has fewer bytes than it announced ({words})")
    if status == 429 or (status or 0) >= 500 or (status is None and codes & BUSY_CODES):
        code = f"{status or ''} {' '.join(codes)}".strip()
        return Failure(OSError, errno.EIO, f"the server answered {code}", again=True, after_s=after_s)
    if status is None and is_a(CLOSED):
        return lost(errno.ECONNRESET, f"the connection failed, or was closed early ({words})")
    if (status in (400, 401, 403) or codes or "PermissionError" in classes) and EXPIRED.search(f"{words} {codes}"):
        return refused(
            f"the credentials have expired ({words}); renew them, and make the dataset again, or take credentials that "
            "renew themselves"
        )
    if status in (401, 403) or "PermissionError" in classes:
        what = f"the server answered {status}" if status else words
        return refused(
            f"no permission to read it ({what}); look at the credentials in storage_options. Some servers say so of "
            "files that do not exist"
        )
    if status in (404, 410) or (status is None and "FileNotFoundError" in classes):
        more = "; what is in memory:// belongs to one process, so it takes num_workers=0"
        text = "there is no such file" + more * url.startswith("memory://")
        return Failure(FileNotFoundError, errno.ENOENT, text)
    return Failure(OSError, errno.EIO, words if status is None else f"the server answered {status} ({words})")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it comes from."""
    seen = 0
    while error is not None and seen < 8:
        yield error
        error, seen = error.__cause__ or (None if error.__suppress_context__ else error.__context__), seen + 1


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


class Unlisted(Exception):
    """A folder that cannot be listed; the cause says why."""


@functools.cache
def http_system() -> Any:
    """Return fsspec's file system for HTTP, with answers that are looked at before their body is taken, and read no
    further than is allowed; and with folders that cannot be listed as an error."""
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                parts, nbytes = [], 0
                try:
                    asked = self.request_info.headers.get("Range", "") if self.status < 300 else ""
                    limit = _limit_bytes(self.status, asked, self.headers.get("Content-Range", ""))
                    async for part in self.content.iter_any():
                        parts.append(part)
                        nbytes += len(part)
                        if nbytes <= limit:
                            continue
                        if asked and self.status == 200 and limit == files.LARGE_BYTES:  # a whole file: no ranges
                            files.check_large(nbytes, parts[0], shown(str(self.url)))
                        else:
                            raise _no_ranges(f"more than {limit:,} bytes", limit) if asked else _too_long(limit)
                except BaseException:
                    self.close()
                    raise
                self._body = b"".join(parts)
            return self._body

    class BoundedHTTP(HTTPFileSystem):
        def __init__(self, client_kwargs: Any = None, **options: Any) -> None:
            own = {"response_class": Bounded, **(client_kwargs or {})}
            own["headers"] = {"Accept-Encoding": "identity", **(own.get("headers") or {})}
            super().__init__(client_kwargs=own, **options)

        async def _ls(self, url: str, detail: bool = True, **options: Any) -> Any:
            try:
                return await super()._ls(url, detail, **options)
            except FileNotFoundError:
                raise
            except OSError as error:  # then fsspec would leave the folder out: a lost connection, a smaller data set
                raise Unlisted from error

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


def _limit_bytes(status: int, asked: str, answered: str) -> int:
    """Return how many bytes an answer may have, by its status, the Range that was asked for and its
    Content-Range. Refuse another part of the file than was asked for."""
    span = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
    if span is None:
        return LISTING_BYTES
    begin, end = int(span[1]), int(span[2]) + 1
    if status == 206 or answered:  # rclone's S3 answers a range with 200
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answered)
        if found is None or int(found[1]) != begin or int(found[2]) >= end:
            raise OSError(
                f"its answer is {answered or 'no Content-Range'!r} where the bytes {begin}-{end - 1} were asked for; "
                "the server, or a proxy before it, serves ranges wrongly: copy the file, or serve it otherwise"
            )
        if int(found[2]) + 1 < end and found[3] not in ("*", str(int(found[2]) + 1)):
            raise Short(f"{answered} where the bytes {begin}-{end - 1} were asked for")
    elif begin:
        raise _no_ranges("the whole file", end - begin)
    return end - begin


def _no_ranges(what: str, nbytes: int) -> OSError:
    return OSError(
        f"it answered {what} where {nbytes:,} were asked for: it does not serve ranges, which all but whole images "
        "take; copy the file, or serve it otherwise"
    )


def _too_long(limit: int) -> OSError:
    return OSError(f"it answered more than {limit:,} bytes, where the list of a folder's files was expected")


def check_whole(begin: int, end: int, data: bytes) -> bytes:
    if len(data) < end - begin:
        raise Short(f"{len(data):,} bytes from {begin:,} on, where {end - begin:,} were asked for")
    if len(data) > end - begin:
        raise _no_ranges(f"{len(data):,} bytes", end - begin)
    return data
