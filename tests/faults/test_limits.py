"""Real shortages of open files, shared memory and the memory of a control group, each in a separate process."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers import lacking
from helpers.processes import wait_until

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader import limits, session

LIMIT_S = 200.0

# The beginning of each of the programs below.
PRELUDE = '''
import gc, json, os, resource, sys, time
import numpy as np
import gpuload as gl
sys.path.append('tests')
from faults.zygote import child_pids, template_pids, worker_pids
from gpuload import transforms as T
from gpuload.loader import limits

class Numbered:
    """Images of level i % 251, each with its number. A sample takes no memory until it is copied."""
    def __init__(self, samples, height=40, width=30, sizes=None):
        self.samples, self.shape, self.sizes = samples, (height, width, 3), sizes or {}
    def __len__(self):
        return self.samples
    def __getitem__(self, i):
        return gl.Image(np.broadcast_to(np.uint8(i % 251), self.sizes.get(i, self.shape))), i

def is_right(batch):
    images, numbers = batch
    return (images.amin((1, 2, 3)) == numbers % 251).all() and (images.amax((1, 2, 3)) == numbers % 251).all()

def descriptors():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}

def left_exactly(free):
    """Lower the limit until `free` descriptors are left, and turn off the garbage collector, which could free some."""
    gc.collect()
    gc.disable()
    for soft in range(free, 100_000):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        if limits.descriptors_left() == free:
            return
    raise AssertionError(f"no limit leaves exactly {free} descriptors")
'''


def run_program(program: str, *args: object, command_prefix: tuple[str, ...] = ()) -> dict:
    """Run a program and return the JSON that it prints."""
    command = [*command_prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(program), *map(str, args)]
    root = Path(gl.__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=root)
    assert result.returncode == 0, f"status {result.returncode}: {result.stderr[-3000:]}"
    return json.loads(result.stdout.splitlines()[-1])


# -- open files -------------------------------------------------------------------------------------------------------


def test_too_few_open_files_are_refused_before_any_worker_exists():
    text, popens_at_error, has_same_descriptors, templates, works_later, popens = run_program(
        """
        import subprocess
        loader = gl.Loader(Numbered(8), 2, num_workers=3, device="cpu")
        calls, popen = [], subprocess.Popen
        subprocess.Popen = lambda *args, **options: calls.append(args) or popen(*args, **options)
        before = descriptors()
        left_exactly(20)
        try:
            iter(loader)
        except gl.LimitError as error:
            text = str(error)
        has_same_descriptors, templates = descriptors() == before, template_pids()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        result = [text, len(calls), has_same_descriptors, templates, all(map(is_right, loader)), len(calls)]
        print(json.dumps(result))
        """
    )
    assert text.startswith("num_workers=3 needs 40 file descriptors in this process (5 per worker and 25 others), ")
    assert "but only 20 of the " in text
    assert has_same_descriptors
    assert templates == []
    assert works_later
    assert popens_at_error == popens == 0  # the fork server was running already


@pytest.mark.usefixtures("warm")
def test_workers_take_exactly_the_descriptors_that_limits_counts():
    steady, works, left = run_program(
        """
        def loader():
            return gl.Loader(Numbered(8), 2, num_workers=3, device="cpu")
        with loader() as first:  # libraries open files that they keep
            list(first)
        before = descriptors()
        with loader() as second:
            list(second)
            steady = len(descriptors() - before)
        limits.SPARE_DESCRIPTORS = 0
        left_exactly(limits.POOL_DESCRIPTORS + 3 * limits.WORKER_DESCRIPTORS + limits.START_DESCRIPTORS)
        with loader() as third:
            works = all(map(is_right, third))
            left = limits.descriptors_left()
        print(json.dumps([steady, bool(works), left]))
        """
    )
    assert steady == limits.POOL_DESCRIPTORS + 3 * limits.WORKER_DESCRIPTORS
    assert works
    assert left == limits.START_DESCRIPTORS


@pytest.mark.usefixtures("warm")
def test_batches_that_the_user_keeps_hold_no_descriptors():
    batch_count, are_right, opened, each_once = run_program(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        with gl.Loader(Numbered(800), 2, num_workers=2, device="cpu", shuffle=True) as loader:
            before = len(descriptors())
            batches = list(loader)
            print(json.dumps([len(batches), all(map(is_right, batches)), len(descriptors()) - before,
                              sorted(int(n) for _, numbers in batches for n in numbers) == list(range(800))]))
        """
    )
    assert batch_count == 400
    assert opened <= limits.POOL_DESCRIPTORS + 2 * limits.WORKER_DESCRIPTORS
    assert are_right
    assert each_once


