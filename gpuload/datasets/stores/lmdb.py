"""`LMDB`: the values of an LMDB database, looked up by key.

The database is opened read-only, without a lock and without read-ahead. Writers cannot see a reader without a lock,
and may overwrite pages that it is reading. So after each read, the ID of the last transaction is checked. If it has
changed, an error is raised, and data that was read during a write is not returned.

LMDB allows a process to open a file only once, so in each process, all datasets of a file share one environment.

LMDB trusts its file: if pages are damaged, it aborts the process or reads beyond the mapping (35 of 400 files with one
or two changed bytes caused a SIGBUS). So a separate process walks over all keys once, when the dataset is created.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

import numpy as np

from gpuload.checks import flag, function, one_of, optional
from gpuload.datasets.file_id import FileId
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import MODES, Encoded, Mode
from gpuload.datasets.scan import Paths
from gpuload.datasets.stores.cached import load_or_build
from gpuload.datasets.stores.opening import is_url
from gpuload.datasets.stores.store import (
    Store,
    absolute_path,
    decode_error_at,
    labels_array,
    replace_errors,
    stamp,
    value_of,
)
from gpuload.errors import import_optional

__all__ = ["LMDB"]

DATABASES: Final = 16  # the maximum number of named databases that can be open
PICKLES: Final = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))  # the first bytes of pickles
PROGRAM: Final = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:], arguments = json.load(sys.stdin)
from gpuload.datasets.stores.lmdb import write_keys
write_keys(*arguments)
"""


