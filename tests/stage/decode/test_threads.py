"""The threads that decode on the device, while the loop continues, and while it is interrupted, forked or closed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated.decoder import decoding_with
from stage.decode.gate import LIMIT_S, Gate, make_loader, open_after_closing_has_begun, stopped_at

import gpuload as gl
from gpuload.decode.native_messages import native_messages, run_and_capture
from gpuload.stage.decode.threads import DecodedMemory


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpuload-decode")]


def await_waiting_thread(memory: DecodedMemory, thread: threading.Thread) -> None:
    """Start a thread, and return when it waits for memory, or has ended."""
    thread.start()
    while thread.is_alive() and not memory._changed._waiters:
        thread.join(0.001)


def assert_complete(batches: list[Any]) -> None:
    with make_loader(decode=gl.Decode()) as loader:
        for (images, numbers), (expected, expected_numbers) in zip(batches, loader, strict=True):
            assert numbers.tolist() == expected_numbers.tolist()
            assert torch.equal(images, expected)


def test_next_returns_a_batch_that_is_ready_while_the_device_decodes_the_following_one():
    gate = Gate(stopped_call=3)
    with stopped_at(gate) as (_, iterator, batches):
        batches.append(next(iterator))
        assert not gate.opened.is_set()
        gate.opened.set()
        assert_complete([*batches, *iterator])


def test_at_most_two_batches_are_decoded_ahead():
    gate = Gate(stopped_call=3)
    with stopped_at(gate) as (loader, _, _):
        feed = loader._session.feed
        while any(batch.open_part_count for batch in feed.batches):
            feed.pump(0.01)
        assert len(feed.batches) > 2
        assert [batch.decoding is not None for batch in feed.batches[:3]] == [True, True, False]


def test_close_during_a_call_waits_for_it_and_ends_the_threads():
    gate = Gate(stopped_call=2)
    with stopped_at(gate) as (loader, _, _):
        assert len(decoding_threads()) == 1
        opener = threading.Thread(target=open_after_closing_has_begun, args=[loader._session.steps, gate])
        opener.start()
        loader.close()
        assert gate.opened.is_set()
        assert not decoding_threads()
        opener.join(LIMIT_S)


def test_new_epoch_during_a_call_does_not_reuse_slots_that_the_device_reads():
    gate = Gate(stopped_call=2)
    with stopped_at(gate) as (loader, _, _):
        threading.Thread(target=gate.opened.set).start()
        assert_complete(list(loader))


def test_interrupt_during_a_call_is_raised_and_the_next_epoch_is_complete():
    main_thread_id = threading.main_thread().ident
    calls = []

    def interrupt_in_second_call() -> None:
        calls.append(1)
        if len(calls) == 2:
            signal.pthread_kill(main_thread_id, signal.SIGINT)

    with decoding_with(before=interrupt_in_second_call), make_loader() as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert_complete(list(loader))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_fork_during_a_call_leaves_a_child_that_ends_and_a_parent_that_continues():
    gate = Gate(stopped_call=2)
    with stopped_at(gate) as (loader, iterator, batches):
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    next(iterator)
                except RuntimeError as error:
                    loader.close()
                    status = 0 if "forked from" in str(error) and not decoding_threads() else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gate.opened.set()
        assert_complete([*batches, *iterator])


def test_exit_of_the_interpreter_during_a_call_waits_for_it(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import atexit, sys, threading
        atexit.register(lambda: context.__exit__(None, None, None))  # called last, after gpuload has closed the session
        sys.path[:0] = sys.argv[1:]
        from stage.decode.gate import Gate, open_after_closing_has_begun, stopped_at

        gate = Gate(stopped_call=2)
        context = stopped_at(gate)
        loader, _, _ = context.__enter__()
        steps = loader._session.steps
        threading.Thread(target=open_after_closing_has_begun, args=[steps, gate], daemon=True).start()
        """)
    )
    tests = Path(__file__).parent.parent.parent
    command = [sys.executable, str(program), str(tests.parent), str(tests)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_error_of_the_decoder_is_raised_by_next():
    def fail() -> None:
        raise ValueError("the decoder is broken")

    with decoding_with(before=fail), make_loader() as loader, pytest.raises(ValueError, match="the decoder is broken"):
        list(loader)
    assert not decoding_threads()


@pytest.mark.parametrize(("where", "count"), [("cpu", 0), ("device", 1)])
def test_threads_run_only_while_the_device_decodes(where, count):
    with decoding_with(), make_loader(decode=gl.Decode(where=where)) as loader:
        list(loader)
        assert len(decoding_threads()) == count
    assert not decoding_threads()


@pytest.mark.parametrize(("reserved_bytes", "nbytes", "is_alone"), [(60, 60, False), (10, 20, True)])
def test_reserve_waits_for_memory_or_until_it_is_alone(reserved_bytes, nbytes, is_alone):
    memory, events = DecodedMemory(100), []
    memory.reserve(reserved_bytes)

    def reserve() -> None:
        events.append(("reserved", memory.reserve(nbytes, is_alone=is_alone)))
        memory.release(nbytes)

    thread = threading.Thread(target=reserve)
    await_waiting_thread(memory, thread)
    events.append("released")
    memory.release(reserved_bytes)
    thread.join(LIMIT_S)
    assert events == ["released", ("reserved", 0)]


def test_child_that_is_forked_while_messages_are_captured_prints_to_standard_error():
    messages = native_messages()
    assert messages is not None
    pid, _ = run_and_capture(os.fork)
    if pid == 0:
        os._exit(0 if messages._stderr.value == messages._original else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
