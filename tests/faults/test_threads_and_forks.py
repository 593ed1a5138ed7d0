"""Loaders in threads, in forked children, and in programs that reap all child processes."""

from __future__ import annotations

import pytest

# -- threads ----------------------------------------------------------------------------------------------------------


def test_a_loader_works_in_any_thread_wherever_it_was_created(run_without_errors):
    run_without_errors("""
        before = held_resources()
        results = []
        def run_in_thread(function):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        def load(loader):
            results.append(torch.cat(list(loader)).tolist() == list(range(40)))

        run_in_thread(lambda: load(number_loader()))
        assert held_resources() == before, (held_resources(), before)

        loader = number_loader()
        run_in_thread(lambda: load(loader))
        load(loader)  # the workers outlive the thread that started them
        run_in_thread(lambda: next(iter(loader)))
        load(loader)

        iterators = []
        run_in_thread(lambda: iterators.append(iter(loader)))
        check_epoch(iterators[0])
        iterators.clear()
        run_in_thread(loader.close)
        assert held_resources() == before, held_resources()

        loader = number_loader()
        iterator = iter(loader)
        next(iterator)
        names = [loader, iterator]
        del loader, iterator
        run_in_thread(names.clear)  # the loader is collected in another thread
        assert held_resources() == before, (held_resources(), before)
        assert results == [True] * 4, results
    """)


def test_threads_that_share_an_iterator_get_each_batch_once(run_without_errors):
    run_without_errors("""
        loader = number_loader(length=400)
        for _ in range(3):
            iterator, numbers_by_thread = iter(loader), [[] for _ in range(4)]
            def consume(numbers):
                for batch in iterator:
                    numbers.extend(batch.tolist())
            threads = [threading.Thread(target=consume, args=(numbers,)) for numbers in numbers_by_thread]
            for thread in threads: thread.start()
            for thread in threads: thread.join(LIMIT_S)
            assert sorted(sum(numbers_by_thread, [])) == list(range(400))
    """)


@pytest.mark.parametrize("workers", [0, 2])
def test_close_ends_next_in_another_thread_with_a_runtime_error(run_without_errors, workers):
    run_without_errors(f"""
        def slow(index):
            while index >= 8:
                open(f"{{tmp}}/hangs", "w").close()
                time.sleep(0.01)
                if {workers} == 0 and os.path.exists(f"{{tmp}}/go"):
                    break
        before = held_resources()
        loader = number_loader(slow, num_workers={workers})
        errors, seen = [], []
        def consume():
            try:
                for batch in loader:
                    seen.append(batch)
            except RuntimeError as error:
                errors.append(str(error))
        thread = threading.Thread(target=consume)
        waits_for_workers = threading.Event()
        call_when_waiting_for_workers(lambda: len(seen) == 2, waits_for_workers.set)
        thread.start()
        wait_for_the_hang()
        wait_until(lambda: len(seen) == 2, "the thread has both batches before the sample that hangs")
        if {workers} == 0:  # next() loads the sample that hangs, which must end after close() was called
            steps = loader._session.steps
            def go():
                wait_until(lambda: steps.closed, "close() has begun")
                open(f"{{tmp}}/go", "w").close()
            threading.Thread(target=go).start()
        else:
            assert waits_for_workers.wait(LIMIT_S)
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 60  # close() does not wait for the sample
        thread.join(LIMIT_S)
        del thread
        assert errors == ["this iterator has ended: its Loader was closed meanwhile"], errors
        wait_until(lambda: held_resources() == before, "the resources of the loader are released")
    """)


# The function of the dataset, and what the main thread does before the program ends.
DAEMONS = {
    "in next()": ("hang_from_8", "wait_for_the_hang()"),
    "in the loop body": ("int", "assert in_loop_body.wait(LIMIT_S)"),
    "after 50 ms, wherever it is": ("int", "time.sleep(0.05)"),
}


@pytest.mark.parametrize("where", DAEMONS)
def test_a_daemon_thread_that_iterates_while_the_program_ends_prints_nothing(run_without_errors, where):
    function, wait = DAEMONS[where]
    run_without_errors(f"""
        in_loop_body = threading.Event()
        def consume():
            loader = number_loader({function}, length=1000)
            while True:
                for batch in loader:
                    in_loop_body.set()
                    time.sleep(0.01 if {where == "in the loop body"} else 0)
        threading.Thread(target=consume, daemon=True).start()
        {wait}
    """)


def test_workers_that_a_thread_starts_ignore_a_ctrl_c(run_without_errors):
    run_without_errors("""
        original_launch = process._launch
        def launch(name, descriptors):
            child = original_launch(name, descriptors)
            os.kill(child.pid, signal.SIGINT)
            return child
        process._launch = launch
        results = []
        thread = threading.Thread(target=lambda: results.append(torch.cat(list(number_loader())).tolist()))
        thread.start()
        thread.join(LIMIT_S)
        assert results == [list(range(40))], results
    """)


# -- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_cannot_use_its_parents_loader_but_can_create_its_own(run_without_errors, end):
    run_without_errors(f"""
        loader, reference = jpeg_loader(folder), list(jpeg_loader(folder, num_workers=0))
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(3)]
        pids = worker_pids()
        child = os.fork()
        if child == 0:
            text = "(?s)belong to the process that this one was forked from.*create a new Loader in the child$"
            for use in (lambda: next(iterator), lambda: iter(loader)):
                with pytest.raises(RuntimeError, match=text):
                    use()
            # One mapping is that for the decoder's messages; none belongs to the parent's Loader.
            assert held_resources()[2] <= 1, held_resources()
            child_loader = jpeg_loader(folder)
            assert equal_epochs(child_loader, reference)
            assert len(worker_pids()) == 2
            child_loader.close()
            open_iterator = iter(jpeg_loader(folder))  # ends with the child
            next(open_iterator)
            {end}
        _, status = os.waitpid(child, 0)
        assert status == 0, "the child failed: its error is printed above"
        assert sorted(worker_pids()) == sorted(pids)
        assert equal_epochs(seen + list(iterator), reference)
        assert sorted(worker_pids()) == sorted(pids)
    """)


# -- child processes --------------------------------------------------------------------------------------------------

REAPERS = {
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "a handler that reaps every child": """def reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]: pass
signal.signal(signal.SIGCHLD, reap)""",
}


@pytest.mark.parametrize("how", REAPERS)
def test_dead_workers_are_replaced_where_their_exit_status_is_lost(run_without_errors, how):
    run_without_errors(f"""
        exec({REAPERS[how]!r})
        before = held_resources()
        loader = number_loader(die_once_at(17))
        check_epoch(loader)
        assert not happens_first("17"), "no worker has died"
        assert len(worker_pids()) == 2
        loader.close()
        assert held_resources() == before, (held_resources(), before)
    """)