class LMDB(Store):
    """Images in an LMDB database, in the order of their keys. Each value is the bytes of an encoded image.

    Yields `Encoded`; ``(Encoded, target)`` with `labels` or `target`; or the result of `decode`. Needs lmdb:
    ``pip install 'gpuload[lmdb]'``. Keys that begin and end with two underscores (``__len__``) are not samples.

    Args:
        path: the folder that contains ``data.mdb``, or the file.
        image: a pattern of the images' keys, with ``{}`` for the part that varies, as in ``"image-{}"`` or
            ``"{}.jpg"``. Default: all keys.
        target: the corresponding pattern of the targets' keys, as in ``"label-{}"`` or ``"{}.cls"``.
        target_type: the type of a target: ``"int"``, stored as decimal text, or ``"text"``.
        labels: one label per sample, in the order of the keys, as an array or list; instead of `target`.
        decode: a function that gets a sample's key and value, both bytes, and returns the sample; for values in your
            own format.
        mode, exif: the pixel mode of images, and whether they are turned upright, see `Encoded`.
        database: the name of a database, for a file that contains several.

    Attributes:
        keys: the key of each sample, as a lazy sequence of str.

    Raises:
        FileNotFoundError: the database does not exist.
        TypeError, ValueError: arguments cannot be combined; the file is not LMDB, or is truncated; the numbers of
            `labels` and of keys differ.
        ModuleNotFoundError: lmdb is not installed.

    gpuload never unpickles data: a value that is a pickle is refused, unless `decode` reads it. While reading, a
    DecodeError says which key is missing or has an invalid value, or that the database has been written to.
    """

    @dataset_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        image: str | None = None,
        target: str | None = None,
        target_type: Literal["int", "text"] = "int",
        labels: Any = None,
        decode: Callable[[bytes, bytes], Any] | None = None,
        mode: Mode = "RGB",
        exif: bool | None = None,
        database: str | None = None,
    ) -> None:
        self.mode: Mode = one_of("mode", mode, MODES)
        self.exif = optional(flag, "exif", exif)
        self._image_pattern = None if image is None else _split_pattern("image", image)
        self._target_pattern = None if target is None else _split_pattern("target", target)
        one_of("target_type", target_type, ("int", "text"))
        if target is not None and image is None:
            raise ValueError("target= needs image=, the pattern of the images' keys, as in image='{}.jpg'")
        if sum(option is not None for option in (target, labels, decode)) > 1:
            raise ValueError("target=, labels= and decode= cannot be combined; pass at most one of them")
        optional(function, "decode", decode)
        self.target_type, self.decode, self.database = target_type, decode, database
        if is_url(path):
            raise ValueError(
                f"{path!r} is a URL, but LMDB maps its file into memory, so the file must be on this machine: copy "
                "it, or store the images in tar archives, which gpuload.TarShards reads from URLs"
            )
        self.path = absolute_path(path)
        self._file = os.path.join(self.path, "data.mdb") if os.path.isdir(self.path) else self.path
        if not os.path.isfile(self._file):
            raise FileNotFoundError(f"{self._file!r} does not exist; expected an LMDB database (got {path!r})")
        self._file_id = FileId.of(self._file)
        self._transaction_id = _Snapshot(self._file).transaction_id
        identity = [image, database, self._transaction_id, *stamp(self._file)]
        index = load_or_build(self._file, identity, lambda: _list_keys_in_subprocess(self._file, database, image))
        self.keys = Paths("", index["data"], index["offsets"])
        self.labels = labels_array(labels, len(self.keys), f"the {len(self.keys)} keys of {self.path!r}")

    def __len__(self) -> int:
        return len(self.keys)

    def _open(self) -> _Snapshot:
        self._file_id.check(self._file)  # another database can have the same transaction ID
        return _Snapshot(self._file, self.database)

    def _read(self, handle: _Snapshot, indices: list[int]) -> list[Any]:
        samples = [self._make_sample(handle, index) for index in indices]
        if (last := handle.last_transaction_id()) != self._transaction_id:
            raise decode_error_at(
                self._file,
                f"it was written to after the dataset was created (transaction {self._transaction_id} then, {last} "
                "now). It is read without a lock, so no process may write to it meanwhile: create the dataset again "
                "when the writer has finished, or read a copy",
            )
        return samples

    def _make_sample(self, snapshot: _Snapshot, index: int) -> Any:
        key = os.fsencode(self.keys[index])
        data = snapshot.get(key)
        if self.decode is not None:
            return self.decode(key, data)
        if data.startswith(PICKLES):
            raise decode_error_at(
                self._file,
                f"the value of key {key!r} looks like a pickle, which gpuload never loads, since unpickling can run "
                "arbitrary code; store the bytes of the image files, or read the values yourself with decode=",
            )
        encoded = Encoded(data, self.mode, f"{self._file}: key {self.keys[index]!r}", self.exif)
        if self.labels is not None:
            return encoded, value_of(self.labels, index)
        if self._image_pattern is None or self._target_pattern is None:
            return encoded
        image_prefix, image_suffix = self._image_pattern
        target_prefix, target_suffix = self._target_pattern
        return encoded, self._parse_target(
            snapshot, target_prefix + key[len(image_prefix) : len(key) - len(image_suffix)] + target_suffix
        )

    def _parse_target(self, snapshot: _Snapshot, key: bytes) -> int | str:
        value = snapshot.get(key)
        try:
            return int(value) if self.target_type == "int" else value.decode()
        except ValueError:
            expected = {
                "int": "an integer; for other values, use target_type='text' or decode=",
                "text": "text in UTF-8; for other values, use decode=",
            }[self.target_type]
            raise decode_error_at(
                self._file, f"the target under key {key!r} is {value[:40]!r}; expected {expected}"
            ) from None

    def __repr__(self) -> str:
        return f"LMDB({self.path!r}: {len(self)} keys)"


# Keyed by process, device and inode: a path can lead to another file later.
_open_environments: WeakValueDictionary[tuple[int, int, int], Any] = WeakValueDictionary()


class _Snapshot:
    """A snapshot of a database after its last transaction.

    Attributes:
        transaction_id: the ID of that transaction.

    Raises:
        ValueError: the file is not LMDB, is truncated, or has no database with this name.
    """

    def __init__(self, path: str, database: str | None = None) -> None:
        self._path = path
        self._environment = env = _shared_environment(path)
        last_page, page_bytes, size = env.info()["last_pgno"], env.stat()["psize"], os.path.getsize(path)
        if (expected_bytes := (last_page + 1) * page_bytes) > size:
            raise ValueError(
                f"{path!r} is truncated: its last page ends at {expected_bytes:,} bytes, but the file has {size:,}; "
                "copy it again (if that does not help, with mdb_copy -c)"
            )
        with replace_errors(path, lambda text: ValueError(f"{path!r} has no database named {database!r}: {text}")):
            named_database = None if database is None else env.open_db(database.encode(), create=False)
        with replace_errors(path, lambda text: ValueError(f"{path!r} cannot be read as an LMDB database: {text}")):
            self._transaction = env.begin(db=named_database)
        self.transaction_id: int = self._transaction.id()

    def get(self, key: bytes) -> bytes:
        """Return a copy of a value. (Its memory in the mapping becomes invalid when the file is closed.)"""
        try:
            value = self._transaction.get(key)
        except Exception:
            with replace_errors(
                self._path, lambda text: decode_error_at(self._path, f"the value of key {key!r} cannot be read: {text}")
            ):
                raise
        if value is None:
            raise decode_error_at(self._path, f"it lacks the key {key!r}, which a sample needs")
        return value

    def last_transaction_id(self) -> int:
        """Return the ID of the transaction that was committed last, which may be newer than this snapshot."""
        return self._environment.info()["last_txnid"]

    def iterate_keys(self, begin: bytes = b"") -> Iterator[bytes]:
        """Yield the keys in order, starting at `begin`."""
        cursor = self._transaction.cursor()
        if cursor.set_range(begin):
            yield from cursor.iternext(keys=True, values=False)


