"""`failure_of`: errors of the libraries behind fsspec, and which of them are transient."""

from __future__ import annotations

import pytest
from helpers import lacking

from gpuload.datasets.stores.remote_failures import display_url, failure_of

URL = "s3://bucket/key"


def s3_error(code: str, status: int) -> Exception:
    """Make the error that s3fs raises for a response."""
    from botocore import exceptions
    from s3fs import errors

    answer = {"Error": {"Code": code, "Message": "…"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    try:
        try:
            raise exceptions.ClientError(answer, "GetObject")
        except Exception as error:
            raise errors.translate_boto_error(error) from error
    except Exception as error:
        return error


@lacking.needs("botocore")
@pytest.mark.parametrize(
    ("code", "status", "kind", "message", "is_transient"),
    [
        ("AccessDenied", 403, PermissionError, "permission denied (the server answered 403)", False),
        ("403", 403, PermissionError, "permission denied", False),
        ("ExpiredToken", 400, PermissionError, "the credentials have expired (", False),
        ("RequestTimeTooSkewed", 403, PermissionError, "the credentials have expired (", False),
        ("InvalidAccessKeyId", 403, PermissionError, "permission denied", False),
        ("SignatureDoesNotMatch", 403, PermissionError, "permission denied", False),
        ("NoSuchKey", 404, FileNotFoundError, "the file does not exist", False),
        ("404", 404, FileNotFoundError, "the file does not exist", False),
        ("NoSuchBucket", 404, FileNotFoundError, "the file does not exist", False),
        ("SlowDown", 503, OSError, "the server answered 503 SlowDown", True),
        ("InternalError", 500, OSError, "the server answered 500 InternalError", True),
        ("InvalidRange", 416, OSError, "the server answered 416", False),
    ],
)
def test_failure_of_s3_errors_has_a_type_a_message_and_transience(
    code: str, status: int, kind: type[OSError], message: str, is_transient: bool
) -> None:
    failure = failure_of(s3_error(code, status), URL, 1)
    assert (failure.error_type, failure.is_transient) == (kind, is_transient)
    assert message in failure.message
    error = failure.make_error(URL, 3)
    assert isinstance(error, kind)
    assert error.filename == URL
    assert (", in each of 3 attempts" in str(error)) == is_transient


@lacking.needs("botocore")
def test_failure_of_missing_credentials_suggests_anon() -> None:
    from botocore.exceptions import NoCredentialsError

    failure = failure_of(NoCredentialsError(), URL, 1)
    assert failure.error_type is PermissionError
    assert not failure.is_transient
    assert failure.message.startswith("no credentials were found (NoCredentialsError: Unable to locate credentials)")
    assert "storage_options={'anon': True}" in failure.message


def test_failure_of_file_not_found_follows_the_status_of_its_cause() -> None:
    class ClientResponseError(Exception):  # which fsspec turns into FileNotFoundError
        status = 503

    error = FileNotFoundError("http://x/y")
    error.__cause__ = ClientResponseError()
    assert failure_of(error, "http://x/y", 1).is_transient
    assert failure_of(FileNotFoundError("x"), URL, 1).error_type is FileNotFoundError


def test_failure_of_an_unknown_error_quotes_it() -> None:
    failure = failure_of(RuntimeError("line one\nline two"), URL, 1)
    assert (failure.error_type, failure.is_transient) == (OSError, False)
    assert failure.message == "RuntimeError: line one line two"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:word@host:8/a/b.jpg?X-Amz-Signature=1", "https://host:8/a/b.jpg"),
        ("s3://bucket/a?b", "s3://bucket/a?b"),
        ("sftp://user:word@host/a", "sftp://host/a"),
        ("memory://", "memory://"),
    ],
)
def test_display_url_hides_secrets(url: str, shown: str) -> None:
    assert display_url(url) == shown


def test_wait_s_doubles_unless_the_server_sets_it() -> None:
    class Busy(Exception):
        status = 503

    class BusyFor7Seconds(Busy):
        def __init__(self) -> None:
            self.headers = {"Retry-After": "7"}

    delays = [failure_of(Busy(), URL, 1).wait_s(attempt) for attempt in range(1, 6)]
    for attempt, delay in enumerate(delays):
        assert 0.5 <= delay / (0.25 * 2**attempt) <= 1, attempt  # half of the delay is random
    assert 3.5 <= failure_of(BusyFor7Seconds(), URL, 1).wait_s(1) <= 7
