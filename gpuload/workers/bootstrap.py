"""The script that a worker process runs first: ``python -P bootstrap.py <worker> <descriptors>``. For the template,
<worker> is "template" instead of a number.

It installs the parent's import path, and calls `gpuload.workers.main` from the same gpuload that the parent runs. A
notebook has the working directory first in its path, and a `random.py` there must not replace the module of the
standard library, which the notebook imported long ago. So the working directory comes last until gpuload and its
libraries are imported, and then directly after the standard library. Before the path is set, only built-in modules are
imported.
"""

import marshal
import posix
import sys

JOB_INDEX = (
    3  # the job's place among the descriptors for `gpuload.workers.main.run` and `gpuload.workers.template.serve`
)


def _start() -> None:
    role, descriptors = sys.argv[1], [int(word) for word in sys.argv[2].split(",")]
    job = descriptors[JOB_INDEX]
    length = int.from_bytes(posix.pread(job, 8, 0), "little")
    settings, _ = marshal.loads(posix.pread(job, length, 8))  # an anonymous file that the parent wrote
    path = settings["path"]
    version = sys.version_info
    library = f"{sys.base_prefix}/{sys.platlibdir}/python{version.major}.{version.minor}"
    folders, zipped = (library, f"{library}/lib-dynload"), f"/python{version.major}{version.minor}.zip"
    standard = [entry for entry in path if entry in folders or entry.endswith(zipped)]
    working = [entry for entry in path if entry in ("", posix.getcwd())]
    other = [entry for entry in path if entry not in working and entry not in standard]
    sys.path[:] = [*standard, __file__.rpartition("/gpuload/")[0]]
    import gpuload.workers  # noqa: F401  the parent's gpuload, not another package of this name; needs only the standard library

    sys.path[:] = [*standard, *other, *working]
    from gpuload.workers.main import end, run
    from gpuload.workers.template import serve

    sys.path[:] = [*standard, *working, *other] if working else path
    sys.argv[:] = settings["argv"]
    if role == "template":
        serve(settings, descriptors)
    else:
        run(int(role), settings, descriptors)
    end()


_start()
