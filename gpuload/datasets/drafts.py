"""Files that appear under their name only when they are complete, so that a reader never sees a partial file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

__all__ = ["DRAFT", "replace_when_done"]

DRAFT: Final = ".part"  # the ending of a draft's name; a process that is killed leaves its draft behind


@contextlib.contextmanager
def replace_when_done(path: str, folder: str | None = None) -> Iterator[str]:
    """Yield the path of a draft, and move the draft to `path` when the block ends; remove it after an error.

    The draft's name is random, since another process, even on another machine, may write the same file. `folder` is the
    draft's folder, on the same file system; default: the folder of `path`.
    """
    name = f"{os.path.basename(path)}.{os.urandom(8).hex()}{DRAFT}"
    draft = os.path.join(os.path.dirname(path) if folder is None else folder, name)
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
