"""A pool of real worker processes: started, given chunks, killed, resized and closed."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.file_descriptors import descriptors
from helpers.map_datasets import MapDataset
from helpers.processes import LIMIT_S, is_alive, stop_processes, wait_until
from workers.worker_team import Team

from gpuload.errors import WorkerError
from gpuload.order.place import IterableStart
from gpuload.workers.process import check_platform
from gpuload.workers.protocol import Lost, Reply, Status

pytestmark = pytest.mark.processes


@pytest.fixture
def make_team():
    teams = []

    def make(dataset, workers=1, **options):
        teams.append(Team(dataset, workers, **options))
        return teams[-1]

    yield make
    for team in teams:
        team.close()


def block_until(path: Path, blocked_index: int | None = None):
    """Return a dataset's function that blocks until a file exists, at any index or only at `blocked_index`."""

    def load(index):
        while blocked_index in (None, index) and not path.exists():
            time.sleep(0.002)
        return index

    return load


def make_hanging_function(path: Path):
    def hang(index):
        path.touch()
        while True:
            time.sleep(0.01)

    return hang


def test_a_worker_populates_the_slot_of_each_chunk(make_team):
    def record_calls(worker):
        from gpuload.ring.ring import WorkerRing

        populate, calls = WorkerRing.populate, []

        def populate_and_record(ring, slot, nbytes):
            calls.append((slot.offset, slot.capacity_bytes, nbytes))
            return populate(ring, slot, nbytes)

        WorkerRing.populate = populate_and_record
        WorkerRing.calls = calls  # pyright: ignore[reportAttributeAccessIssue]

    def return_last_call(index):
        from gpuload.ring.ring import WorkerRing

        return np.resize(WorkerRing.calls[-1:] or [-1], 300)  # pyright: ignore[reportAttributeAccessIssue]

    team = make_team(MapDataset(return_last_call), worker_init_fn=record_calls)
    for chunk in (1, 2):
        reply = team.run(chunk, [0])
        nbytes, [block] = reply.nbytes, team.content(reply).blocks.values()
    assert nbytes >= 300 * 8
    slot = team.slots[1]  # when chunk 2 is loaded, the last call was for chunk 1
    assert block.array(team.ring.view(team.slots[2]))[0, :3].tolist() == [slot.offset, slot.capacity_bytes, nbytes]


def test_environment_of_a_worker_allows_one_thread_and_hides_gpus(make_team):
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    team = make_team(MapDataset(lambda index: str([os.environ.get(name) for name in names])))
    assert team.load([0]) == [str(["", "1", "1", "1"])]


