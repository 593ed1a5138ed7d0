"""The first code that a worker process runs, as a script: ``python -P bootstrap.py <worker> <descriptors>``.

It installs the parent's import path and hands over to `gpuload.workers.main`. Until gpuload and its libraries are
imported, the working directory stands last in that path: a parent that runs in a notebook has it first, and a
`random.py` lying there must not be run in the place of the standard library's. Nothing but built-in modules is
imported before the path is set.
"""

import marshal
import posix
import sys


def _start() -> None:
    worker, descriptors = int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
    length = int.from_bytes(posix.pread(descriptors[0], 8, 0), "little")
    settings = marshal.loads(posix.pread(descriptors[0], length, 8))  # written by the parent, inherited, unnamed
    here = ("", posix.getcwd())
    path = settings["path"]
    sys.path[:] = [entry for entry in path if entry not in here] + [entry for entry in path if entry in here]
    from gpuload.workers.main import run

    sys.path[:] = path
    sys.argv[:] = settings["argv"]
    run(worker, settings, descriptors)


_start()
