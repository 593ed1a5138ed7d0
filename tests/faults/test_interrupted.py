"""Interrupts that the program survives, as a notebook does: they end the iterator, and later epochs are complete."""

from __future__ import annotations

import re

import pytest

IN_EPOCH_DEL = re.compile(r"Exception ignored in: <function Epoch.__del__ .*\n(.*\n)*?KeyboardInterrupt: \n")


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_in_next_ends_the_iterator_and_the_next_epoch_is_complete(run_without_errors, workers):
    run_without_errors(f"""
        def interrupt(index):
            if index == 11 and happens_first("interrupt"):
                if {workers}:
                    wait_until(lambda: os.path.exists(f"{{tmp}}/waits"), "the main process waits")
                ctrl_c()
                time.sleep(0.2 if {workers} else 1)  # the main process waits for this sample
        loader = number_loader(interrupt, num_workers={workers})
        iterator = iter(loader)
        seen = []
        call_when_waiting_for_workers(lambda: len(seen) == 8, lambda: open(f"{{tmp}}/waits", "w").close())
        try:
            while True:
                seen += next(iterator).tolist()
        except KeyboardInterrupt:
            pass
        assert seen == list(range(len(seen))) and len(seen) in (0, 4, 8), seen
        text = (
            "this iterator has ended: it was interrupted by KeyboardInterrupt, and a batch may be lost. "
            "Begin a new epoch with iter()"
        )
        for _ in range(2):
            with pytest.raises(RuntimeError, match=re.escape(text)):
                next(iterator)
        assert loader.epoch == 0
        expected = held_resources()
        check_epoch(loader)
        assert loader.epoch == (1 if seen else 0)  # an epoch without a batch does not count
        assert held_resources() == expected
        del iterator
        assert held_resources() == expected
        check_epoch(loader)
    """)


def test_after_ctrl_c_in_iter_the_next_iter_begins_the_same_epoch(run_without_errors):
    run_without_errors("""
        class Slow(Numbers):
            def __getstate__(self):  # called by iter() in the main process
                if happens_first("interrupt"):
                    ctrl_c()
                    hang()
                return self.__dict__
        before = held_resources()
        loader = gl.Loader(Slow(), 4, num_workers=2, device="cpu", info=True)
        loader.set_epoch(5)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        assert held_resources() == before, (held_resources(), before)
        batch, info = next(iter(loader))
        assert (batch.tolist(), info.epoch, loader.epoch) == ([0, 1, 2, 3], 5, 5)
    """)


def test_an_exception_of_a_signal_handler_in_next_ends_the_iterator(run_without_errors):
    run_without_errors("""
        class Late(Exception): pass
        def late(*_): raise Late
        signal.signal(signal.SIGALRM, late)
        loader = number_loader(hang_from_8)
        iterator = iter(loader)
        next(iterator)
        wait_for_the_hang()
        call_when_waiting_for_workers(lambda: True, lambda: signal.setitimer(signal.ITIMER_REAL, 0.1))
        with pytest.raises(Late):
            for batch in iterator: pass
        with pytest.raises(RuntimeError, match="it was interrupted by Late, and a batch may be lost"):
            next(iterator)
    """)


def test_ctrl_c_while_workers_start_leaves_no_process_behind(run_without_errors):
    run_without_errors("""
        import gpuload.loader.session
        def interrupting(function):
            def interrupted(*args, **options):
                result = function(*args, **options)
                if not fired:
                    fired.append(True)
                    ctrl_c()
                return result
            return interrupted
        before = held_resources()
        for module, name in ((process, "_launch"), (process.Template, "__init__"), (gpuload.loader.session, "Feed")):
            original, fired = getattr(module, name), []
            setattr(module, name, interrupting(original))
            loader = number_loader()
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
            check_epoch(loader)
            loader.close()
            assert held_resources() == before, (name, held_resources())
            setattr(module, name, original)

        loader = number_loader(die_once_at(17))
        iterator = iter(loader)
        process.Template.fork, fired = interrupting(process.Template.fork), [True]
        next(iterator)
        fired.clear()  # interrupt the fork of the replacing worker
        with pytest.raises(KeyboardInterrupt):
            for batch in iterator: pass
        check_epoch(loader)
        loader.close()
        del iterator
        assert held_resources() == before, held_resources()
    """)


