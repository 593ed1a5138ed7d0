"""A worker process, which takes requests from the queue, loads chunks into their slots, and replies. This module runs
only in worker processes and their template.

A worker does not import torch unless the user's dataset does. It exits when the queue is closed, or between two chunks
if the parent asks it to leave. When the parent dies, the worker ends even while it hangs in foreign code: it holds the
read end of a *lifeline*, a pipe that nobody writes to, and the kernel sends it SIGKILL when the write end closes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import marshal
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from gpuload.datasets.kinds import is_deterministic, is_iterable
from gpuload.datasets.worker import THIS_PROCESS, WorkerInfo, replace_worker_info
from gpuload.errors import error_class_names
from gpuload.ring.ring import Slot, WorkerRing
from gpuload.rng.generators import seed_generators
from gpuload.workers.counters import WorkerCounters
from gpuload.workers.inherited import describe_differences
from gpuload.workers.job import Job, read_changes, receive
from gpuload.workers.protocol import (
    HELLO,
    HELLO_FAILED,
    IDLE,
    LEFT,
    MAX_INLINE_BYTES,
    MESSAGE_BYTES,
    STACK_SIGNAL,
    Board,
    Reply,
    Request,
    arm_lifeline,
    peek_request,
    read_message,
    send_reply,
)
from gpuload.workers.runner import ChunkRunner
from gpuload.workers.source import init_position, make_worker_info
from gpuload.workers.start import Stopwatch

__all__ = ["exit_process", "run_worker", "set_up_child"]

MAX_DIFFERENCES = 10  # the maximum number of differences between modules in a warning
# The methods of a process group that work without communication; all other methods raise an error.
LOCAL_GROUP_METHODS = frozenset(
    {"rank", "size", "name", "group_name", "group_desc", "bound_device_id", "boxed", "unbox"}
)
BUFFERED_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # types that buffer unwritten data


def set_up_child(lifeline_fd: int, stacks_fd: int, descriptors: list[int]) -> None:
    """Set up this process as a child of a session: it dies with the parent, writes its stacks on request, and ignores
    signals that the parent handles."""
    # C code writes the stack, after a crash or when the parent asks for it, so this works even while Python hangs.
    faulthandler.enable(stacks_fd)
    faulthandler.register(STACK_SIGNAL, stacks_fd, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, STACK_SIGNAL})
    # A scheduler sends SIGTERM to all processes of a job, but the parent may need batches until it has saved its state.
    # Set a handler instead of SIG_IGN, which programs that the dataset starts would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    _die_with_parent(lifeline_fd)
    THIS_PROCESS.is_worker = True
    for fd in descriptors:
        os.set_inheritable(fd, False)


def run_worker(worker: int, settings: dict[str, Any], descriptors: list[int], forked_job: Job | None = None) -> None:
    """Process chunks until the parent closes the queue or asks the worker to leave. A forked worker inherits its job,
    `forked_job`."""
    stopwatch = Stopwatch()
    reply_fd, lifeline_fd, stacks_fd, job_fd, ring_fd, board_fd, queue_fd, *_ = descriptors
    set_up_child(lifeline_fd, stacks_fd, descriptors)
    with socket.socket(fileno=queue_fd) as queue, socket.socket(fileno=reply_fd) as replies:
        for channel in (queue, replies):
            channel.setblocking(True)  # in a forked worker, the user's default timeout applies to new sockets
        failure = "could not unpickle the dataset or transforms"
        try:
            with stopwatch.measure():
                job: Job = receive(job_fd) if forked_job is None else forked_job
            runner = ChunkRunner(job, guard_generators=False)
            failure = "is not usable: worker_init_fn raised an exception"
            _init_user_code(worker, settings["total"], runner)
        except BaseException as error:
            text = traceback.format_exc().encode(errors="replace")[-MAX_INLINE_BYTES:]
            replies.send(HELLO_FAILED + f"{' '.join(error_class_names(error))}\n{failure}:\n\n".encode() + text)
            return
        runner.source.read_changes = partial(read_changes, job_fd)
        board = Board(settings["workers"], board_fd, settings["first"])
        counters = runner.counters = board.counters.open_row(worker)
        ring = WorkerRing(ring_fd, settings["ring_bytes"])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is closing
            differences = describe_differences(runner.job.module_values, runner.job.library_values)
            text = "; ".join(differences[:MAX_DIFFERENCES])
            replies.send(HELLO + marshal.dumps((b"" if forked_job is not None else stopwatch.pack(), text)))
            memory = memoryview(bytearray(MESSAGE_BYTES))
            counters.start_queue_time()
            counters.begin()
            while board.may_stay(worker) and (message := _next_message(queue, memory, counters)):
                if runner.source.reads_ahead:
                    runner.source.store_next_keys(peek_request(queue, memory))
                reply = _process_request(Request.unpack(message), worker, runner, board, ring)
                counters.flush()  # before the reply, so that the parent finds the chunk counted
                send_reply(replies, reply)
                board.write(worker, IDLE)
            counters.stop()
            board.write(worker, LEFT)


def exit_process() -> NoReturn:
    """Exit as an interpreter does, but without tearing down modules, which takes half a second of CPU time with torch.

    Files that a dataset left open are flushed; finding them takes 3 ms, or 40 ms with torch. Objects that a template
    froze are not searched, since the files that it had open were open for reading.
    """
    threading._shutdown()  # type: ignore[attr-defined]  waits for threads
    atexit._run_exitfuncs()
    files = (obj for obj in gc.get_objects() if type(obj) in BUFFERED_FILES)
    for file in (sys.stdout, sys.stderr, *files):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no file, a closed file, or a full disk
            file.flush()
    os._exit(0)


def _next_message(queue: socket.socket, memory: memoryview, counters: WorkerCounters) -> bytes:
    """Wait for the next message and return it. A worker counts as idle only while the queue is empty, not while the
    worker waits for a CPU."""
    try:
        return read_message(queue, memory, socket.MSG_DONTWAIT)
    except BlockingIOError:
        counters.end()
        message = read_message(queue, memory)
        counters.begin()
        return message


def _init_user_code(worker: int, workers: int, runner: ChunkRunner) -> None:
    """Set the worker info, and then call `worker_init_fn`, as a DataLoader's worker does before its first sample."""
    job = runner.job
    if job.world_size > 1 and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    runner.source.set_worker_info = partial(_set_worker_info, job, worker, workers)
    # An iterable dataset may ask torch which share of the samples to yield.
    may_ask_torch = is_iterable(job.dataset) and not is_deterministic(job.dataset)
    _set_worker_info(job, worker, workers, job.epoch, needs_torch=may_ask_torch)
    if job.worker_init_fn is not None or (job.collate_fn is not None and runner.source.seeding is None):
        # A collate_fn may draw random numbers even if samples do not. Without a seed, all forked workers would draw the
        # same numbers.
        seed_generators(job.seed, job.epoch, init_position(job.rank, worker))
    if job.worker_init_fn is not None:
        job.worker_init_fn(worker)


