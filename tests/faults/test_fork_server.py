"""The fork server, from which the templates of all sessions are forked: what it imports, and when it ends."""

from __future__ import annotations

import textwrap

import pytest

# Modules that record which processes import them, and a dataset that imports some of them.
SETUP = """
    import importlib
    def write_module(name, code="", folder="site-packages"):
        path = Path(tmp) / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        note = f"import os\\nwith open({tmp!r} + '/{name}.imports', 'a') as file: print(os.getpid(), file=file)\\n"
        path.write_text(f"{note}{code}\\n")
        sys.path[:] = [entry for entry in sys.path if entry != str(path.parent)]
        sys.path.insert(0, str(path.parent))
    def importer_pids(name):
        path = Path(f"{tmp}/{name}.imports")
        pids = [int(line) for line in path.read_text().split()] if path.exists() else []
        return [pid for pid in pids if pid != os.getpid()]
    def make_dataset(*libraries, code="return index", module="own"):
        write_module(module, f"import {', '.join(('os', *libraries))}\\n"
            "class Data:\\n"
            "    def __len__(self): return 40\\n"
            f"    def __getitem__(self, index): {code}", folder="own")
        importlib.invalidate_caches()
        return importlib.import_module(module).Data()
    def make_loader(data, **options):
        return gl.Loader(data, 4, num_workers=2, chunk_size=2, device="cpu", **options)
    logged = record_worker_log()
"""


@pytest.fixture
def run_with_setup(run_without_errors):
    return lambda code: run_without_errors(textwrap.dedent(SETUP) + textwrap.dedent(code))


def test_several_loaders_import_their_libraries_once(run_with_setup):
    run_with_setup("""
        write_module("library")
        data = make_dataset("library")
        before = held_resources()
        loaders = [make_loader(data) for _ in range(3)]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            check_epoch(iterator)
        assert importer_pids("library") == server_pids(), importer_pids("library")
        assert sorted(importer_pids("own")) == sorted(template_pids()) and len(template_pids()) == 3
        for loader in loaders:
            loader.close()
        assert template_pids() == []
        assert len(server_pids()) == 1
        assert held_resources() == before
    """)


def test_objects_of_libraries_are_frozen_in_templates(run_with_setup):
    """If a garbage collection in a template traversed them, it would write to the pages that templates share."""
    run_with_setup("""
        write_module("library", "value = [[]]")
        write_module("own", "import gc, library\\n"
            "class Data:\\n"
            "    def __len__(self): return 40\\n"
            "    def __getstate__(self): return {}\\n"
            "    def __setstate__(self, state):\\n"
            "        self.is_tracked = any(entry is library.value for entry in gc.get_objects())\\n"
            "    def __getitem__(self, index): return self.is_tracked", folder="own")
        importlib.invalidate_caches()
        import own
        loader = make_loader(own.Data())
        assert not torch.cat(list(loader)).any()
        assert importer_pids("library") == server_pids()
        loader.close()
    """)


def test_the_fork_server_imports_libraries_when_a_loader_is_created(run_with_setup):
    run_with_setup("""
        write_module("library")
        write_module("second")
        loader_without_library = make_loader(make_dataset(module="plain"))
        assert server_pids() == []
        make_loader(make_dataset("library"))
        wait_until(lambda: importer_pids("library") == server_pids() != [], "the library is imported")
        make_loader(make_dataset("library", "second", module="other"))
        wait_until(lambda: importer_pids("second") == server_pids(), "the same process imports the second library")
        assert importer_pids("own") == importer_pids("other") == template_pids() == []  # no modules of the user
        check_epoch(loader_without_library)
        assert len(server_pids()) == 1
        loader_without_library.close()
    """)