# -- /dev/shm ---------------------------------------------------------------------------------------------------------


def test_a_loader_works_with_a_full_dev_shm():
    unshare = shutil.which("unshare")
    if unshare is None:
        lacking.skip("a /dev/shm of its own")
    namespace = (unshare, "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))
    mount = (*namespace, "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")
    attempt = subprocess.run([*mount, "true"], capture_output=True, text=True)
    if attempt.returncode:
        lacking.skip("a /dev/shm of its own", attempt.stderr.strip())
    result = run_program(
        """
        with open("/dev/shm/filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                full = error.errno
        with gl.Loader(Numbered(64), 8, num_workers=2, device="cpu") as loader:
            good = all(map(is_right, loader))
            maps = [open(f"/proc/{pid}/maps") for pid in ["self", *child_pids(), *template_pids(), *worker_pids()]]
            mapped = [line for lines in maps for line in lines if "/dev/shm" in line]
            print(json.dumps([full, bool(good), os.listdir("/dev/shm"), mapped, os.statvfs("/dev/shm").f_bfree]))
        """,
        command_prefix=mount,
    )
    no_space = errno.ENOSPC
    assert result == [no_space, True, ["filler"], [], 0]


# -- the memory of a control group ------------------------------------------------------------------------------------


@pytest.fixture
def group():
    """The memory limit of a control group within our own, removed when the test ends."""
    groups = ((folder, limits.MEMORY_FILES[version]) for folder, version in limits.control_groups("/", "memory"))
    folder_and_limit = next(
        ((folder, limit) for folder, (limit, use) in groups if os.path.exists(f"{folder}/{use}")), None
    )
    if folder_and_limit is None:
        lacking.skip("a control group", "this process is in none that counts memory")
    folder, limit_name = folder_and_limit
    group = Path(folder, f"gpuload-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        lacking.skip("a control group", error)
    try:
        limit = group / limit_name
        if not limit.exists():
            lacking.skip("a control group", f"{folder} does not pass the memory controller to its groups")
        try:
            limit.write_text(str(1 << 40))
        except OSError as error:
            lacking.skip("a control group", error)
        yield limit
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "its processes have exited")
        group.rmdir()


IN_GROUP = '''
def enter(limit):
    with open(os.path.join(os.path.dirname(limit), "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))

def leave_mb(limit, mb):
    """Set the limit so that `mb` megabytes are left."""
    huge = 1 << 40
    open(limit, "w").write(str(huge))
    open(limit, "w").write(str(huge - limits.memory_left_bytes() + (mb << 20)))

def attempt(function):
    try:
        return function()
    except gl.LimitError as error:
        return str(error)

enter(sys.argv[1])
list(gl.Loader(Numbered(4), 2, num_workers=1, device="cpu", transforms=[T.Resize((16, 16))]))  # loads all libraries
'''


def run_in_group(group: Path, program: str) -> dict:
    return run_program(IN_GROUP + textwrap.dedent(program), group)


def test_too_little_memory_for_the_workers_is_refused_before_any_starts(group):
    text, alive, good = run_in_group(
        group,
        """
        leave_mb(sys.argv[1], 150)
        loader = gl.Loader(Numbered(64), 32, num_workers=4, device="cpu", transforms=[T.Resize((16, 16))])
        text = attempt(lambda: iter(loader))
        alive = template_pids()
        leave_mb(sys.argv[1], 400)
        print(json.dumps([text, alive, all(map(is_right, loader))]))
        """,
    )
    assert text.startswith("at least 180 MB of memory is needed (4 workers of about 45 MB, 0 MB for an output batch)")
    assert f"but the control group {group.parent} has 15" in text  # 15x MB
    assert alive == []
    assert good


def test_an_image_too_large_for_the_memory_limit_is_an_error_and_the_next_epoch_works(group):
    good, text, again, alive = run_in_group(
        group,
        """
        leave_mb(sys.argv[1], 160)
        data = Numbered(32, sizes={20: (9000, 9000, 3)})
        options = {"transforms": [T.Resize((16, 16))]}
        loader = gl.Loader(data, 4, num_workers=2, device="cpu", **options)
        batches = iter(loader)
        good = all(is_right(next(batches)) for _ in range(5))
        text = attempt(lambda: next(batches))
        again = [attempt(lambda: bool(is_right(batch))) for _, batch in zip(range(5), loader)]
        print(json.dumps([good, text, again, len(worker_pids())]))
        """,
    )
    assert good
    assert text.startswith("decoded images need ")
    assert "but the program's control group has only" in text
    assert again == [True] * 5
    assert alive == 2


def test_little_memory_delays_workers_and_raises_no_error(group):
    good, max_bytes, needed_bytes = run_in_group(
        group,
        """
        leave_mb(sys.argv[1], 160)
        data = Numbered(96, 1100, 1000)
        with gl.Loader(data, 8, num_workers=2, device="cpu", transforms=[T.Resize((16, 16))], prefetch_factor=8,
                       chunk_size=2) as loader:
            good, max_bytes = True, 0
            for batch in loader:
                good = good and bool(is_right(batch))
                max_bytes = max(max_bytes, os.fstat(loader._session.ring.fd).st_blocks * 512)
        print(json.dumps([good, max_bytes, 9 * 8 * 3_300_000]))  # nine batches of eight images
        """,
    )
    assert good
    assert max_bytes < 160 << 20 < needed_bytes


@pytest.mark.parametrize("workers", [0, 2])
def test_next_without_free_memory_raises_limit_error_and_the_next_epoch_works(monkeypatch, workers):
    left_bytes: list[int | None] = [None]
    monkeypatch.setattr(session, "memory_left_bytes", lambda: left_bytes[0])

    class Grey:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return np.full((500, 500, 3), index, np.uint8), index

    with gl.Loader(Grey(), 8, num_workers=workers, device="cpu", chunk_size=4, transforms=[T.Resize((8, 8))]) as loader:
        for _ in range(3):
            left_bytes[0] = 0
            with pytest.raises(gl.LimitError, match="decoded images need"):
                list(loader)
            left_bytes[0] = None
            assert [images[:, 0, 0, 0].tolist() for images, _ in loader] == [
                list(range(start, start + 8)) for start in range(0, 64, 8)
            ]
            loader.close()  # the slots of the good epoch would be enough for the next


# -- back-pressure ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm")
def test_a_slow_consumer_does_not_let_memory_grow():
    ring_bytes = 4 << 20
    good, max_bytes, process_bytes = run_program(
        """
        def bytes_of_processes(pids):
            total = 0
            for pid in ("self", *pids):
                for line in open(f"/proc/{pid}/smaps_rollup"):
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):  # libraries are shared with other programs
                        total += int(line.split()[1]) << 10
            return total

        # Images of so different sizes that no two chunks have the same size.
        sizes = {i: (60 + 7 * (i % 31), 80 + 5 * (i % 23), 3) for i in range(4800)}
        options = {"num_workers": 2, "device": "cpu", "transforms": [T.Resize((16, 16))]}
        ring_bytes = int(sys.argv[1])
        with gl.Loader(Numbered(4800, sizes=sizes), 16, ring_bytes=ring_bytes, prefetch_factor=8, **options) as loader:
            max_bytes, process_bytes, good = 0, [], True
            for step, batch in enumerate(loader):
                good = good and bool(is_right(batch))
                time.sleep(0.002)  # a training step; the workers run ahead of it
                if step % 50 == 20:  # wait until they are as far ahead as they can be
                    feed, pool = loader._session.feed, loader._session.engine
                    while feed.pump(0.01) or pool._in_flight:
                        pass
                max_bytes = max(max_bytes, os.fstat(loader._session.ring.fd).st_blocks * 512)
                if step % 50 == 49:
                    process_bytes.append(bytes_of_processes(loader._session.engine.pids))
        print(json.dumps([good, max_bytes, process_bytes]))
        """,
        ring_bytes,
    )
    assert good
    assert ring_bytes / 2 < max_bytes <= ring_bytes
    assert len(process_bytes) == 6  # at every 50th of 300 steps
    assert max(process_bytes[1:]) - process_bytes[0] < 8 << 20