def test_ctrl_c_during_close_is_raised_after_the_cleanup(run_without_errors):
    run_without_errors("""
        end = process.Template.end
        def end_amid_interrupts(self, deadline):
            ctrl_c()
            end(self, deadline)
            ctrl_c()
        process.Template.end = end_amid_interrupts
        before = held_resources()
        def close():
            loader = number_loader()
            iter(loader)
            loader.close()
        def leave():
            with number_loader() as loader:
                iter(loader)
        def start_again():
            loader = number_loader()
            iterator = iter(loader)
            loader._session.steps.broken_by = "a test"
            iter(loader)
        for action in (close, leave, start_again):
            with pytest.raises(KeyboardInterrupt):
                action()
            assert held_resources() == before, (action, held_resources())
        def leave_interrupted():
            with number_loader() as loader:
                for batch in loader:
                    ctrl_c()
        with pytest.raises(KeyboardInterrupt) as caught:
            leave_interrupted()
        assert caught.value.__context__ is None  # the first interrupt hides those that arrive in close()
        del caught
        assert held_resources() == before
    """)


def test_ctrl_c_in_a_finalizer_is_printed_after_the_cleanup(start_program):
    program = start_program("""
        end = process.Template.end
        def interrupt_and_end(self, deadline):
            ctrl_c()
            end(self, deadline)
        process.Template.end = interrupt_and_end
        before = held_resources()
        def collect():
            loader = number_loader()
            iter(loader)
        def drop():
            loader = number_loader()
            iterator = iter(loader)
            loader._session.steps.broken_by = "a test"
            del iterator
            assert worker_pids() == []
        for action in (collect, drop):
            action()
            assert held_resources() == before, (action, held_resources())
    """)
    exit_code, error = program.end()
    assert exit_code == 0, error
    assert error.count("Exception ignored in") == error.count("\nKeyboardInterrupt") == 2, error


@pytest.mark.parametrize("then", ["sys.exit(0)", "pass"])
def test_a_signal_handler_can_close_the_loader_during_next(run_without_errors, then):
    run_without_errors(f"""
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
            raise AssertionError("the closed loader finished its epoch")
        assert worker_pids() == []
    """)


def test_interrupts_at_random_moments_lose_no_sample_of_later_epochs(start_program):
    program = start_program("""
        loader = jpeg_loader(folder)
        reference = jpeg_loader(folder, num_workers=0)
        list(reference)
        list(loader)
        began = time.monotonic()
        list(loader)
        duration = time.monotonic() - began
        before = held_resources()
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        generator = random.Random(0)
        attempts = interrupted_count = 0
        while attempts < 20 or interrupted_count < 10:
            attempts += 1
            began = time.monotonic()
            try:
                # Often within an epoch, sometimes while the next session starts.
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0001, 1.2 * duration))
                seen = list(loader)
                signal.setitimer(signal.ITIMER_REAL, 0)
                duration = min(duration, time.monotonic() - began)  # the first epoch may have been slow
            except KeyboardInterrupt:
                interrupted_count += 1
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
    # Python checks for signals when it enters a `__del__`, and then only prints what the handler raises.
    assert IN_EPOCH_DEL.sub("", error) == "", error
    assert exit_code == 0


def test_ctrl_c_while_the_job_is_written_leaves_no_descriptor(run_without_errors):
    run_without_errors("""
        from gpuload.workers import shipping

        write_job = shipping.write_job

        def write_and_interrupt(*arguments):
            descriptor = write_job(*arguments)
            signal.raise_signal(signal.SIGINT)
            return descriptor

        loader = number_loader()
        shipping.write_job = write_and_interrupt
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        shipping.write_job = write_job
        check_epoch(loader)
        loader.close()
        kinds, *_ = held_resources()
        assert not [kind for kind in kinds if "gpuload-job" in kind], kinds
    """)
