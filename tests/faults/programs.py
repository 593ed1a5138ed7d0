"""Programs that tests run, send signals to, and check for what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

from helpers.processes import LIMIT_S, is_alive, wait_until

SOON_S = 60.0  # short compared with the 1000 s that a program hangs if it is not ended; a loaded machine is slow
# Python shows an empty line for a function that was just entered. If an error was being handled (a missing file, a full
# queue), Python shows that error first.
_TRACEBACK = r"Traceback \(most recent call last\):\n( .*\n|\n)+"
_DURING = r"\nDuring handling of the above exception, another exception occurred:\n\n"
ONE_CTRL_C = re.compile(rf"({_TRACEBACK}\w+Error: .*\n{_DURING})?{_TRACEBACK}KeyboardInterrupt\n")
# The second may arrive while the first propagates, or while Python shows its traceback, which it then cuts off.
TWO_CTRL_CS = re.compile(
    rf"({_TRACEBACK}(\w+Error: .*|KeyboardInterrupt)\n{_DURING})*"
    rf"({_TRACEBACK}KeyboardInterrupt|(.*\n)*lost sys\.stderr)\n"
)


class Zygote:
    """A running `zygote.py`."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("zygote.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def send(self, *words: object) -> None:
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    def read_answer(self) -> int:
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        assert ready, f"no end after {LIMIT_S} s"
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(LIMIT_S)
        self.process.stdout.close()


class Program:
    """A running script, whose process `pid` leads the process group of its workers."""

    def __init__(self, zygote: Zygote, folder: Path, code: str) -> None:
        self._zygote = zygote
        self._mark = uuid.uuid4().hex
        script, self._output, self._error = (folder / f"{self._mark}.{kind}" for kind in ("py", "out", "err"))
        script.write_text(textwrap.dedent(code))
        zygote.send(script, self._output, self._error, self._mark)
        self.pid = zygote.read_answer()
        self.code: int | None = None

    @property
    def lines(self) -> list[str]:
        """The complete lines that the script has printed."""
        return self._output.read_text().split("\n")[:-1] if self._output.exists() else []

    def wait_for_line(self, word: str) -> None:
        wait_until(lambda: word in self.lines or not is_alive(self.pid), f"the script prints {word!r}")
        assert word in self.lines, self._error.read_text()

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def processes(self) -> list[int]:
        """Return the pids of all processes that the script started, in any group."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"GPULOAD_TEST_MARK={self._mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
        return pids

    def end(self, within_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait until all processes of the script have exited. Return its exit code and its standard error."""
        self.code = self._zygote.read_answer()
        wait_until(lambda: not self.processes(), "all processes of the script exit", within_s)
        return self.code, self._error.read_text()

    def kill(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._zygote.read_answer()
