"""Programs that end, for better or worse: run them, send them signals, see what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

LIMIT_S = 120.0
SOON_S = 60.0  # where a program that is not ended hangs for 1000 s, or for ever; a loaded machine takes its time
# Empty is the line that Python shows for a function which was just entered.
# Where an error was being handled (a file that is not there, a queue that is full), Python shows that one first.
_TRACEBACK = r"Traceback \(most recent call last\):\n( .*\n|\n)+"
_DURING = r"\nDuring handling of the above exception, another exception occurred:\n\n"
ONE_CTRL_C = re.compile(rf"({_TRACEBACK}\w+Error: .*\n{_DURING})?{_TRACEBACK}KeyboardInterrupt\n")
# The second may come while the first is on its way up, or while Python shows that one, of which it shows no more then.
TWO_CTRL_CS = re.compile(
    rf"({_TRACEBACK}(\w+Error: .*|KeyboardInterrupt)\n{_DURING})*"
    rf"({_TRACEBACK}KeyboardInterrupt|(.*\n)*lost sys\.stderr)\n"
)


class Zygote:
    """The program of `zygote.py`, and what it says."""

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
    """A script that runs.

    Attributes:
        pid: its process, which leads the group that its workers are in.
    """

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
        """The complete lines that it wrote."""
        return self._output.read_text().split("\n")[:-1] if self._output.exists() else []

    def wait_for_line(self, word: str) -> None:
        """Wait until it says this."""
        wait_until(lambda: word in self.lines or not is_alive(self.pid), f"it says {word!r}")
        assert word in self.lines, self._error.read_text()

    def signal(self, number: int) -> None:
        """To all of its processes, as a terminal does it; to those that are still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def processes(self) -> list[int]:
        """It and all that it started, wherever they went."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"GPULOAD_TEST_MARK={self._mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
        return pids

    def end(self, within_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for its end and that of all its processes. Returns exit code and what stands on the standard error."""
        self.code = self._zygote.read_answer()
        wait_until(lambda: not self.processes(), "all of its processes end", within_s)
        return self.code, self._error.read_text()

    def kill(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._zygote.read_answer()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not after {limit_s} s: {what}"
        time.sleep(0.002)
