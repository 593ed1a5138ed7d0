"""Programs that end in different ways: their workers end too, nothing is left behind, and nothing more is printed."""

from __future__ import annotations

import os
import signal

import pytest
from helpers.processes import is_alive, wait_until

# What a program does before it is killed, and how many processes it has started by then.
PROGRAMS_TO_KILL = {
    "in mid-epoch": (
        """
        for batch, info in jpeg_loader(folder):
            if info.step == 3:
                say("here")
                time.sleep(1000)
        """,
        4,  # two workers, their template and the fork server
    ),
    "while workers hang": (
        """
        iterator = iter(number_loader(hang_from_8))
        next(iterator)
        wait_for_the_hang()
        say("here")
        for batch in iterator:
            pass
        """,
        4,
    ),
    "while the template is stopped at its start": (
        """
        original_launch = process._launch
        def launch_and_stop(name, descriptors):
            child = original_launch(name, descriptors)
            os.kill(child.pid, signal.SIGSTOP)
            return child
        process._launch = launch_and_stop
        iterator = iter(number_loader())
        wait_until(lambda: all(process_state(pid) == "T" for pid in child_pids()), "the template has stopped")
        say("here")
        time.sleep(1000)
        """,
        1,  # the template
    ),
    "while all other processes are stopped": (
        """
        loader = number_loader(persistent_workers=True)
        check_epoch(loader)
        for pid in (*worker_pids(), *template_pids(), *server_pids()):
            os.kill(pid, signal.SIGSTOP)
        say("here")
        time.sleep(1000)
        """,
        4,
    ),
}


@pytest.mark.parametrize("when", PROGRAMS_TO_KILL)
def test_all_processes_end_within_a_second_when_the_program_is_killed(start_program, when):
    code, process_count = PROGRAMS_TO_KILL[when]
    program = start_program(code)
    program.wait_for_line("here")
    assert len(program.processes()) == process_count
    os.kill(program.pid, signal.SIGKILL)
    assert program.end(within_s=1) == (-signal.SIGKILL, "")


def test_workers_end_with_a_killed_program_although_its_forked_child_lives_on(start_program, tmp_path):
    program = start_program("""
        iterator = iter(number_loader(hang_from_8))
        next(iterator)
        wait_for_the_hang()
        pids = worker_pids()
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        Path(f"{tmp}/pids").write_text(" ".join(map(str, [child, *pids])))
        say("here")
        time.sleep(1000)
    """)
    program.wait_for_line("here")
    child, *pids = map(int, (tmp_path / "pids").read_text().split())
    os.kill(program.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the workers exit")
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)
    assert program.end() == (-signal.SIGKILL, "")


def test_workers_flush_files_run_exit_handlers_and_join_threads_when_the_program_ends_normally(start_program, tmp_path):
    program = start_program("""
        from gpuload.workers import pool
        pool.CLOSE_GRACE_S = 60  # a loaded machine can need more than the second that close() allows
        class WritesWithoutClosing(list):
            def __getitem__(self, index):
                import atexit
                if not hasattr(self, "text"):
                    self.text = open(f"{tmp}/{os.getpid()}.log", "w")
                    self.text.write("buffered")
                    self.bytes = open(f"{tmp}/{os.getpid()}.raw", "wb")
                    self.bytes.write(b"buffered")
                atexit.register(lambda: open(f"{tmp}/{os.getpid()}.ended", "w").close())
                def finish_late():
                    time.sleep(0.2)
                    open(f"{tmp}/{os.getpid()}.thread", "w").close()
                threading.Thread(target=finish_late).start()
                return index
        iterator = iter(gl.Loader(WritesWithoutClosing(range(8)), batch_size=4, num_workers=2, device="cpu"))
        next(iterator)
    """)
    assert program.end() == (0, "")
    text_by_pid = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    assert text_by_pid, "no worker has read a sample"
    assert set(text_by_pid.values()) == {"buffered"}
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.raw")} == text_by_pid
    assert {path.stem for path in tmp_path.glob("*.ended")} == text_by_pid.keys()
    assert {path.stem for path in tmp_path.glob("*.thread")} == text_by_pid.keys()


# How a program ends while an iterator is open, its exit code, and the last line of its standard error.
ENDS = {
    "at the end of the script": ("", 0, ""),
    "by sys.exit": ("sys.exit(3)", 3, ""),
    "by os._exit": ("os._exit(4)", 4, ""),
    "by an exception": ("raise ZeroDivisionError('here')", 1, "ZeroDivisionError: here\n"),
    "by an exception in the loop": (
        "for _ in iterator: raise ZeroDivisionError('here')",
        1,
        "ZeroDivisionError: here\n",
    ),
    "by SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "by SIGTERM with a handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
        5,
        "",
    ),
    "with the iterator in a reference cycle": ("node = [iterator]; node.append(node); del node, iterator", 0, ""),
    "with workers that hang": ("wait_for_the_hang()", 0, ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_with_an_open_iterator_prints_only_its_own_error(start_program, how):
    ending, expected_code, last_line = ENDS[how]
    program = start_program(f"""
        iterator = iter(number_loader({"hang_from_8" if "wait_for_the_hang" in ending else "int"}))
        next(iterator)
        {ending}
    """)
    exit_code, error = program.end()
    assert exit_code == expected_code, error
    if last_line:
        assert error.startswith("Traceback")
        assert error.count("Traceback") == 1
        assert error.endswith(last_line)
    else:
        assert error == ""
