"""Files in a folder of images that the data set does not have, since their names do not end as those of images do."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

from gpuload.datasets.litter import is_litter

__all__ = ["IN_ROOT", "LITTER", "ignored_in"]

LONGEST: Final = 12
IN_ROOT: Final = "(images outside of class folders)"
LITTER: Final = "(images that other programs keep there, as in .ipynb_checkpoints)"


def ignored_in(root: str, extensions: Sequence[str], *, classes: bool) -> dict[str, int]:
    """How many files there are of each other ending, the most frequent first.

    Args:
        root: a folder; links to folders are not followed.
        extensions: the endings of images, lower case, with the dot.
        classes: whether images directly in the root do not count, as each has to be in the folder of its class.
    """
    found: Counter[str] = Counter()
    endings = tuple(extensions)
    for folder, _, names in os.walk(root):
        in_litter = is_litter(os.fsencode(folder.removeprefix(root)))
        for name in names:
            if name.lower().endswith(endings) and (in_litter or is_litter(os.fsencode(name))):
                found[LITTER] += 1
            elif not name.lower().endswith(endings):
                ending = os.path.splitext(name)[1].lower()
                found[ending if 1 < len(ending) <= LONGEST else "(no ending)"] += 1
            elif classes and folder == root:
                found[IN_ROOT] += 1
    return dict(found.most_common())
