"""Checks of responses from servers, and the classification of errors: which to retry, and how to describe them.

Each library behind fsspec has its own errors. They are classified by common properties (the HTTP status, the name
of the class, the service's error code), so that no library needs to be imported.

fsspec accepts HTTP responses of any length, decompresses them without a limit, and skips folders that it cannot list;
s3fs accepts a response that is not the requested range. The file systems of `http_system` and `s3_system` raise errors
instead.
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

__all__ = ["Failure", "check_length", "display_url", "failure_of", "http_system", "s3_system", "without_query"]

LISTING_BYTES: Final = 1 << 28  # the maximum size of a page that lists a folder
FIRST_WAIT_S: Final = 0.25
MAX_WAIT_S: Final = 10.0
NO_CREDENTIALS: Final = re.compile(r"(No|Default|Partial)Credentials|ProfileNotFound")
TRUNCATED: Final = re.compile(r"Short|ContentLengthError|IncompleteRead")
CLOSED: Final = re.compile(
    r"Connect|Disconnect|ChunkedEncoding|ClientOSError|ClientPayload|HTTPClientError|Protocol|\bReadError|ResponseStreaming"
)
EXPIRED: Final = re.compile(r"expired|RequestTimeTooSkewed|RefreshError", re.IGNORECASE)
BUSY_CODES: Final = {"SlowDown", "Throttling", "ThrottlingException", "InternalError", "RequestTimeout", "503", "500"}
START_BYTES: Final = 1024  # the start of a file that suffices to recognize its type
MAX_TEXT: Final = 300  # characters of a library's error message


class ShortResponse(ConnectionError):
    """The error for a response with fewer bytes than were requested."""


class Failure(NamedTuple):
    """The classification of an error.

    Attributes:
        error_type, error_number, message: the exception type to raise, its errno, and its message.
        is_transient: whether a retry may succeed.
        retry_after_s: the delay in seconds that the server requests before a retry, if any.
    """

    error_type: type[OSError]
    error_number: int
    message: str
    is_transient: bool = False
    retry_after_s: float | None = None

    def make_error(self, url: str, attempts: int) -> OSError:
        """Create the exception to raise."""
        suffix = f", in each of {attempts} attempts" if self.is_transient and attempts > 1 else ""
        return self.error_type(self.error_number, self.message + suffix, display_url(url))

    def wait_s(self, attempt: int) -> float:
        """Return the delay after a failed attempt, counted from 1. It doubles each time, unless the server sets it."""
        wait = FIRST_WAIT_S * 2 ** (attempt - 1) if self.retry_after_s is None else self.retry_after_s
        # Jitter of up to half the delay spreads the retries of many clients. It must not draw from a seeded generator.
        return min(MAX_WAIT_S, wait) * (0.5 + os.urandom(1)[0] / 512)


def display_url(url: str) -> str:
    """Return a URL for messages, without its password and its query, which may contain a signature."""
    scheme, separator, after_scheme = url.partition("://")
    host, slash, path = after_scheme.partition("/")
    server = host.rpartition("@")[2]
    return without_query(f"{scheme}{separator}{server}{slash}{path}")


def without_query(url: str) -> str:
    """Return a URL, or a path, without the query of HTTP, for the name of its file and its folder."""
    scheme, separator, _ = url.partition("://")
    return url.partition("?")[0] if separator and scheme.endswith(("http", "https")) else url


def failure_of(error: BaseException, url: str, timeout_s: float) -> Failure:
    """Classify the error of a request."""
    chain = [error]
    while len(chain) < 8 and (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)):
        chain.append(error := cause)
    names = " ".join({cls.__name__ for exception in chain for cls in type(exception).__mro__})
    statuses, codes, waits = zip(*map(_error_details, chain), strict=True)
    status, code, retry_after_s = (next(filter(None, values), None) for values in (statuses, codes, waits))
    message = visible(" ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split()))[:MAX_TEXT]
    permission_error = functools.partial(Failure, PermissionError, errno.EACCES)
    connection_error = functools.partial(Failure, ConnectionError, is_transient=True)
    if NO_CREDENTIALS.search(names):
        return permission_error(
            f"no credentials were found ({message}); pass them in storage_options, or store them where the library "
            "looks for them; for public data, disable them (s3: storage_options={'anon': True})"
        )
    if "Timeout" in names:
        return Failure(TimeoutError, errno.ETIMEDOUT, f"no complete response within {timeout_s:g} s", is_transient=True)
    if TRUNCATED.search(names) or any("ContentLengthError" in str(exception) for exception in chain):
        return connection_error(errno.EIO, f"the response has fewer bytes than announced ({message})")
    if status == 429 or (status or 0) >= 500 or (status is None and code in BUSY_CODES):
        answer = " ".join(str(part) for part in (status, code) if part)
        return Failure(
            OSError, errno.EIO, f"the server answered {answer}", is_transient=True, retry_after_s=retry_after_s
        )
    if status is None and CLOSED.search(names):
        return connection_error(errno.ECONNRESET, f"the connection failed or was closed early ({message})")
    is_refused = "PermissionError" in names
    if (status in (400, 401, 403) or code or is_refused) and EXPIRED.search(f"{message} {code}"):
        return permission_error(
            f"the credentials have expired ({message}); renew them and create the dataset again, or use credentials "
            "that renew themselves"
        )
    if status in (401, 403) or is_refused:
        detail = f"the server answered {status}" if status else message
        return permission_error(
            f"permission denied ({detail}); check the credentials in storage_options. Some servers also answer this "
            "for files that do not exist"
        )
    if status in (404, 410) or (status is None and "FileNotFoundError" in names):
        hint = "; data in memory:// belongs to one process, so use num_workers=0"
        text = "the file does not exist" + hint * url.startswith("memory://")
        return Failure(FileNotFoundError, errno.ENOENT, text)
    return Failure(OSError, errno.EIO, message if status is None else f"the server answered {status} ({message})")


def _error_details(error: Any) -> tuple[int | None, str, float | None]:
    """Return the details in an error of aiohttp, botocore, requests or httpx: the HTTP status, the error code of an
    S3-like service, and the delay in seconds that the server requests."""
    answer = getattr(error, "response", None)
    headers: Any = getattr(error, "headers", None) or getattr(answer, "headers", None)
    status, code, retry_after_s = getattr(answer, "status_code", None) or getattr(error, "status", None), "", None
    if isinstance(answer, dict):
        code = str(answer.get("Error", {}).get("Code") or "")
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or status
    with contextlib.suppress(TypeError, KeyError, ValueError):
        retry_after_s = float(headers["Retry-After"])
    return (status if type(status) is int and 400 <= status < 600 else None), code, retry_after_s


@functools.cache
def http_system() -> Any:
    """Return fsspec's file system for HTTP with three changes: it checks a response's headers before reading the body,
    limits the size of the body, and raises an error if a folder cannot be listed."""
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    class BoundedResponse(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                body = bytearray()
                try:
                    requested_range = self.request_info.headers.get("Range", "") if self.status < 300 else ""
                    limit = _limit_bytes(self.status, requested_range, self.headers.get("Content-Range", ""))
                    async for part in self.content.iter_any():
                        body += part
                        if len(body) <= limit:
                            continue
                        if not requested_range:
                            raise OSError(
                                f"the server answered more than {limit:,} bytes; expected the list of a folder's files"
                            )
                        if self.status != 200 or limit != files.LARGE_BYTES:
                            raise _unsupported_range_error(f"more than {limit:,} bytes", limit)
                        # The server does not support ranges, so this is the entire file.
                        files.check_large(len(body), bytes(body[:START_BYTES]), display_url(str(self.url)))
                except BaseException:
                    self.close()
                    raise
                self._body = bytes(body)
            return self._body

    class BoundedHTTP(HTTPFileSystem):
        def __init__(self, client_kwargs: Any = None, **options: Any) -> None:
            settings = {"response_class": BoundedResponse, **(client_kwargs or {})}
            settings["headers"] = {"Accept-Encoding": "identity", **(settings.get("headers") or {})}
            super().__init__(client_kwargs=settings, **options)

        async def _ls(self, url: str, detail: bool = True, **options: object) -> Any:
            try:
                return await super()._ls(url, detail, **options)
            except FileNotFoundError:
                raise
            except OSError as error:  # otherwise fsspec would silently skip the folder
                raise RuntimeError(f"the folder {display_url(url)!r} cannot be listed") from error

    return BoundedHTTP


@functools.cache
def s3_system() -> Any:
    """Return s3fs's file system with a check of each response's headers before its body is read."""
    from s3fs import S3FileSystem

    class CheckedS3(S3FileSystem):
        async def _call_s3(self, method: str, *arguments: object, **options: Any) -> Any:
            answer = await super()._call_s3(method, *arguments, **options)
            if "Range" in options and "Body" in answer:
                status = answer["ResponseMetadata"]["HTTPStatusCode"]
                limit = _limit_bytes(status, options["Range"], answer.get("ContentRange", ""))
                if (nbytes := answer.get("ContentLength", 0)) > limit:
                    raise _unsupported_range_error(f"{nbytes:,} bytes", limit)
            return answer

    return CheckedS3


def _limit_bytes(status: int, requested_range: str, content_range: str) -> int:
    """Return the maximum number of bytes of a response, given its status, the requested Range and the response's
    Content-Range. Raise an error if the response is not the requested part of the file."""
    span = re.fullmatch(r"bytes=(\d+)-(\d+)", requested_range)
    if span is None:
        return LISTING_BYTES
    begin, end = int(span[1]), int(span[2]) + 1
    if status == 206 or content_range:  # rclone's S3 answers a range with 200
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range)
        if match is None or int(match[1]) != begin or int(match[2]) >= end:
            raise OSError(
                f"the server answered {content_range or 'no Content-Range'!r} to a request for bytes {begin}-{end - 1}"
                ": it, or a proxy in front of it, serves ranges incorrectly; copy the file, or use another server"
            )
        if int(match[2]) + 1 < end and match[3] not in ("*", str(int(match[2]) + 1)):
            raise ShortResponse(f"{content_range} for a request of bytes {begin}-{end - 1}")
    elif begin:
        raise _unsupported_range_error("the entire file", end - begin)
    return end - begin


def _unsupported_range_error(answer: str, nbytes: int) -> OSError:
    return OSError(
        f"the server answered {answer} to a request for {nbytes:,} bytes: it does not support ranges, which all reads "
        "except those of entire image files need; copy the file, or use another server"
    )


def check_length(begin: int, end: int, data: bytes) -> bytes:
    """Return the response to a request for a range. Raise an error if it has another length."""
    if len(data) < end - begin:
        raise ShortResponse(f"{len(data):,} of the {end - begin:,} requested bytes at offset {begin:,}")
    if len(data) > end - begin:
        raise _unsupported_range_error(f"{len(data):,} bytes", end - begin)
    return data