def _set_worker_info(
    job: Job, worker: int, workers: int, epoch: int, position: int | None = None, *, needs_torch: bool = False
) -> None:
    """Set the results of gpuload's and torch's `get_worker_info()`, and the rank in `torch.distributed`.

    torch is set up only if the user's dataset has imported it, or if `needs_torch` is true, so that a worker that reads
    image files never imports torch.
    """
    info = make_worker_info(job, worker, workers, epoch, position)
    replace_worker_info(info)
    if needs_torch or "torch" in sys.modules:
        _set_torch_worker_info(info)
        if job.group is not None:
            _join_group(*job.group)


def _set_torch_worker_info(info: WorkerInfo) -> None:
    from torch.utils.data._utils import worker as torch_worker

    class TorchWorkerInfo(torch_worker.WorkerInfo):
        """torch's class, extended to record that an attribute was read."""

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                THIS_PROCESS.worker_info_was_read = True
            return super().__getattribute__(name)

    torch_worker._worker_info = TorchWorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset
    )


def _join_group(backend: str, rank: int, world_size: int) -> None:
    """Make `torch.distributed` report the rank of the main process, unless a process group already exists.

    A worker is not a fork of the user's process, so it has no process group. It gets a group that knows only its rank
    and size, which is enough for torch's ``is_initialized()``, ``get_rank()``, ``get_world_size()`` and
    ``get_backend()``. A collective raises an error: it would wait for other ranks' workers, which never join it.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if dist.is_initialized():
        return
    blocked_names = [
        name for name in dir(dist.ProcessGroup) if not name.startswith("_") and name not in LOCAL_GROUP_METHODS
    ]
    refusals = {name: _make_refusal(name) for name in blocked_names if callable(getattr(dist.ProcessGroup, name))}
    group = type("WorkersGroup", (dist.ProcessGroup,), refusals)(rank, world_size)  # pyright: ignore[reportCallIssue]
    c10d._world.pg_map[group] = (backend, None)  # pyright: ignore[reportArgumentType]
    c10d._world.pg_names[group] = "gpuload"  # pyright: ignore[reportArgumentType]
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    c10d.GroupMember.WORLD = group


def _make_refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: object, **options: object) -> Any:
        raise RuntimeError(
            f"torch.distributed.{name} was called in a gpuload worker process, which knows its rank and the number of "
            "ranks, but cannot communicate with other ranks; call it in the main process, or use num_workers=0"
        )

    return refuse


def _process_request(request: Request, worker: int, runner: ChunkRunner, board: Board, ring: WorkerRing) -> Reply:
    board.write(worker, request.chunk)
    slot = Slot(request.slot_offset, request.slot_bytes)
    return runner.run(
        request,
        ring.view(slot),
        board.make_row_writer(worker, request.chunk),
        board.make_wanted_check(request.chunk),
        partial(ring.populate, slot),
    )


def _die_with_parent(lifeline_fd: int) -> None:
    """Arm the lifeline. Exit if the parent has already died, since the kernel would then not send the signal."""
    arm_lifeline(lifeline_fd, os.getpid())  # the parent does this too, unless it has died
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    with contextlib.suppress(OSError):
        if poll.poll(0):
            os._exit(1)