@pytest.mark.parametrize(("code", "reason"), [
    ("import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "threads"),
    ("held = os.pipe()", "an open pipe"),
    ("import helper", "it imports helper"),
    ("import pathlib; 'server' in pathlib.Path('/proc/self/cmdline').read_text() and os._exit(3)", "status 3"),
])  # fmt: skip
def test_the_fork_server_does_not_import_a_library_that_would_prevent_forking(run_with_setup, code, reason):
    run_with_setup(
        f"code, reason = {code!r}, {reason!r}"
        + """
write_module("helper", folder="own")
write_module("good")
write_module("odd", f"if os.getpid() != {os.getpid()}: {code}")
loader = make_loader(make_dataset("odd", "good"))
good_loader = make_loader(make_dataset("good", module="other"))
check_epoch(good_loader)
[text] = [text for text in logged if "the fork server does not import odd: " in text]
assert reason in text, text
assert importer_pids("good")[-1:] == server_pids(), (importer_pids("good"), server_pids())
check_epoch(good_loader)
good_loader.close()
check_epoch(loader)
loader.close()
"""
    )


def test_a_changed_environment_starts_a_new_server_and_open_sessions_continue(run_with_setup):
    run_with_setup("""
        write_module("library")
        data = make_dataset("library", code="return int(os.environ.get('CHANGED', 0))")
        old_loader = make_loader(data, persistent_workers=True)
        assert torch.cat(list(old_loader)).tolist() == 40 * [0]
        [old_server] = server_pids()
        os.environ["CHANGED"] = "1"
        new_loader = make_loader(data)
        assert torch.cat(list(new_loader)).tolist() == 40 * [1]
        [new_server] = set(server_pids()) - {old_server}
        assert importer_pids("library") == [old_server, new_server]
        [template] = child_pids(old_server)
        assert torch.cat(list(old_loader)).tolist() == 40 * [0]
        assert child_pids(old_server) == [template]
        old_loader.close()
        wait_until(lambda: is_dead(old_server), "the server without a session has exited")
        assert torch.cat(list(new_loader)).tolist() == 40 * [1]
        new_loader.close()
        make_loader(data)
        assert server_pids() == [new_server]
    """)


def test_sessions_continue_after_their_fork_server_was_killed(run_with_setup):
    run_with_setup("""
        logging.disable()
        write_module("library")
        data = make_dataset("library")
        loader = make_loader(data, persistent_workers=True)
        check_epoch(loader)
        [server], [template] = server_pids(), template_pids()
        pids = loader._session.engine.pids
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: is_dead(server), "the server is dead")
        check_epoch(loader)
        assert loader._session.engine.pids == pids
        assert loader._session.engine.deaths.causes == []
        other = make_loader(data)
        check_epoch(other)
        assert len(importer_pids("library")) == 2
        os.kill(template, signal.SIGKILL)  # the next template is forked from the new server
        check_epoch(loader)
        wait_until(lambda: loader._session.engine.collect_events(0.0) or len(template_pids()) == 2, "two templates run")
        loader.close()
        other.close()
        assert held_resources()[1] == 0
    """)


def test_a_fork_server_that_is_killed_while_it_imports_is_replaced(run_with_setup):
    run_with_setup("""
        logging.disable()
        write_module("library", "import time; time.sleep(0.5)")
        data = make_dataset("library")
        before = held_resources()
        loader = make_loader(data)
        batches = iter(loader)
        wait_until(server_pids, "the fork server has its command line")
        [server] = server_pids()
        wait_until(lambda: importer_pids("library") == [server], "the fork server imports the library")
        os.kill(server, signal.SIGKILL)
        check_epoch(batches)
        assert importer_pids("library") == [server, *server_pids()]
        assert loader._session.engine.deaths.causes == ["killed by SIGKILL"]
        loader.close()
        assert held_resources() == before
    """)


def test_a_stopped_fork_server_is_replaced(run_with_setup):
    run_with_setup("""
        logging.disable()
        data = make_dataset()
        loader = make_loader(data, timeout=0.5)
        check_epoch(loader)
        loader.close()
        [server] = server_pids()
        os.kill(server, signal.SIGSTOP)
        loader = make_loader(data, timeout=0.5)
        check_epoch(loader)
        assert server not in server_pids()
        assert loader._session.engine.deaths.causes == ["killed by SIGKILL"]
        loader.close()
    """)


def test_the_fork_server_ends_after_its_idle_limit_without_a_session(run_with_setup):
    run_with_setup("""
        fork_server.IDLE_LIMIT_S = 0.3
        data = make_dataset()
        loader = make_loader(data, persistent_workers=True)
        check_epoch(loader)
        [server] = server_pids()
        time.sleep(1)  # longer than the limit, but with a session
        check_epoch(loader)
        assert server_pids() == [server]
        loader.close()
        wait_until(lambda: is_dead(server), "the server has exited")
        with make_loader(data) as other:
            check_epoch(other)
            assert len(server_pids()) == 1 and server_pids() != [server]
    """)


def test_a_forked_child_of_the_program_starts_its_own_fork_server(run_with_setup):
    run_with_setup("""
        data = make_dataset()
        loader = make_loader(data, persistent_workers=True)
        check_epoch(loader)
        parent_servers = server_pids()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert fork_server._server is None and server_pids() == []
                other = make_loader(data)
                check_epoch(other)
                assert len(server_pids()) == 1 and server_pids() != parent_servers
                other.close()
                fork_server.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0) == (pid, 0)
        check_epoch(loader)
        assert server_pids() == parent_servers
        loader.close()
        check_epoch(make_loader(data))
        assert server_pids() == parent_servers
    """)


def test_more_descriptors_than_a_message_holds_keep_their_numbers(run_with_setup):
    run_with_setup("""
        import torch.multiprocessing
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        class Shared:
            def __init__(self):
                self.tensors = [torch.full((4,), float(i)).share_memory_() for i in range(600)]
            def __len__(self): return len(self.tensors)
            def __getitem__(self, index): return self.tensors[index]
        data = Shared()
        before = held_resources()
        with gl.Loader(data, 4, num_workers=2, device="cpu") as loader:
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(600))
            assert len(child_pids(server_pids()[0])) == 1  # the template was forked
        assert held_resources() == before
    """)


def test_the_template_is_a_separate_interpreter_if_the_fork_server_has_a_different_module(run_with_setup):
    run_with_setup("""
        write_module("dependency", "value = 1", folder="old")
        import dependency
        write_module("dependency", "value = 2", folder="site-packages")
        write_module("library", "import dependency")
        data = make_dataset("library", code="return self.value")
        data.value = dependency.value
        del sys.modules["dependency"]
        import dependency
        sys.modules["dependency"].__file__ = str(Path(tmp) / "old" / "dependency.py")
        with make_loader(data) as loader:
            assert torch.cat(list(loader)).tolist() == 40 * [1]
            assert pids_started_as("template") == template_pids() and len(template_pids()) == 1
        expected = (
            "the template is a separate interpreter, since it cannot be forked from the fork server: "
            "it has imported another dependency"
        )
        assert expected in logged, logged
    """)


def test_the_template_is_a_separate_interpreter_if_a_library_took_its_descriptors(run_with_setup):
    run_with_setup("""
        code = f"if os.getpid() != {os.getpid()}:\\n"
        code += "    for number in range(3, 100):\\n"
        code += "        try: os.fstat(number)\\n"
        code += "        except OSError: os.dup2(os.open('/dev/null', os.O_RDONLY), number)\\n"
        write_module("library", code)
        with make_loader(make_dataset("library")) as loader:
            check_epoch(loader)
            assert pids_started_as("template") == template_pids() and len(template_pids()) == 1
        expected = "the template is a separate interpreter, since it cannot be forked from the fork server: a library"
        assert expected in " ".join(logged)
    """)


def test_warnings_that_the_program_ignores_are_not_printed_when_a_library_is_imported(run_with_setup):
    run_with_setup("""
        write_module("library", "import warnings; warnings.warn('this library is old', FutureWarning)")
        warnings.filterwarnings("ignore", "this library is old")
        with make_loader(make_dataset("library")) as loader:
            check_epoch(loader)
        assert len(importer_pids("library")) == 1
    """)


def test_workers_of_an_iterable_dataset_share_torch(run_with_setup):
    run_with_setup("""
        class Stream:
            def __iter__(self):
                info = gl.get_worker_info()
                return iter(range(info.id, 40, info.num_workers))
        with make_loader(Stream()) as loader:
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))
            pids = [*server_pids(), *template_pids()]
            assert {"libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids} == {True}, pids
    """)


def test_atexit_functions_of_a_library_run_in_the_fork_server_alone(run_with_setup):
    run_with_setup("""
        code = f"import atexit\\natexit.register(lambda: open(f'{tmp}/ended-{{os.getpid()}}', 'w').close())"
        write_module("library", code)
        data = make_dataset("library")
        for _ in range(2):
            with make_loader(data) as loader:
                check_epoch(loader)
        [server] = server_pids()
        exit_files = lambda: sorted(path.name for path in Path(tmp).glob("ended-*"))
        assert exit_files() == []
        fork_server.close()
        assert exit_files() == [f"ended-{server}"]
    """)


def test_unseeded_random_numbers_differ_between_sessions(run_with_setup):
    run_with_setup("""
        write_module("library", "import numpy.random")
        import library
        class Drawing(Numbers):
            def __setstate__(self, state):
                vars(self).update(state)
                self.numbers = np.random.rand(), random.random()
            def __getitem__(self, index): return library and np.array(self.numbers)
        draws = []
        for _ in range(2):
            with make_loader(Drawing()) as loader:
                batch = next(iter(loader))
                draws.append(batch[0].tolist())
        assert len(server_pids()) == 1
        for first_draw, second_draw in zip(*draws, strict=True):
            assert first_draw != second_draw, draws
    """)


def test_no_fork_server_starts_in_a_worker_or_while_a_spawned_process_starts(run_with_setup):
    run_with_setup("""
        import multiprocessing
        from gpuload.datasets.worker import THIS_PROCESS
        write_module("library")
        data = make_dataset("library")
        for owner, name in ((THIS_PROCESS, "is_worker"), (multiprocessing.current_process(), "_inheriting")):
            setattr(owner, name, True)
            with make_loader(data) as loader:
                assert server_pids() == []
                check_epoch(loader)
                assert server_pids() == [] and len(pids_started_as("template")) == 1
            setattr(owner, name, False)
        with make_loader(data):
            wait_until(server_pids, "the fork server has its command line")
    """)


# Makes `os.fork` fail in the process that runs this code as long as a file exists.
FAILING_FORK = """
def failing_fork(fork=os.fork):
    if os.path.exists({path!r}):
        raise OSError(11, "Resource temporarily unavailable")
    return fork()
"""


def test_a_worker_that_cannot_be_forked_in_mid_epoch_is_forked_later(run_with_setup):
    run_with_setup(f"""
        logging.disable()
        warnings.simplefilter("always")
        exec({FAILING_FORK!r}.format(path=tmp + "/block"))
        class Data(Numbers):
            def __setstate__(self, state):
                vars(self).update(state)
                os.fork = failing_fork
        pool.RETRY_INTERVAL_S = 0.2
        loader = gl.Loader(Data(length=400), 4, num_workers=2, device="cpu", persistent_workers=True)
        engine = lambda: loader._session.engine
        with warnings.catch_warnings(record=True) as caught:
            batches = iter(loader)
            seen = [next(batches)]
            Path(tmp, "block").touch()
            os.kill(engine().pids[0], signal.SIGKILL)
            seen += batches
            check_epoch(seen, 400)
            wait_until(lambda: engine().collect_events(0.0) or caught, "a fork has failed")
            assert len(engine().pids) == 1
            check_epoch(loader, 400)
            Path(tmp, "block").unlink()
            wait_until(lambda: engine().collect_events(0.0) or engine().is_steady, "both workers run")
        [text] = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
        assert "could not be forked: [Errno 11] Resource temporarily unavailable" in text, text
        assert "The other workers continue, and gpuload tries again every second" in text, text
        check_epoch(loader, 400)
        Path(tmp, "block").touch()
        for pid in engine().pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(gl.WorkerError, match="could not be forked"):
            for batch in loader: pass
        loader.close()
        assert held_resources()[1] == 0
    """)


def test_a_template_that_cannot_be_forked_in_mid_epoch_is_forked_later(run_with_setup):
    run_with_setup(f"""
        logging.disable()
        pool.RETRY_INTERVAL_S = 0.2
        write_module("library", {FAILING_FORK!r}.format(path=tmp + "/block") + "os.fork = failing_fork")
        data = make_dataset("library")
        os.fork = sys.modules["library"].failing_fork.__defaults__[0]
        loader = make_loader(data, persistent_workers=True)
        engine = lambda: loader._session.engine
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_epoch(loader)
            Path(tmp, "block").touch()
            os.kill(template_pids()[0], signal.SIGKILL)
            wait_until(lambda: engine().collect_events(0.0) or caught, "a fork has failed")
            check_epoch(loader)
            assert template_pids() == []
            Path(tmp, "block").unlink()
            wait_until(lambda: engine().collect_events(0.0) or len(template_pids()) == 1, "the template is replaced")
        assert "the workers' template could not be forked: " in str(caught[0].message), caught
        check_epoch(loader)
        loader.close()
        assert held_resources()[1] == 0
    """)
