"""Ctrl-C at different places: the program ends at once, as any Python program does."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from faults.programs import ONE_CTRL_C, SOON_S, TWO_CTRL_CS
from helpers.matrix import matrix

import gpuload

PACKAGE = Path(gpuload.__file__).parent
IN_A_FINALIZER = re.compile(
    r"Exception ignored in: <function (on_collected\.<locals>\.call|Epoch\.__del__) .*\n(.*\n)*?KeyboardInterrupt: \n"
)

# Programs that print "here" at the place where the signal, which goes to all processes of their group, is to arrive.
PLACES = {
    "in the loop body": """
        for batch in number_loader():
            say("here")
            hang()
    """,
    "in next() while workers hang": """
        for batch in number_loader(hang_from_8):
            wait_for_the_hang()
            say("here")
    """,
    "in next() without workers": """
        def slow(index):
            if index == 8:
                say("here")
                hang()
        for batch in number_loader(slow, num_workers=0):
            pass
    """,
    "while workers start": """
        class Slow(Numbers):
            def __setstate__(self, state):
                say("here")
                time.sleep(1000)
        for batch in gl.Loader(Slow(), num_workers=2, device="cpu"):
            pass
    """,
    "while workers import": """
        original_launch = process._launch
        def launch(name, descriptors):
            child = original_launch(name, descriptors)
            say("here")
            return child
        process._launch = launch
        for batch in number_loader():
            say("too late")
            hang()
    """,
    "in a with block": """
        with number_loader(hang_from_8) as loader:
            for batch in loader:
                wait_for_the_hang()
                say("here")
    """,
    "in close()": """
        loader = number_loader(hang_from_8)
        iterator = iter(loader)
        next(iterator)
        wait_for_the_hang()
        say("here")  # closing takes a second now
        loader.close()
        hang()
    """,
}


@matrix(strength=1, place=PLACES, presses=[1, 2])
def test_ctrl_c_ends_the_program_with_its_traceback_and_its_workers(start_program, place, presses):
    program = start_program(PLACES[place])
    program.wait_for_line("here")
    program.signal(signal.SIGINT)
    if presses == 2:
        time.sleep(0.05)  # as fingers press it; the program may be anywhere by then, or have ended
        program.signal(signal.SIGINT)
    began = time.monotonic()
    code, error = program.end()
    assert time.monotonic() - began < SOON_S
    assert code == -signal.SIGINT
    if presses == 2:
        # The second signal can hit a finalizer of the Loader, or torch at the interpreter's exit. Python prints both.
        error = IN_A_FINALIZER.sub("", error)
        error, _, ignored = error.partition("Exception ignored in")
        assert f"{PACKAGE}/" not in ignored
    expected = ONE_CTRL_C if presses == 1 else TWO_CTRL_CS
    assert expected.fullmatch(error), error
