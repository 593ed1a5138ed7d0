"""Interrupts that the program survives, as a notebook does: what broke off says so, all else is whole."""

from __future__ import annotations

import re

import pytest

IN_EPOCH_DEL = re.compile(r"Exception ignored in: <function Epoch.__del__ .*\n(.*\n)*?KeyboardInterrupt: \n")


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_in_next_ends_the_iterator_and_the_next_epoch_is_complete(succeed, workers):
    succeed(f"""
        def interrupt(index):
            if index == 11 and not os.path.exists(f"{{tmp}}/once"):
                open(f"{{tmp}}/once", "w").close()
                if {workers}:
                    wait_until(lambda: os.path.exists(f"{{tmp}}/waits"), "the main process waits")
                ctrl_c()
                time.sleep(0.2 if {workers} else 1)  # the main process waits for this sample
        loader = number_loader(interrupt, num_workers={workers})
        iterator = iter(loader)
        seen = []
        when_waiting_for_workers(lambda: len(seen) == 8, lambda: open(f"{{tmp}}/waits", "w").close())
        try:
            while True:
                seen += next(iterator).tolist()
        except KeyboardInterrupt:
            pass
        assert seen == list(range(len(seen))) and len(seen) in (0, 4, 8), seen
        for _ in range(2):
            try:
                next(iterator)
                raise AssertionError
            except RuntimeError as error:
                assert str(error) == (
                    "this iterator has ended: it was interrupted by KeyboardInterrupt, and a batch may be lost. "
                    "Begin a new epoch with iter()"
                ), error
        assert loader.epoch == 0
        expected = held_resources()
        assert torch.cat(list(loader)).tolist() == list(range(40))
        assert loader.epoch == (1 if seen else 0)  # what nothing was taken from is no epoch
        assert held_resources() == expected
        del iterator
        assert held_resources() == expected
        assert torch.cat(list(loader)).tolist() == list(range(40))
    """)


def test_after_ctrl_c_in_iter_the_next_iter_begins_the_same_epoch(succeed):
    succeed("""
        class Slow(Numbers):
            def __getstate__(self):  # pickled in the main process, within iter()
                if not os.path.exists(f"{tmp}/once"):
                    open(f"{tmp}/once", "w").close()
                    ctrl_c()
                    hang()
                return self.__dict__
        before = held_resources()
        loader = gl.Loader(Slow(), 4, num_workers=2, device="cpu", info=True)
        loader.set_epoch(5)
        try:
            iter(loader)
            raise AssertionError
        except KeyboardInterrupt:
            pass
        assert held_resources() == before, (held_resources(), before)
        batch, info = next(iter(loader))
        assert (batch.tolist(), info.epoch, loader.epoch) == ([0, 1, 2, 3], 5, 5)
    """)


def test_an_exception_of_a_signal_handler_in_next_ends_the_iterator(succeed):
    succeed("""
        class Late(Exception): pass
        def late(*_): raise Late
        signal.signal(signal.SIGALRM, late)
        loader = number_loader(hang_from_8)
        iterator = iter(loader)
        next(iterator)
        wait_for_the_hang()
        when_waiting_for_workers(lambda: True, lambda: signal.setitimer(signal.ITIMER_REAL, 0.1))
        try:
            for batch in iterator: pass
            raise AssertionError
        except Late:
            pass
        try:
            next(iterator)
            raise AssertionError
        except RuntimeError as error:
            assert "it was interrupted by Late, and a batch may be lost" in str(error), error
    """)


def test_ctrl_c_while_workers_start_leaves_no_process_behind(succeed):
    succeed("""
        import gpuload.loader.session
        def interrupting(function):
            def interrupted(*args, **options):
                result = function(*args, **options)
                if not armed:
                    armed.append(True)
                    ctrl_c()
                return result
            return interrupted
        before = held_resources()
        for module, name in ((process, "_launch"), (process.Template, "__init__"), (gpuload.loader.session, "Feed")):
            original, armed = getattr(module, name), []
            setattr(module, name, interrupting(original))
            loader = number_loader()
            try:
                iter(loader)
                raise AssertionError
            except KeyboardInterrupt:
                pass
            assert torch.cat(list(loader)).tolist() == list(range(40))
            loader.close()
            assert held_resources() == before, (name, held_resources())
            setattr(module, name, original)

        def die_once(index):
            if index == 17 and not os.path.exists(f"{tmp}/once"):
                open(f"{tmp}/once", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        loader = number_loader(die_once)
        iterator = iter(loader)
        process.Template.fork, armed = interrupting(process.Template.fork), [True]
        next(iterator)
        armed.clear()  # of the worker that takes the place of the dead one
        try:
            for batch in iterator: pass
            raise AssertionError
        except KeyboardInterrupt:
            pass
        assert torch.cat(list(loader)).tolist() == list(range(40))
        loader.close()
        del iterator
        assert held_resources() == before, held_resources()
    """)


