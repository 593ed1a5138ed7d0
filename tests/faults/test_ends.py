"""However a program ends, its workers end with it, nothing stays behind, and it says nothing that it did not mean."""

from __future__ import annotations

import os
import signal

import pytest


def test_workers_end_within_a_second_when_the_program_is_killed_in_mid_epoch(start):
    program = start("""
        for batch, info in jpeg_loader(folder):
            if info.step == 3:
                say("here")
                time.sleep(1000)
    """)
    program.wait_for_line("here")
    assert len(program.processes()) == 4  # with the template and the fork server
    os.kill(program.pid, signal.SIGKILL)
    assert program.end(within_s=1) == (-signal.SIGKILL, "")


def test_workers_that_hang_end_within_a_second_when_the_program_is_killed(start):
    program = start("""
        iterator = iter(number_loader(hang_from_8))
        next(iterator)
        wait_for_the_hang()
        say("here")
        for batch in iterator:
            pass
    """)
    program.wait_for_line("here")
    os.kill(program.pid, signal.SIGKILL)
    assert program.end(within_s=1) == (-signal.SIGKILL, "")


def test_a_template_that_was_stopped_while_it_started_ends_when_the_program_is_killed(start):
    program = start("""
        started = process._launch
        def launch(number, descriptors):
            result = started(number, descriptors)
            os.kill(result.pid, signal.SIGSTOP)
            return result
        process._launch = launch
        iterator = iter(number_loader())
        wait_until(lambda: all(Path(f"/proc/{pid}/stat").read_text().split()[2] == "T" for pid in children()), "stop")
        say("here")
        time.sleep(1000)
    """)
    program.wait_for_line("here")
    assert len(program.processes()) == 1
    os.kill(program.pid, signal.SIGKILL)
    assert program.end(within_s=1) == (-signal.SIGKILL, "")


def test_workers_flush_files_and_run_exit_handlers_when_the_program_ends_normally(start, tmp_path):
    program = start("""
        from gpuload.workers import pool
        pool.CLOSE_GRACE_S = 60  # a loaded machine may take longer than the second that close() grants
        class Held(list):
            def __getitem__(self, index):
                import atexit
                if not hasattr(self, "text"):
                    self.text = open(f"{tmp}/{os.getpid()}.log", "w")
                    self.text.write("not flushed")
                    self.bytes = open(f"{tmp}/{os.getpid()}.raw", "wb")
                    self.bytes.write(b"not flushed")
                atexit.register(lambda: open(f"{tmp}/{os.getpid()}.ended", "w").close())
                def note():
                    time.sleep(0.2)
                    open(f"{tmp}/{os.getpid()}.thread", "w").close()
                threading.Thread(target=note).start()
                return index
        iterator = iter(gl.Loader(Held(range(8)), batch_size=4, num_workers=2, device="cpu"))
        next(iterator)
    """)
    assert program.end() == (0, "")
    began = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    assert began
    assert set(began.values()) == {"not flushed"}
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.raw")} == began
    assert {path.stem for path in tmp_path.glob("*.ended")} == began.keys()
    assert {path.stem for path in tmp_path.glob("*.thread")} == began.keys()


# How a program ends while an iterator is open, its exit code, and the last line that it shows.
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
def test_a_program_that_ends_with_an_open_iterator_prints_only_its_own_error(start, how):
    ending, exit_code, last_line = ENDS[how]
    program = start(f"""
        iterator = iter(number_loader({"hang_from_8" if "hang" in how else "int"}))
        next(iterator)
        {ending}
    """)
    status, error = program.end()
    assert status == exit_code
    if last_line:
        assert error.startswith("Traceback")
        assert error.count("Traceback") == 1
        assert error.endswith(last_line)
    else:
        assert error == ""