def test_workers_set_glibc_tunables_unless_the_user_has_set_them(make_team, monkeypatch):
    malloc_tunables = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
    stream_tunable = "glibc.cpu.x86_non_temporal_threshold"
    environment = MapDataset(lambda index: os.environ["GLIBC_TUNABLES"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert make_team(environment).load([0]) == [f"{malloc_tunables}:{stream_tunable}=98304"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert make_team(environment).load([0]) == [f"glibc.malloc.check=0:{malloc_tunables}:{stream_tunable}=98304"]
    monkeypatch.setenv("GLIBC_TUNABLES", f"{stream_tunable}=1234567")
    assert make_team(environment).load([0]) == [f"{stream_tunable}=1234567:{malloc_tunables}"]


@pytest.mark.fresh
def test_a_worker_never_loads_torch_even_to_decode(make_team, jpeg_folder):
    from gpuload.datasets.folder import ImageFolder

    team = make_team(ImageFolder(jpeg_folder))
    team.load(range(10))
    [pid] = team.pool.pids
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_slow_sample_does_not_delay_the_chunks_of_a_second_worker(make_team, tmp_path):
    go = tmp_path / "go"
    team = make_team(MapDataset(block_until(go, 0)), workers=2)
    for chunk in range(20):
        team.submit(chunk + 1, [chunk])
    assert {reply.chunk for reply in team.wait(19)} == set(range(2, 21))
    go.touch()
    assert team.wait(1)[0].chunk == 1


def test_a_description_too_long_for_a_message_is_returned_in_the_slot(make_team):
    team = make_team(MapDataset(lambda index: "x" * 100_000))
    reply = team.run(1, [0, 1])
    assert reply.meta == b""
    [column] = team.content(reply).values.values()
    assert [len(value) for value in column.values] == [100_000, 100_000]


LARGE_IMAGE_BYTES = 1100 * 1000 * 3


def large_image(index):
    return np.full((1100, 1000, 3), index, np.uint8)


def read_pixels(team, reply) -> list[np.ndarray]:
    """Return the bytes of each `large_image` of a chunk in separate memory."""
    [column] = team.content(reply).images
    return [reply.data[offset : offset + LARGE_IMAGE_BYTES] for offset in column.table["offset"].tolist()]


def count_chunk_memory(pid: int | str = "self") -> int:
    """Return how often a process has the separate memory of a chunk open or mapped."""
    name = "memfd:gpuload-chunk"
    links = [link for _, link in descriptors(pid)]
    return sum(name in link for link in links) + Path(f"/proc/{pid}/maps").read_text().count(name)


def test_a_chunk_too_large_for_its_slot_is_returned_in_separate_memory_that_is_freed(make_team):
    team = make_team(MapDataset(large_image))
    for chunk in range(1, 31):
        reply = team.run(chunk, [chunk, 100], spare_bytes=8 << 20)
        assert (reply.status, reply.nbytes) == (Status.DONE, 2 * (LARGE_IMAGE_BYTES + 32))  # a multiple of 64 each
        chunk_image, image_100 = read_pixels(team, reply)
        assert (chunk_image == chunk).all()
        assert (image_100 == 100).all()
        assert not team.ring.view(team.slots[chunk]).any()
        team.ring.release(team.slots[chunk])
    assert count_chunk_memory() > 0
    del reply, chunk_image, image_100
    assert count_chunk_memory() == 0
    assert count_chunk_memory(*team.pool.pids) == 0


def test_separate_memory_of_an_unexpected_reply_is_freed(make_team):
    team = make_team(MapDataset(large_image))
    team.submit(1, [1, 2], spare_bytes=8 << 20)
    del team.pool._in_flight[1]  # as if the chunk had been declared lost
    team.submit(2, [3])
    assert [reply.chunk for reply in team.wait(1)] == [2]
    assert count_chunk_memory() == 0


def test_a_worker_killed_while_it_writes_to_separate_memory_loses_only_its_chunk(make_team, tmp_path):
    def die_once(index):
        from gpuload.workers import runner

        def map_file(fd, nbytes, real=runner.map_file):
            memory = real(fd, nbytes)
            memory[: 1 << 20] = 255
            if not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return memory

        runner.map_file = map_file
        return large_image(index)

    team = make_team(MapDataset(die_once))
    lost = team.run(1, [3, 4], spare_bytes=8 << 20, kinds=Lost)
    assert (lost.chunk, lost.killed_externally) == (1, True)
    assert not team.ring._busy
    assert count_chunk_memory() == 0
    reply = team.run(2, [3, 4], spare_bytes=8 << 20)
    assert [set(image) for image in read_pixels(team, reply)] == [{3}, {4}]


def test_without_a_free_descriptor_a_chunk_for_separate_memory_is_reported_too_large(make_team):
    team = make_team(MapDataset(large_image))
    team.await_ready()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        reply = team.run(1, [1], spare_bytes=8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reply == Reply(1, Status.TOO_LARGE, LARGE_IMAGE_BYTES + 32, b"")
    assert team.pool.deaths.causes == []


def test_a_canceled_chunk_ends_at_its_next_sample(make_team, tmp_path):
    go = tmp_path / "go"
    team = make_team(MapDataset(block_until(go)))
    team.submit(1, range(100))
    team.submit(2, [0])
    wait_until(lambda: team.pool._board.read(0).chunk == 1, "the worker takes the chunk")
    team.pool.cancel_before(2)
    go.touch()
    replies = team.wait(2)
    assert [(reply.chunk, reply.status) for reply in replies] == [(1, Status.UNWANTED), (2, Status.DONE)]


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_a_dead_workers_chunk_is_lost_at_its_sample_with_its_stack_and_the_worker_is_replaced(make_team):
    def die_at_7(index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        return index

    team = make_team(MapDataset(die_at_7))
    [dead_pid] = team.pool.pids
    lost = team.run(1, [5, 6, 7, 8], kinds=Lost)
    assert (lost.chunk, lost.row, lost.cause, lost.killed_externally) == (1, 2, "killed by SIGSEGV", False)
    assert lost.stack.startswith("Fatal Python error: Segmentation fault")
    assert "in die_at_7" in lost.stack
    assert "Extension modules" not in lost.stack
    assert not team.ring._busy
    assert team.load([1, 2], chunk=2) == [1, 2]
    assert team.pool.pids != [dead_pid]


def team_that_lost_chunk_2(make_team) -> tuple[Team, int]:
    """Return a team with a lost chunk, which the remaining worker might still load, and the pid of that worker."""
    team = make_team(MapDataset(), workers=2)
    team.load([1], chunk=1)
    team.await_ready()  # a worker that is not ready cannot have the chunk
    board = team.pool._board
    wait_until(lambda: 1 not in (board.read(0).chunk, board.read(1).chunk), "no worker processes the first chunk")
    assert not team.pool.recover_slots()
    stop_processes(*team.pool.pids)
    team.submit(2, [5])
    team.pool._queues[0].read_end.recv(1 << 16)  # as if a worker had taken the chunk and died before it noted it
    first_pid, second_pid = team.pool.pids
    os.kill(first_pid, signal.SIGKILL)
    os.kill(second_pid, signal.SIGCONT)
    [lost] = team.wait(1, Lost)
    assert (lost.chunk, lost.row) == (2, None)
    return team, second_pid


def test_a_chunk_that_a_dead_worker_took_but_did_not_note_is_lost(make_team):
    team, _ = team_that_lost_chunk_2(make_team)
    slot = team.slots[2]
    assert slot in team.ring._busy.values()
    # The slot is released when each worker that was ready has sent a message since.
    for chunk in range(3, 200):
        if slot not in team.ring._busy.values():
            break
        team.submit(chunk, [0])
        team.ring.release(team.slots[team.wait(1)[0].chunk])
    else:
        raise AssertionError("the slot is still written off")


class NotesChunkLate(MapDataset):
    """A dataset whose workers wait, between taking and noting the chunk of this number, until a file `go` exists."""

    def __init__(self, chunk: int, folder: Path) -> None:
        super().__init__()
        self.chunk, self.folder = chunk, str(folder)

    def __setstate__(self, state):
        from gpuload.workers import main

        self.__dict__.update(state)
        process_request = main._process_request

        def wait_for_go(request, *arguments):
            if request.chunk == self.chunk:
                with open(f"{self.folder}/taking", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(f"{self.folder}/taking", f"{self.folder}/taken")
                while not os.path.exists(f"{self.folder}/go"):
                    time.sleep(0.002)
            return process_request(request, *arguments)

        main._process_request = wait_for_go


def test_a_late_reply_to_a_lost_chunk_is_dropped_and_frees_its_slot(make_team, tmp_path):
    team = make_team(NotesChunkLate(2, tmp_path), workers=2)
    team.await_ready()
    team.submit(2, [5])
    wait_until((tmp_path / "taken").exists, "a worker has taken the chunk")
    [idle] = set(team.pool.pids) - {int((tmp_path / "taken").read_text())}
    os.kill(idle, signal.SIGKILL)
    [lost] = team.wait(1, Lost)
    assert (lost.chunk, lost.row) == (2, None)
    assert len(team.ring._busy) == 1
    (tmp_path / "go").touch()
    wait_until(lambda: team.pool.collect_events(0.01) or not team.ring._busy, "the late reply comes")
    assert team.load([1, 2], chunk=3) == [1, 2]
    assert len(team.ring._busy) == 1  # the slot of the last chunk


def test_recover_slots_replaces_idle_workers_that_might_write_to_a_lost_chunks_slot(make_team):
    team, idle_pid = team_that_lost_chunk_2(make_team)
    assert len(team.ring._busy) == 2
    wait_until(
        lambda: team.pool.collect_events(0.01) or not team.pool.recover_slots(), "the idle worker has been replaced"
    )
    assert len(team.ring._busy) == 1
    assert not is_alive(idle_pid)
    assert team.load([3, 4], chunk=3) == [3, 4]
    assert len(team.pool.deaths.causes) == 1


def test_a_dataset_that_cannot_be_unpickled_raises_worker_error_with_its_traceback(make_team):
    class Refuses:
        def __reduce__(self):
            return (int, ("not a number",))

    team = make_team(Refuses())
    with pytest.raises(WorkerError, match=r"could not unpickle the dataset or transforms[\s\S]*not a number"):
        team.wait(1)


def test_without_a_timeout_a_slow_sample_is_warned_of_once_with_its_stack(make_team, monkeypatch, tmp_path):
    started = tmp_path / "started"
    team = make_team(MapDataset(make_hanging_function(started)))
    team.submit(1, [7])
    team.await_ready()  # a slow start is warned of too
    wait_until(started.exists, "the worker loads the sample")
    monkeypatch.setattr("gpuload.workers.pool.SLOW_SAMPLE_S", 0.1)
    expected = r"worker 0 .* has been at sample 7 \(position 7\) for [\s\S]*timeout=…[\s\S]*in hang"

    def collect_events_until_warned() -> None:
        wait_until(lambda: team.pool.collect_events(0.5) or warned, "the sample is warned of")
        team.pool.collect_events(2.0)

    with pytest.warns(RuntimeWarning, match=expected) as warned:
        collect_events_until_warned()
    assert len(warned) == 1


def test_a_template_that_hangs_before_it_is_ready_is_warned_of_with_its_stack(make_team, monkeypatch, tmp_path):
    started = tmp_path / "started"

    class Slow:
        def __reduce__(self):
            hang = f"def hang_at_import():\n import time\n open({str(started)!r}, 'w')\n while True: time.sleep(0.01)"
            return exec, (f"{hang}\nhang_at_import()",)

    team = make_team(Slow(), forked=False)
    wait_until(started.exists, "the dataset is unpickled")
    monkeypatch.setattr("gpuload.workers.pool.SLOW_SAMPLE_S", 0.1)
    with pytest.warns(
        RuntimeWarning, match=r"the workers' template .* has been starting for[\s\S]*in hang_at_import"
    ) as warned:
        wait_until(lambda: team.pool.collect_events(0.5) or warned, "the template is warned of")


# -- more and fewer workers -----------------------------------------------------------------------------------------


def resize_and_wait(team, workers: int) -> None:
    """Resize the pool and wait until it is steady. An idle worker leaves after its next chunk, so submit chunks."""
    team.pool.resize(workers)
    chunk, deadline = max([0, *team.slots]), time.monotonic() + LIMIT_S
    while not team.pool.is_steady or len(team.pool.pids) > workers:
        assert time.monotonic() < deadline, f"{team.pool.pids} after {LIMIT_S} s"
        team.pool.collect_events(0.05)
        if team.pool.size < len(team.pool.pids):
            chunk += 1
            team.submit(chunk, [0])
            team.wait(1)
    assert len(team.pool.pids) == workers == team.pool.size


def describe_worker(index):
    from gpuload import get_worker_info

    return str((os.getpid(), get_worker_info().id, get_worker_info().num_workers))


def test_resize_adds_and_removes_workers_and_reuses_their_numbers(make_team):
    team = make_team(MapDataset(describe_worker), max_workers=3)
    [first_pid] = team.pool.pids
    team.pool.resize(3)
    team.pool.collect_events(0.0)
    assert team.pool.size == 2  # workers are added one by one
    resize_and_wait(team, 3)
    assert team.pool.pids[0] == first_pid
    stop_processes(*team.pool.pids[:2])  # the third worker must load the next chunk
    third_pid = team.pool.pids[2]
    assert team.load([0], chunk=1000) == [str((third_pid, 2, 3))]
    for pid in team.pool.pids[:2]:
        os.kill(pid, signal.SIGCONT)
    team.pool.resize(9)
    assert team.pool.is_steady  # three is the maximum
    team.pool.resize(0)
    assert team.pool.size == 1  # the minimum
    resize_and_wait(team, 1)
    assert team.pool.pids == [first_pid]
    assert not is_alive(third_pid)
    resize_and_wait(team, 2)
    second_pid = team.pool.pids[1]
    stop_processes(first_pid)
    assert team.load([0], chunk=2000) == [str((second_pid, 1, 3))]
    os.kill(first_pid, signal.SIGCONT)
    assert team.pool.deaths.causes == []


def test_a_leaving_worker_finishes_its_chunk_first(make_team):
    team = make_team(MapDataset(), workers=3)
    team.pool.collect_events(0.0)
    for chunk in range(1, 51):
        team.submit(chunk, [chunk])
    replies = team.wait(5)
    team.pool.resize(1)
    replies += team.wait(50 - len(replies))
    assert sorted(reply.chunk for reply in replies) == list(range(1, 51))
    assert {reply.status for reply in replies} == {Status.DONE}
    resize_and_wait(team, 1)
    assert team.pool.deaths.causes == []


def test_chunks_do_not_wait_for_a_worker_that_is_being_added(make_team, tmp_path):
    go = tmp_path / "go"

    def wait_for_go(worker):
        while worker > 0 and not go.exists():
            time.sleep(0.005)

    team = make_team(range(1000), max_workers=2, worker_init_fn=wait_for_go)
    team.load([1], chunk=1)
    team.pool.resize(2)
    team.pool.collect_events(0.0)
    assert (team.pool.size, team.pool.is_steady, team.pool.ready) == (2, False, True)
    assert team.load([5], chunk=2) == [5]  # by the other worker
    go.touch()
    resize_and_wait(team, 2)


def test_resize_up_again_keeps_or_replaces_a_leaving_worker(make_team):
    team = make_team(MapDataset(), workers=2)
    team.load([1], chunk=1)
    for chunk in range(2, 40, 2):
        team.pool.resize(1)
        team.submit(chunk, [0])
        team.wait(1)
        team.pool.resize(2)
        team.submit(chunk + 1, [0])
        team.wait(1)
    resize_and_wait(team, 2)
    assert team.pool.deaths.causes == []


def test_a_leaving_worker_that_dies_loses_its_chunk_and_is_not_replaced(make_team, tmp_path):
    go = tmp_path / "go"
    team = make_team(MapDataset(block_until(go)), workers=2)
    team.submit(1, [7])
    team.submit(2, [7])
    board = team.pool._board
    wait_until(lambda: {board.read(0).chunk, board.read(1).chunk} == {1, 2}, "both workers load a chunk")
    team.pool.resize(1)
    leaving_pid, chunk = team.pool.pids[1], board.read(1).chunk
    os.kill(leaving_pid, signal.SIGKILL)
    [lost] = team.wait(1, Lost)
    assert (lost.chunk, lost.row, lost.cause) == (chunk, 0, "killed by SIGKILL")
    assert len(team.pool.deaths.causes) == 1
    go.touch()
    [reply] = team.wait(1)
    assert {reply.chunk, chunk} == {1, 2}
    assert (len(team.pool.pids), team.pool.is_steady) == (1, True)


def test_an_added_worker_that_cannot_be_started_is_warned_of_once(make_team, monkeypatch):
    team = make_team(MapDataset(), max_workers=4)
    team.load([1], chunk=1)

    def refuse(*args):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("gpuload.workers.pool.WorkerProcess", refuse)
    team.pool.resize(4)
    team.pool.collect_events(0.0)
    text = r"^a worker could not be added: \[Errno 24\] Too many open files\. The number of workers stays at 1$"
    with pytest.warns(RuntimeWarning, match=text) as warned:
        team.pool.collect_events(0.0)
    assert len(warned) == 1
    team.pool.resize(4)
    assert (team.pool.size, team.pool.max_workers, team.pool.is_steady) == (1, 1, True)
    assert team.load([3], chunk=2) == [3]
    assert team.pool.deaths.causes == []


def test_added_workers_that_fail_before_they_are_ready_are_warned_of_once(make_team, tmp_path):
    fails = tmp_path / "fails"

    def raise_if_file_exists(worker):
        if fails.exists():
            raise ZeroDivisionError(worker)

    team = make_team(range(1000), workers=2, max_workers=4, worker_init_fn=raise_if_file_exists)
    team.await_ready()
    fails.touch()
    team.pool.resize(4)
    text = r"a worker could not be added: it is not usable: worker_init_fn raised an exception:[\s\S]*ZeroDivisionError"

    def collect_events_until_steady() -> None:
        wait_until(lambda: team.pool.collect_events(0.1) or team.pool.is_steady, "the added workers have failed")
        team.pool.collect_events(0.0)

    with pytest.warns(RuntimeWarning, match=text) as warned:
        collect_events_until_steady()
    assert len(warned) == 1
    assert (team.pool.size, team.pool.max_workers) == (2, 2)
    assert team.load([3], chunk=2) == [3]
    assert team.pool.deaths.causes == []


def test_busy_s_includes_chunks_in_progress_and_workers_that_have_left(make_team, tmp_path):
    go = tmp_path / "go"

    def wait_for_go(index):
        while not go.exists() or time.thread_time() < 0.02:
            time.sleep(0 if go.exists() else 0.002)
        return index

    team = make_team(MapDataset(wait_for_go), workers=2)
    team.submit(1, [0])
    wait_until(lambda: team.pool.busy_s() > 0.01, "a chunk in progress is counted")
    go.touch()
    team.wait(1)
    resize_and_wait(team, 1)
    wait_until(lambda: team.pool.busy_s() == team.pool.busy_s(), "no worker processes a chunk")
    assert team.pool.busy_s() > 0.01
    [cpu_s] = team.pool.wanted_cpu_s().values()
    assert cpu_s > 0.01


def test_wanted_cpu_s_includes_the_time_that_a_worker_waits_for_a_cpu(make_team):
    """Otherwise, workers that share a CPU with other programs would look like workers that wait for a disk."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spin = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    programs = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for program in programs:
            program.stdout.readline()

        def compute_100_ms(index):
            began = time.thread_time()
            while time.thread_time() - began < 0.1:
                pass
            return index

        team = make_team(MapDataset(compute_100_ms), workers=1)
        team.load([0])
        wanted_before_s, busy_before_s = sum(team.pool.wanted_cpu_s().values()), team.pool.busy_s()
        team.load([1, 2])
        wanted_s = sum(team.pool.wanted_cpu_s().values()) - wanted_before_s
        busy_s = team.pool.busy_s() - busy_before_s
        assert wanted_s > 0.25  # the worker has computed for 0.2 s
        assert wanted_s > 0.8 * busy_s
    finally:
        for program in programs:
            program.kill()
            program.communicate()
        os.sched_setaffinity(0, allowed)


# -- the end of a pool ------------------------------------------------------------------------------------------------


def test_close_while_workers_start_and_leave_leaves_no_process_descriptor_or_mapping():
    gc.collect()  # frees descriptors of earlier tests
    before = descriptors()
    mapped = Path("/proc/self/maps").read_text().count("memfd:gpuload")
    team = Team(MapDataset(), workers=2, max_workers=3)
    team.load([0])
    team.pool.resize(3)
    team.pool.collect_events(0.0)
    assert len(team.pool._team) == 3
    pids = team.pool.pids
    team.pool.resize(1)
    team.close()
    assert [pid for pid in pids if is_alive(pid)] == []
    assert descriptors() <= before
    assert Path("/proc/self/maps").read_text().count("memfd:gpuload") == mapped


def test_close_does_not_wait_for_a_worker_that_hangs(tmp_path):
    team = Team(MapDataset(make_hanging_function(tmp_path / "started")))
    [pid] = team.pool.pids
    team.submit(1, [0])
    wait_until((tmp_path / "started").exists, "the worker loads the sample")
    team.close()
    assert not is_alive(pid)


def test_close_in_a_forked_child_keeps_its_parents_workers(make_team):
    team = make_team(MapDataset())
    team.load([0])
    pids = team.pool.pids
    pid = os.fork()
    if pid == 0:
        try:
            team.close()
            team.pool.collect_events(0)
        except RuntimeError as error:
            os._exit(0 if "workers are closed" in str(error) else 1)
        finally:
            os._exit(2)  # no error, or an unexpected one
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert team.load([3], chunk=9) == [3]
    assert team.pool.pids == pids


# -- the import path ------------------------------------------------------------------------------------------------

SCRIPT = """
    import sys
    sys.path.insert(1, {tests!r})
    from workers.worker_team import Team
    import helper_of_the_script

    class Main:
        offset = 40
        def __init__(self): self.f = lambda x: x + self.offset
        def __getitem__(self, index):
            import random
            return [self.f(index), helper_of_the_script.VALUE, random.__file__]
        def __len__(self): return 10

    team = Team(Main())
    reply = team.run(1, [2])
    print([column.values[0] for column in team.content(reply).values.values()])
    team.close()
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_workers_import_from_the_scripts_folder_but_not_from_the_working_directory(tmp_path, as_module):
    script_folder, working_directory = tmp_path / "script", tmp_path / "elsewhere"
    script_folder.mkdir()
    working_directory.mkdir()
    (script_folder / "helper_of_the_script.py").write_text("VALUE = 'helped'\n")
    (script_folder / "script.py").write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parents[1])))
    trap = "import os\nopen(os.path.dirname(__file__) + '/was-run', 'w')\nraise ImportError('the wrong random')\n"
    (working_directory / "random.py").write_text(trap)
    if as_module:  # as in a notebook, which adds the working directory to the path after the start
        path, script = str(script_folder), str(script_folder / "script.py")
        (script_folder / "gpuload").mkdir()
        (script_folder / "gpuload" / "__init__.py").write_text("raise ImportError('the wrong gpuload')\n")
        code = (
            "import sys, random, runpy, gpuload, gpuload.loader; "
            f"sys.path[:0] = ['', {path!r}]; runpy.run_path({script!r}, run_name='__main__')"
        )
        command = [sys.executable, "-P", "-c", code]
    else:
        command = [sys.executable, str(script_folder / "script.py")]
    result = subprocess.run(command, cwd=working_directory, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert not (working_directory / "was-run").exists()
    assert "[42, 'helped'" in result.stdout
    assert "elsewhere" not in result.stdout


# -- systems without support for workers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("attribute", "value", "text"), [
    ("platform", "win32", "worker processes need Linux, got win32"),
    ("frozen", True, "workers need a Python interpreter, which a frozen application does not have"),
    ("executable", "", "sys.executable is empty, so there is no interpreter to start workers with"),
])  # fmt: skip
def test_check_platform_without_support_for_workers_names_the_remedy(monkeypatch, attribute, value, text):
    monkeypatch.setattr(sys, attribute, value, raising=False)
    with pytest.raises(RuntimeError, match=f"^{text}; use num_workers=0 to load in this process$"):
        check_platform()


# -- a queue for each worker ------------------------------------------------------------------------------------------


class CountsPickles:
    """A stream of 0 … 99, divided among workers, that records in a file how often it is pickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getstate__(self):
        with open(self.path, "a") as file:
            file.write("once\n")
        return self.__dict__

    def __iter__(self):
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        return iter(range(info.id, 100, info.num_workers))


def test_queue_per_worker_sends_each_worker_its_requests_and_ships_the_dataset_once(make_team, tmp_path):
    team = make_team(CountsPickles(str(tmp_path / "pickled")), 3, queue_per_worker=True)
    for chunk, (worker, rows) in enumerate([(2, [0, 1]), (0, [0, 1]), (2, [2, 3])]):
        team.submit(chunk, rows, iterable=IterableStart(1, worker, 0, None, 3, worker))
    replies = {reply.chunk: team.content(reply) for reply in team.wait(3)}
    assert [list(replies[chunk].values[0].values) for chunk in range(3)] == [[2, 5], [0, 3], [8, 11]]
    assert (tmp_path / "pickled").read_text() == "once\n"


def test_queue_per_worker_loses_only_the_dead_workers_chunks(make_team, tmp_path):
    team = make_team(CountsPickles(str(tmp_path / "pickled")), 2, queue_per_worker=True)

    def submit_first_sample(chunk: int, worker: int) -> None:
        team.submit(chunk, [0], iterable=IterableStart(chunk, worker, 0, None, 2, worker))

    for worker in (0, 1):
        submit_first_sample(worker, worker)
    team.wait(2)
    wait_until(lambda: {team.pool._board.read(worker).chunk for worker in (0, 1)} == {-1}, "both workers are idle")
    first_pid, second_pid = team.pool.pids
    stop_processes(first_pid, second_pid)
    submit_first_sample(2, 0)
    submit_first_sample(3, 1)
    team.pool._queues[0].read_end.recv(1 << 16)  # as if worker 0 had taken the chunk and died before it noted it
    os.kill(first_pid, signal.SIGKILL)
    [lost] = team.wait(1, Lost)
    assert (lost.chunk, lost.row) == (2, None)
    os.kill(second_pid, signal.SIGCONT)
    [reply] = team.wait(1)
    assert reply.chunk == 3