def test_ctrl_c_during_close_is_raised_after_the_cleanup(succeed):
    succeed("""
        end = process.Template.end
        def interrupted(self, deadline):
            ctrl_c()
            end(self, deadline)
            ctrl_c()
        process.Template.end = interrupted
        before = held_resources()
        def close():
            loader = number_loader()
            iter(loader)
            loader.close()
        def leave():
            with number_loader() as loader:
                iter(loader)
        def anew():
            loader = number_loader()
            iterator = iter(loader)
            loader._session.steps.broken_by = "a test"
            iter(loader)
        for way in (close, leave, anew):
            try:
                way()
                raise AssertionError(way)
            except KeyboardInterrupt:
                pass
            assert held_resources() == before, (way, held_resources())
        def leave_interrupted():
            with number_loader() as loader:
                for batch in loader:
                    ctrl_c()
        try:
            leave_interrupted()
            raise AssertionError
        except KeyboardInterrupt as error:
            assert error.__context__ is None  # the first; those that came in close() would say the same
        assert held_resources() == before
    """)


def test_ctrl_c_in_a_finalizer_is_printed_after_the_cleanup(start):
    program = start("""
        end = process.Template.end
        def interrupted(self, deadline):
            ctrl_c()
            end(self, deadline)
        process.Template.end = interrupted
        before = held_resources()
        def collect():
            loader = number_loader()
            iter(loader)
        def drop():
            loader = number_loader()
            iterator = iter(loader)
            loader._session.steps.broken_by = "a test"
            del iterator
            assert workers() == []
        for way in (collect, drop):
            way()
            assert held_resources() == before, (way, held_resources())
    """)
    exit_code, error = program.end()
    assert exit_code == 0, error
    assert error.count("Exception ignored in") == error.count("\nKeyboardInterrupt") == 2, error


@pytest.mark.parametrize("then", ["sys.exit(0)", "pass"])
def test_a_signal_handler_can_close_the_loader_during_next(succeed, then):
    succeed(f"""
        def close(*_):
            loader.close()
            {then}
        signal.signal(signal.SIGTERM, close)
        loader = number_loader(hang_from_8)
        def kill():
            wait_for_the_hang()
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=kill).start()
        try:
            for batch in loader: pass
        except RuntimeError as error:
            assert str(error).startswith("this iterator has ended: its Loader was closed")
        except SystemExit:
            pass
        else:
            raise AssertionError
        assert workers() == []
    """)


def test_interrupts_at_random_moments_lose_no_sample_of_later_epochs(start):
    program = start("""
        loader = jpeg_loader(folder)
        reference = jpeg_loader(folder, num_workers=0)
        list(reference)
        list(loader)
        began = time.monotonic()
        list(loader)
        duration = time.monotonic() - began
        before = held_resources()
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        moments = random.Random(0)
        times = broken = 0
        while times < 20 or broken < 10:
            times += 1
            began = time.monotonic()
            try:
                # Often within an epoch, sometimes while the next session starts.
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0001, 1.2 * duration))
                seen = list(loader)
                signal.setitimer(signal.ITIMER_REAL, 0)
                duration = min(duration, time.monotonic() - began)  # the first may have been slow
            except KeyboardInterrupt:
                broken += 1
            else:
                reference.set_epoch(loader.epoch)
                assert equal_epochs(seen, reference)
        signal.setitimer(signal.ITIMER_REAL, 0)
        seen = list(loader)
        reference.set_epoch(loader.epoch)
        assert equal_epochs(seen, reference)
        assert held_resources() == before, (held_resources(), before)
    """)
    exit_code, error = program.end()
    # Python itself looks for signals when it enters a `__del__`, and then only shows what the handler raised.
    assert IN_EPOCH_DEL.sub("", error) == "", error
    assert exit_code == 0
