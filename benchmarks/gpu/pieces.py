"""A large file in pieces, for machines that take only small ones, such as DALI's wheel of 190 MB.

    python -m benchmarks.gpu.pieces cut FILE FOLDER     cut a file into pieces of 60 MB
    python -m benchmarks.gpu.pieces join FOLDER TARGET  bring what FOLDER has to TARGET, and put files together there

Pieces may come in several calls of `join`; it puts a file together once TARGET has all its pieces, and checks it. Other
files are only copied. The name of a piece says everything: ``NAME.SHA256-OF-THE-FILE.1-of-4``.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cut", "join", "main"]

PIECE_BYTES = 60_000_000
PIECE = re.compile(r"(?P<name>.+)\.(?P<sha256>[0-9a-f]{64})\.(?P<number>\d+)-of-(?P<count>\d+)")


def cut(file: Path, folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write the pieces of a file to a folder, and return their paths in order."""
    data = file.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, max(1, len(data)), piece_bytes)
    sha256, pieces = hashlib.sha256(data).hexdigest(), []
    for number, start in enumerate(starts, 1):
        pieces.append(folder / f"{file.name}.{sha256}.{number}-of-{len(starts)}")
        pieces[-1].write_bytes(data[start : start + piece_bytes])
    return pieces


def join(folder: Path, target: Path) -> list[str]:
    """Copy the files of a folder to `target`, and put together each file that has all its pieces there. Return a line
    of text for each file in pieces.

    Raises:
        ValueError: the pieces do not make the file that was cut. They are removed.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and folder.resolve() != target.resolve():
            shutil.copyfile(file, target / file.name)
    by_file: dict[tuple[str, str, int], dict[int, Path]] = {}
    for path in target.iterdir():
        if match := PIECE.fullmatch(path.name):
            key = match["name"], match["sha256"], int(match["count"])
            by_file.setdefault(key, {})[int(match["number"])] = path
    lines = []
    for (name, sha256, count), pieces in sorted(by_file.items()):
        missing = [str(number) for number in range(1, count + 1) if number not in pieces]
        if missing:
            lines.append(f"{name}: pieces {', '.join(missing)} of {count} are still missing")
            continue
        data = b"".join(pieces[number].read_bytes() for number in range(1, count + 1))
        for path in pieces.values():
            path.unlink()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"the pieces of {name} do not make the file that was cut; bring all {count} again")
        (target / name).write_bytes(data)
        lines.append(f"{name}: put together from {count} pieces")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run a command; return the exit status."""
    match arguments:
        case ["cut", file, folder]:
            print(*cut(Path(file), Path(folder)), sep="\n")
        case ["join", folder, target]:
            print(*join(Path(folder), Path(target)), sep="\n")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
