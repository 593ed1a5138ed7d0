"""What went wrong with a request: whether it is worth another attempt, and words for it.

Every library behind fsspec has errors of its own. They are told apart by what they have in common (the HTTP status, the
name of the class, the service's code), so that none of these libraries is imported here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gpuload.errors import visible

__all__ = ["Failure", "Short", "failure_of", "shown"]

CLOSED: Final = {
    "ChunkedEncodingError", "ClientConnectorDNSError", "ClientConnectorError", "ClientOSError", "ClientPayloadError",
    "ConnectError", "ConnectionClosedError", "EndpointConnectionError", "HTTPClientError", "IncompleteRead",
    "IncompleteReadError", "ProtocolError", "ReadError", "RemoteProtocolError", "ResponseStreamingError",
    "ServerDisconnectedError",
}  # fmt: skip
SHORT: Final = {"ContentLengthError", "IncompleteRead", "IncompleteReadError"}
TIMEOUTS: Final = {
    "ConnectTimeout", "ConnectTimeoutError", "FSTimeoutError", "PoolTimeout", "ReadTimeout", "ReadTimeoutError",
    "ServerTimeoutError",
}  # fmt: skip
NO_CREDENTIALS: Final = {
    "DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound",
}  # fmt: skip
EXPIRED: Final = re.compile(r"expired|RequestTimeTooSkewed|RefreshError", re.IGNORECASE)
BUSY_CODES: Final = {"SlowDown", "Throttling", "ThrottlingException", "InternalError", "RequestTimeout", "503", "500"}
TEXT: Final = 300  # characters of a library's own words


class Short(ConnectionError):
    """An answer of fewer bytes than were asked for."""


class Failure(NamedTuple):
    """What an error comes to.

    `again`: another attempt may succeed; `after_s`: how long the server wants it to be waited, or None.
    """

    kind: type[OSError]
    number: int
    text: str
    again: bool = False
    after_s: float | None = None

    def error(self, url: str, attempts: int) -> OSError:
        """What is raised for it."""
        times = f", in each of {attempts} attempts" if self.again and attempts > 1 else ""
        return self.kind(self.number, self.text + times, shown(url))


def shown(url: str) -> str:
    """A URL as messages have it: without a password, and without the query, which may be a signature."""
    start, between, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    name = host.rpartition("@")[2]
    return f"{start}{between}{name}{slash}{path.partition('?')[0] if start.endswith(('http', 'https')) else path}"


def failure_of(error: BaseException, url: str, timeout_s: float) -> Failure:
    """What went wrong with a request."""
    chain = list(_chain(error))
    names = {cls.__name__ for one in chain for cls in type(one).__mro__}
    status = next(filter(None, map(_status, chain)), None)
    codes = set(filter(None, map(_code, chain)))
    said = visible(" ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split()))[:TEXT]
    if names & NO_CREDENTIALS:
        return Failure(
            PermissionError,
            errno.EACCES,
            f"there are no credentials for it ({said}); give them in storage_options, or where its library looks for "
            "them, and ask for public data without them (s3: storage_options={'anon': True})",
        )
    if any(isinstance(one, TimeoutError) for one in chain) or names & TIMEOUTS:
        return Failure(TimeoutError, errno.ETIMEDOUT, f"no whole answer within {timeout_s:g} s", again=True)
    if names & SHORT or any(isinstance(one, Short) or "ContentLengthError" in str(one) for one in chain):
        return Failure(ConnectionError, errno.EIO, f"the answer has fewer bytes than it announced ({said})", again=True)
    if status in (429, None) or status >= 500:
        if status is not None or codes & BUSY_CODES:
            code = f"{status or ''} {' '.join(codes)}".strip()
            after = next(filter(None, map(_retry_after, chain)), None)
            return Failure(OSError, errno.EIO, f"the server answered {code}", again=True, after_s=after)
        if names & CLOSED or any(isinstance(one, ConnectionError) for one in chain):
            return Failure(
                ConnectionError, errno.ECONNRESET, f"the connection failed, or was closed early ({said})", again=True
            )
    if (status in (400, 401, 403) or codes or "PermissionError" in names) and EXPIRED.search(f"{said} {codes}"):
        return Failure(
            PermissionError,
            errno.EACCES,
            f"the credentials have expired ({said}); renew them, and make the dataset again, or take credentials that "
            "renew themselves",
        )
    if status in (401, 403) or "PermissionError" in names:
        what = f"the server answered {status}" if status else said
        return Failure(
            PermissionError,
            errno.EACCES,
            f"no permission to read it ({what}); look at the credentials in storage_options. Some servers say so of "
            "files that do not exist",
        )
    if status in (404, 410) or (status is None and any(isinstance(one, FileNotFoundError) for one in chain)):
        more = ""
        if url.startswith("memory://"):
            more = "; what is in memory:// belongs to one process, so it takes num_workers=0"
        return Failure(FileNotFoundError, errno.ENOENT, f"there is no such file{more}")
    if status is not None:
        return Failure(OSError, errno.EIO, f"the server answered {status} ({said})")
    return Failure(OSError, errno.EIO, said)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it comes from."""
    seen = 0
    while error is not None and seen < 8:
        yield error
        error, seen = error.__cause__ or (None if error.__suppress_context__ else error.__context__), seen + 1


def _status(error: Any) -> int | None:
    """The HTTP status in an error of aiohttp, botocore, requests or httpx."""
    answer = getattr(error, "response", None)
    found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    found = found or getattr(answer, "status_code", None) or getattr(error, "status", None)
    return found if type(found) is int and 400 <= found < 600 else None


def _code(error: Any) -> str | None:
    """The name that an S3-like service gives an error."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code") or "") if isinstance(answer, dict) else None


def _retry_after(error: Any) -> float | None:
    """The seconds that a server asks to be left alone."""
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    try:
        return float(headers["Retry-After"])  # pyright: ignore[reportOptionalSubscript]
    except (TypeError, KeyError, ValueError):
        return None
