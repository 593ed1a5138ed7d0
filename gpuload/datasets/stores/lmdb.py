"""`LMDB`: the values of an LMDB database, found by their keys.

Opened read-only, without a lock and without read-ahead. A reader without a lock is not known to a writer, which may
reuse the pages that it reads; so each read is followed by a look at the number of the last transaction, and what was
read while somebody wrote is refused instead of given.

LMDB allows a file to be opened once in a process, so all datasets of one file share it there.

LMDB trusts its file: where pages are damaged, it aborts the process or reads beyond the mapping (SIGBUS, of 400 files
with one or two changed bytes 35). So the keys are walked in a process of their own, once, before the dataset is there.
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

from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.scan import Paths
from gpuload.datasets.stores.cached import cached
from gpuload.datasets.stores.opening import is_url
from gpuload.datasets.stores.store import Store, absolute, damaged, labels_array, naming, stamp, value_of
from gpuload.errors import import_optional

__all__ = ["LMDB"]

DATABASES: Final = 16  # named ones that can be open at once
PICKLES: Final = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))  # what pickles begin with
PROGRAM: Final = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:], arguments = json.load(sys.stdin)
from gpuload.datasets.stores.lmdb import write_keys
write_keys(*arguments)
"""


class LMDB(Store):
    """Images in an LMDB database: each value is the bytes of an encoded image, and keys give the order.

    Yields `Encoded`; ``(Encoded, target)`` with `labels` or `target`; or what `decode` returns. Needs lmdb:
    ``pip install 'gpuload[lmdb]'``. Keys that begin and end with two underscores (``__len__``) are no samples.

    Args:
        path: the folder that holds ``data.mdb``, or the file.
        image: which keys are images, with ``{}`` for what differs, as in ``"image-{}"`` or ``"{}.jpg"``. Default: all.
        target: the key of an image's target, with the same ``{}``, as in ``"label-{}"`` or ``"{}.cls"``.
        target_type: what a target's value is: ``"int"``, a number as text, or ``"text"``.
        labels: one for each sample, in the order of the keys, in place of `target`: an array or list.
        decode: called with a sample's key and value, both bytes, returns the sample. For values in a format of your
            own.
        mode: what the pixels become, see `Encoded`.
        database: the name of a database within the file, where it has several.

    Attributes:
        keys: the key of each sample, as str: a sequence that makes each when it is asked for.

    Raises:
        FileNotFoundError: there is no such database.
        TypeError, ValueError: arguments do not go together; the file is no LMDB, or is cut off; `labels` are not one
            for each key.
        ModuleNotFoundError: lmdb is not installed.

    Nothing is unpickled: a value that is a pickle is refused, unless `decode` reads it. While reading, DecodeError says
    which key is missing or not what it should be, and that the database has been written to.
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
        database: str | None = None,
    ) -> None:
        self.mode: Mode = check_mode(mode)
        self._image = None if image is None else _pattern("image", image)
        self._target = None if target is None else _pattern("target", target)
        if target_type not in ("int", "text"):
            raise ValueError(f"target_type must be 'int' or 'text', got {target_type!r}")
        if target is not None and image is None:
            raise ValueError("target= needs image= too, the pattern of the images' keys, as in image='{}.jpg'")
        if sum(option is not None for option in (target, labels, decode)) > 1:
            raise ValueError("target=, labels= and decode= each say what a sample is; give one of them")
        if decode is not None and not callable(decode):
            raise TypeError(f"decode must be a function of (key, value), got {decode!r}")
        self.target_type, self.decode, self.database = target_type, decode, database
        if is_url(path):
            raise ValueError(
                f"{path!r} is a URL, and LMDB maps its file into memory, so it has to be on this machine: copy it "
                "here, or keep the images as tar archives, which gpuload.TarShards reads from URLs"
            )
        self.path = absolute(path)
        self._file = os.path.join(self.path, "data.mdb") if os.path.isdir(self.path) else self.path
        if not os.path.isfile(self._file):
            raise FileNotFoundError(f"{self._file!r} does not exist; expected an LMDB database (got {path!r})")
        self._transaction = _View(self._file).number
        what = [image, database, self._transaction, *stamp(self._file)]
        index = cached(self._file, what, lambda: _index(self._file, database, image))
        self.keys = Paths("", index["data"], index["offsets"])
        self.labels = labels_array(labels, len(self.keys), f"the {len(self.keys)} keys of {self.path!r}")

    def __len__(self) -> int:
        return len(self.keys)

    def _open(self) -> _View:
        return _View(self._file, self.database)

    def _read(self, handle: _View, numbers: list[int]) -> list[Any]:
        samples = [self._sample(handle, number) for number in numbers]
        if (last := handle.last_number()) != self._transaction:
            raise damaged(
                self._file,
                f"it has been written to since the dataset was made (transaction {self._transaction} then, {last} "
                "now). It is read without a lock, so nobody may write meanwhile: make the dataset again when the "
                "writer is done, or read a copy",
            )
        return samples

    def _sample(self, view: _View, number: int) -> Any:
        key = os.fsencode(self.keys[number])
        data = view.get(key)
        if self.decode is not None:
            return self.decode(key, data)
        if data.startswith(PICKLES):
            raise damaged(
                self._file,
                f"the value of key {key!r} looks like a pickle, which is never loaded, as it may run any code; write "
                "the images' own bytes, or read the values yourself with decode=",
            )
        encoded = Encoded(data, self.mode, f"{self._file}: key {self.keys[number]!r}")
        if self.labels is not None:
            return encoded, value_of(self.labels, number)
        if self._image is None or self._target is None:
            return encoded
        begin, end = self._image
        before, after = self._target
        return encoded, self._parsed(view, before + key[len(begin) : len(key) - len(end)] + after)

    def _parsed(self, view: _View, key: bytes) -> int | str:
        value = view.get(key)
        try:
            return int(value) if self.target_type == "int" else value.decode()
        except ValueError:
            expected = {
                "int": "a whole number; target_type='text', or decode=, takes others",
                "text": "text in UTF-8; decode= takes others",
            }[self.target_type]
            raise damaged(self._file, f"the target under key {key!r} is {value[:40]!r}, expected {expected}") from None

    def __repr__(self) -> str:
        return f"LMDB({self.path!r}: {len(self)} keys)"


_open_here: WeakValueDictionary[tuple[int, str], Any] = WeakValueDictionary()  # by process and path


class _View:
    """A snapshot of a database: what the last transaction before it has written.

    Attributes:
        number: of that transaction.

    Raises:
        ValueError: the file is no LMDB, is cut off, or has no database of that name.
    """

    def __init__(self, path: str, database: str | None = None) -> None:
        self._path = path
        self._environment = env = _environment(path)
        last_page, page_bytes, size = env.info()["last_pgno"], env.stat()["psize"], os.path.getsize(path)
        if (expected := (last_page + 1) * page_bytes) > size:
            raise ValueError(
                f"{path!r} is cut off: its last page ends at {expected:,} bytes, but it has {size:,}; copy it again "
                "(with mdb_copy -c if that does not help)"
            )
        with naming(path, lambda text: ValueError(f"{path!r} has no database named {database!r}: {text}")):
            opened = None if database is None else env.open_db(database.encode(), create=False)
        with naming(path, lambda text: ValueError(f"{path!r} cannot be read as an LMDB database: {text}")):
            self._transaction = env.begin(db=opened)
        self.number: int = self._transaction.id()

    def get(self, key: bytes) -> bytes:
        """Return a copy of the value, since the memory that it lies in is gone when the file is closed."""
        try:
            value = self._transaction.get(key)
        except Exception:
            with naming(
                self._path, lambda text: damaged(self._path, f"the value of key {key!r} cannot be read: {text}")
            ):
                raise
        if value is None:
            raise damaged(self._path, f"there is no key {key!r}, which a sample needs")
        return value

    def last_number(self) -> int:
        """Return the number of the last transaction that anybody has finished by now."""
        return self._environment.info()["last_txnid"]

    def each_key(self, begin: bytes = b"") -> Iterator[bytes]:
        """Yield the keys in order, from `begin` on."""
        cursor = self._transaction.cursor()
        if cursor.set_range(begin):
            yield from cursor.iternext(keys=True, values=False)


def _environment(path: str) -> Any:
    """Return the file, opened once in this process, and closed when nobody uses it any more."""
    place = os.getpid(), path
    if (env := _open_here.get(place)) is None:
        lmdb, options = import_optional("lmdb", "LMDB", "lmdb"), {"lock": False, "readahead": False}
        with naming(path, lambda text: ValueError(f"{path!r} cannot be opened as an LMDB database: {text}")):
            env = lmdb.open(path, subdir=False, readonly=True, create=False, max_dbs=DATABASES, **options)
        _open_here[place] = env
    return env


def _pattern(name: str, text: str) -> tuple[bytes, bytes]:
    """Return what stands before and after the ``{}`` of a pattern."""
    if not isinstance(text, str) or text.count("{}") != 1:
        raise ValueError(f"{name} must be a pattern of keys with one {{}} in it, as in '{{}}.jpg', got {text!r}")
    before, _, after = text.partition("{}")
    return os.fsencode(before), os.fsencode(after)


def _index(path: str, database: str | None, image: str | None) -> dict[str, np.ndarray]:
    """Return the keys of samples as `Paths` packs them, found by another process.

    Raises:
        ValueError: there are none, or the file is damaged.
    """
    command, arguments = [sys.executable, "-P", "-c", PROGRAM], json.dumps([sys.path, [path, database, image]])
    done = subprocess.run(command, input=arguments.encode(), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
        raise ValueError(
            f"{path!r} is damaged: LMDB ended the process that read its keys ({how}); copy it again, or write it again"
        )
    arrays = dict(np.load(io.BytesIO(done.stdout), allow_pickle=False))
    if "error" in arrays:
        raise ValueError(arrays["error"].tobytes().decode())
    return arrays


def write_keys(path: str, database: str | None, image: str | None) -> None:
    """Write the arrays of `_index`, or the error, to the standard output, in a process that may die of it."""
    try:
        with naming(path, lambda text: ValueError(f"{path!r} cannot be read: {text}")):
            packed = _walk(_View(path, database), path, image)
        arrays = {"data": packed.data, "offsets": packed.offsets}
    except Exception as error:  # the process that asked raises it
        arrays = {"error": np.frombuffer(str(error).encode(), np.uint8)}
    np.savez(sys.stdout.buffer, **arrays)  # pyright: ignore[reportArgumentType]


def _walk(view: _View, path: str, image: str | None) -> Paths:
    begin, end = (b"", b"") if image is None else _pattern("image", image)
    joined, lengths = bytearray(), array("I")
    for key in view.each_key(begin):
        if not key.startswith(begin):
            break
        if image is None and key.startswith(b"__") and key.endswith(b"__"):
            continue
        if key.endswith(end) and len(key) >= len(begin) + len(end):
            joined += key
            lengths.append(len(key))
    if not lengths:
        missing = f"no keys like {image!r}" if image is not None else "no keys"
        first = ", ".join(repr(key) for key, _ in zip(view.each_key(), range(3), strict=False)) or "none at all"
        raise ValueError(f"{path!r} has {missing} in it; its first are {first}")
    return Paths.pack("", bytes(joined), np.frombuffer(lengths, np.uint32))
