"""Loaders and iterators that are garbage collected, used in parallel, nested or closed."""

from __future__ import annotations

# -- closed or collected ----------------------------------------------------------------------------------------------

# Code that drops or closes a `loader`, by its situation.
COLLECTED = {
    "not started": "del loader",
    "closed twice, not collected": "check_epoch(loader); loader.close(); loader.close()",
    "after a break": "for batch in loader: break\ndel batch, loader",
    "with an open iterator": "iterator = iter(loader); next(iterator)\ndel loader, iterator",
    "its iterator first": "iterator = iter(loader); next(iterator)\ndel iterator\ndel loader",
    "in a cycle": "loader.me = loader; next(iter(loader))\ndel loader",
    "in a cycle with its iterator": "loader.iterator = iter(loader); next(loader.iterator)\ndel loader",
    "in a cycle in mid-batch": "node = [iter(loader)]; node.append(node); next(node[0])\ndel loader, node",
    "in a generator that was left": """def batches():
    for batch in number_loader():
        yield batch
        return
list(batches())
del loader""",
    "in a generator that is closed": """def batches():
    yield from number_loader()
generator = batches(); next(generator)
generator.close()
del loader, generator""",
    "interrupted": """def interrupt(index):
    if index == 8: raise KeyboardInterrupt
in_process = number_loader(interrupt, num_workers=0)
with contextlib.suppress(KeyboardInterrupt):
    for batch in in_process: pass
iterator = iter(loader); next(iterator)
del in_process, loader, iterator, batch""",
    "with a copy that lives on": """import copy
next(iter(loader))
other = copy.copy(loader)
del loader; gc.collect(); assert held_resources()[1] == 0
check_epoch(other)
other.close()""",
}


def test_a_closed_or_garbage_collected_loader_leaves_no_process_descriptor_or_mapping(run_without_errors):
    run_without_errors(f"""
        before = held_resources()  # one program runs all cases, so that a late leak shows in the next case
        for how, code in {COLLECTED!r}.items():
            names = dict(globals(), loader=number_loader())
            exec(code, names)
            after = held_resources()
            assert after == before, (how, after, before)
            names.clear()
    """)


def test_after_a_break_the_workers_stop_at_the_next_sample(run_without_errors):
    run_without_errors("""
        def slow(index):
            open(f"{tmp}/{index}", "w").close()
            while index == 8 and not os.path.exists(f"{tmp}/go"):
                time.sleep(0.002)
        loader = number_loader(slow, num_workers=1, chunk_size=4)
        for batch in loader:
            wait_until(lambda: os.path.exists(f"{tmp}/8"), "the worker loads sample 8")
            break
        open(f"{tmp}/go", "w").close()
        feed = loader._session.feed
        wait_until(lambda: feed.pump(0.1) or feed.is_idle(), "the worker is idle")
        assert not os.path.exists(f"{tmp}/9")
    """)


# -- several loaders or iterators -------------------------------------------------------------------------------------


def test_two_interleaved_loaders_return_the_same_batches_as_each_alone(run_without_errors):
    run_without_errors("""
        expected = [list(jpeg_loader(folder, num_workers=0, seed=seed)) for seed in (0, 1)]
        before = held_resources()
        first, second = zip(*zip(jpeg_loader(folder, seed=0), jpeg_loader(folder, seed=1)))
        assert equal_epochs(first, expected[0])
        assert equal_epochs(second, expected[1])
        assert held_resources() == before
    """)


def test_an_epoch_of_a_second_loader_inside_the_loop_changes_no_batch(run_without_errors):
    run_without_errors("""
        train, check = jpeg_loader(folder, seed=0), jpeg_loader(folder, seed=1, shuffle=False)
        expected = list(jpeg_loader(folder, seed=0, num_workers=0))
        expected_check = list(jpeg_loader(folder, seed=1, shuffle=False, num_workers=0))
        seen = []
        for step, batch in enumerate(train):
            seen.append(batch)
            if step in (2, 7):
                check.set_epoch(0)
                assert equal_epochs(check, expected_check)
        assert equal_epochs(seen, expected)
    """)


def test_an_epoch_of_the_same_loader_inside_the_loop_ends_the_outer_iterator(run_without_errors):
    run_without_errors("""
        loader = number_loader()
        outer = iter(loader)
        next(outer)
        check_epoch(loader)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="^this iterator has ended: a newer iter.. of its Loader"):
                next(outer)
        del outer  # does not disturb the newer iterator
        newer = iter(loader)
        older, newer = newer, iter(loader)
        loader._session.drop_epoch(older._token)  # as a late garbage collection in another thread does
        del older
        gc.collect()
        check_epoch(newer)
    """)


def test_close_ends_an_open_iterator_and_the_loader_starts_again(run_without_errors):
    run_without_errors("""
        loader = number_loader()
        iterator = iter(loader)
        next(iterator)
        before = len(worker_pids())
        loader.close()
        assert worker_pids() == []
        with pytest.raises(RuntimeError, match="^this iterator has ended: its Loader was closed$"):
            next(iterator)
        del iterator
        check_epoch(loader)
        assert len(worker_pids()) == before == 2
    """)


def test_close_ends_all_workers_although_one_does_not_end_and_one_raises(run_without_errors):
    run_without_errors("""
        before = held_resources()
        loader = number_loader(num_workers=3)
        list(loader)
        stuck, failing, normal = loader._session.engine._team.values()
        wait = stuck._process.wait
        def time_out(timeout=None):
            assert timeout is not None  # close() must not wait without a limit
            raise process.subprocess.TimeoutExpired("worker", timeout)
        stuck._process.wait = time_out
        end = failing.end
        def end_and_fail(deadline):
            end(deadline)
            raise OSError("something else")
        failing.end = end_and_fail
        with pytest.raises(OSError, match="^something else$"):
            loader.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(stuck.pid, 0)
        stuck = failing = normal = wait = end = None
        assert held_resources() == before
    """)
