"""`Remote`: how files at URLs are read. A plain value: what it opens belongs to `client`."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuload.errors import import_optional

__all__ = ["GAP_BYTES", "Remote", "StorageOptions", "digest_of", "remote_options"]

GAP_BYTES: Final = 256 << 10
# By these, too, libraries behind fsspec find another store or account under the same URL.
ENVIRONMENT: Final = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING", "HF_ENDPOINT", "STORAGE_EMULATOR_HOST",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Remote:
    """How a dataset reads URLs: ``storage_options=gl.Remote({"anon": True}, cache_bytes=50 << 30)``.

    Args:
        options: what fsspec's file system takes, as ``storage_options`` of pandas: keys, tokens, endpoints. They travel
            to the workers, and are shown nowhere.
        gap_bytes: two ranges of one file that are asked for together become one request if no more than this lies
            between them.
        in_flight: the most requests that a process has under way.
        retries: how often a request is made again that timed out, lost its connection, was cut short, or was answered
            429 or 5xx. Between two lies 0.25 s, then twice as long each time, up to 10 s, or what the server asks for.
        timeout_s: how long an answer may take, and one second more for each MiB of it. File systems that are not
            asynchronous (``hf``, ``sftp``) have times of their own.
        cache_bytes: how much of what was read is kept on this machine's disk, for all processes together, the least
            recently used going first; 0 keeps nothing.
        cache_folder: where; default: ``remote`` in the cache folder (``$GPULOAD_CACHE``, else ``~/.cache/gpuload``).

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    gap_bytes: int = GAP_BYTES
    in_flight: int = 16
    retries: int = 5
    timeout_s: float = 60.0
    cache_bytes: int = 0
    cache_folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise TypeError(
                "storage_options must be a dict of what fsspec's file system takes, such as {'anon': True}, or a "
                f"gpuload.Remote, got {type(self.options).__name__}"
            )
        for name, least in (("gap_bytes", 0), ("in_flight", 1), ("retries", 0), ("cache_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"Remote({name}=…) must be a whole number, {least} or more, got {value!r}")
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ValueError(f"Remote(timeout_s=…) must be a number of seconds above 0, got {self.timeout_s!r}")

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.options)) or "none"
        return f"<Remote, with the options {names}>"


StorageOptions = Mapping[str, Any] | Remote | None


def remote_options(given: StorageOptions) -> Remote:
    """What ``storage_options=`` says.

    Raises:
        TypeError: it is neither a mapping nor a `Remote`.
    """
    return given if isinstance(given, Remote) else Remote({} if given is None else given)


def digest_of(remote: Remote) -> str:
    """A digest of what, next to the URL, says which store is read and as whom: the options, fsspec's configuration, and
    variables of the environment. Whatever is kept under one is not found under another. Empty if there are none."""
    configured = import_optional("fsspec.config", "datasets at URLs", "remote").conf
    environment = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    said = [_plain(one) for one in (remote.options, configured, environment)]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest() if any(said) else ""


def _plain(value: Any) -> Any:
    """A value as JSON, the same in every process; of an object the digest of its pickle."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float):
        return value
    try:
        packed = pickle.dumps(value)
    except Exception:  # whatever its class raises: then nothing that others keep is found
        packed = os.urandom(16)
    return [f"{type(value).__module__}.{type(value).__qualname__}", hashlib.blake2b(packed, digest_size=16).hexdigest()]