def _shared_environment(path: str) -> Any:
    """Return the environment that all users of a file in this process share. It is closed with its last reference."""
    status = os.stat(path)
    key = os.getpid(), status.st_dev, status.st_ino
    if (env := _open_environments.get(key)) is None:
        lmdb, options = import_optional("lmdb", "LMDB", "lmdb"), {"lock": False, "readahead": False}
        with replace_errors(path, lambda text: ValueError(f"{path!r} cannot be opened as an LMDB database: {text}")):
            env = lmdb.open(path, subdir=False, readonly=True, create=False, max_dbs=DATABASES, **options)
        _open_environments[key] = env
    return env


def _split_pattern(name: str, pattern: str) -> tuple[bytes, bytes]:
    """Return the parts of a pattern before and after ``{}``."""
    if not isinstance(pattern, str) or pattern.count("{}") != 1:
        raise ValueError(f"{name} must be a pattern of keys with one {{}} in it, as in '{{}}.jpg', got {pattern!r}")
    prefix, _, suffix = pattern.partition("{}")
    return os.fsencode(prefix), os.fsencode(suffix)


def _list_keys_in_subprocess(path: str, database: str | None, image: str | None) -> dict[str, np.ndarray]:
    """List the samples' keys in a separate process. Return the keys as the arrays of `Paths`.

    Raises:
        ValueError: there are no keys, or the file is damaged.
    """
    command, arguments = [sys.executable, "-P", "-c", PROGRAM], json.dumps([sys.path, [path, database, image]])
    result = subprocess.run(command, input=arguments.encode(), stdout=subprocess.PIPE, check=False)
    if result.returncode:
        cause = signal.Signals(-result.returncode).name if result.returncode < 0 else f"exit status {result.returncode}"
        raise ValueError(
            f"{path!r} is damaged: LMDB crashed the process that read its keys ({cause}); copy or write the file again"
        )
    arrays = dict(np.load(io.BytesIO(result.stdout), allow_pickle=False))
    if "error" in arrays:
        raise ValueError(arrays["error"].tobytes().decode())
    return arrays


def write_keys(path: str, database: str | None, image: str | None) -> None:
    """Write the arrays of `_list_keys_in_subprocess`, or the error, to the standard output. LMDB may crash the process
    that calls this function."""
    try:
        with replace_errors(path, lambda text: ValueError(f"{path!r} cannot be read: {text}")):
            paths = _list_keys(_Snapshot(path, database), path, image)
        arrays = {"data": paths.data, "offsets": paths.offsets}
    except Exception as error:  # the calling process raises the error
        arrays = {"error": np.frombuffer(str(error).encode(), np.uint8)}
    np.savez(sys.stdout.buffer, **arrays)  # pyright: ignore[reportArgumentType]


def _list_keys(snapshot: _Snapshot, path: str, image: str | None) -> Paths:
    prefix, suffix = (b"", b"") if image is None else _split_pattern("image", image)
    key_bytes, lengths = bytearray(), array("I")
    for key in snapshot.iterate_keys(prefix):
        if not key.startswith(prefix):
            break
        if image is None and key.startswith(b"__") and key.endswith(b"__"):
            continue
        if key.endswith(suffix) and len(key) >= len(prefix) + len(suffix):
            key_bytes += key
            lengths.append(len(key))
    if not lengths:
        problem = f"no keys that match {image!r}" if image is not None else "no keys"
        example_keys = ", ".join(repr(key) for key, _ in zip(snapshot.iterate_keys(), range(3), strict=False)) or "none"
        raise ValueError(f"{path!r} has {problem}; its first keys are: {example_keys}")
    return Paths.pack("", bytes(key_bytes), np.frombuffer(lengths, np.uint32))
