"""The script that a worker process runs first: ``python -P bootstrap.py <worker> <descriptors>``. For a template or the
fork server, <worker> is "template" or "server" instead of a number.

It installs the parent's import path, and runs the process with the same gpuload that the parent runs. In a
notebook, the working directory comes first in the path, but a `random.py` there must not replace the standard library's
module, which the notebook imported long ago. So the script puts the working directory last until gpuload and its
libraries are imported, and then directly after the standard library. Before it sets the path, it imports only built-in
modules.
"""

import marshal
import posix
import sys

# The job's index among the descriptors, as in `gpuload.workers.main.run_worker` and `gpuload.workers.template.serve`.
# The fork server has no job, but its settings are in the same place.
JOB_INDEX = 3


def _start() -> None:
    role, descriptors = sys.argv[1], [int(word) for word in sys.argv[2].split(",")]
    job = descriptors[JOB_INDEX]
    header_bytes = int.from_bytes(posix.pread(job, 8, 0), "little")
    settings, _ = marshal.loads(posix.pread(job, header_bytes, 8))  # written by the parent
    path = settings["path"]
    version = sys.version_info
    library = f"{sys.base_prefix}/{sys.platlibdir}/python{version.major}.{version.minor}"
    folders, zipped = (library, f"{library}/lib-dynload"), f"/python{version.major}{version.minor}.zip"
    library_entries = [entry for entry in path if entry in folders or entry.endswith(zipped)]
    working_entries = [entry for entry in path if entry in ("", posix.getcwd())]
    other_entries = [entry for entry in path if entry not in working_entries and entry not in library_entries]
    sys.path[:] = [*library_entries, __file__.rpartition("/gpuload/")[0]]
    # This imports the parent's gpuload, not another package of this name, and needs only the standard library.
    import gpuload.workers  # noqa: F401

    sys.path[:] = [*library_entries, *other_entries, *working_entries]
    from gpuload.workers import server, template
    from gpuload.workers.main import exit_process, run_worker

    sys.path[:] = [*library_entries, *working_entries, *other_entries] if working_entries else path
    sys.argv[:] = settings["argv"]
    if role == "server":
        server.serve(settings, descriptors)
    elif role == "template":
        template.serve(settings, descriptors)
    else:
        run_worker(int(role), settings, descriptors)
    exit_process()


_start()
