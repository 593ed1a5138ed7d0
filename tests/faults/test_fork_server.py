"""The fork server, from which the templates of all sessions are forked: what it imports, and when it ends."""

from __future__ import annotations

import textwrap

import pytest

# Modules that record which processes import them, and a dataset that imports some of them.
SETUP = """
    import importlib
    def write(name, code="", folder="site-packages"):
        path = Path(tmp) / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        note = f"import os\\nwith open({tmp!r} + '/{name}.imports', 'a') as file: print(os.getpid(), file=file)\\n"
        path.write_text(f"{note}{code}\\n")
        sys.path[:] = [entry for entry in sys.path if entry != str(path.parent)]
        sys.path.insert(0, str(path.parent))
    def importers(name):
        path = Path(f"{tmp}/{name}.imports")
        pids = [int(line) for line in path.read_text().split()] if path.exists() else []
        return [pid for pid in pids if pid != os.getpid()]
    def dataset_with(*libraries, code="return index", module="own"):
        write(module, f"import {', '.join(('os', *libraries))}\\n"
            "class Data:\\n"
            "    def __len__(self): return 40\\n"
            f"    def __getitem__(self, index): {code}", folder="own")
        importlib.invalidate_caches()
        return importlib.import_module(module).Data()
    def load(data, **options):
        return gl.Loader(data, 4, num_workers=2, chunk_size=2, device="cpu", **options)
    logged = log_of_workers()
"""


@pytest.fixture
def succeed_with(succeed):
    return lambda code: succeed(textwrap.dedent(SETUP) + textwrap.dedent(code))


def test_several_loaders_import_their_libraries_once(succeed_with):
    succeed_with("""
        write("library")
        data = dataset_with("library")
        before = held_resources()
        loaders = [load(data) for _ in range(3)]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            check_epoch(iterator)
        assert importers("library") == servers(), importers("library")
        assert sorted(importers("own")) == sorted(templates()) and len(templates()) == 3
        for loader in loaders:
            loader.close()
        assert templates() == []
        assert len(servers()) == 1
        assert held_resources() == before
    """)


def test_objects_of_libraries_are_frozen_in_templates(succeed_with):
    """If a garbage collection in a template traversed them, it would write to the pages that templates share."""
    succeed_with("""
        write("library", "value = [[]]")
        write("own", "import gc, library\\n"
            "class Data:\\n"
            "    def __len__(self): return 40\\n"
            "    def __getstate__(self): return {}\\n"
            "    def __setstate__(self, state):\\n"
            "        self.is_tracked = any(entry is library.value for entry in gc.get_objects())\\n"
            "    def __getitem__(self, index): return self.is_tracked", folder="own")
        importlib.invalidate_caches()
        import own
        loader = load(own.Data())
        assert not torch.cat(list(loader)).any()
        assert importers("library") == servers()
        loader.close()
    """)


def test_the_fork_server_imports_libraries_when_a_loader_is_created(succeed_with):
    succeed_with("""
        write("library")
        write("second")
        plain = load(dataset_with(module="plain"))
        assert servers() == []
        load(dataset_with("library"))
        wait_until(lambda: importers("library") == servers() != [], "the library is imported")
        load(dataset_with("library", "second", module="other"))
        wait_until(lambda: importers("second") == servers(), "the second library is imported by the same process")
        assert importers("own") == importers("other") == templates() == []  # no modules of the user
        check_epoch(plain)
        assert len(servers()) == 1
        plain.close()
    """)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "threads"),
        ("held = os.pipe()", "an open pipe"),
        ("import helper", "it imports helper"),
        ("import pathlib; 'server' in pathlib.Path('/proc/self/cmdline').read_text() and os._exit(3)", "status 3"),
    ],
)
def test_the_fork_server_does_not_import_a_library_that_must_not_be_forked(succeed_with, code, reason):
    succeed_with(
        f"code, reason = {code!r}, {reason!r}"
        + """
write("helper", folder="own")
write("good")
write("odd", f"if os.getpid() != {os.getpid()}: {code}")
loader = load(dataset_with("odd", "good"))
good = load(dataset_with("good", module="other"))
check_epoch(good)
assert any("the fork server does not import odd: " in text and reason in text for text in logged), logged
assert importers("good")[-1:] == servers(), (importers("good"), servers())
check_epoch(good)
good.close()
check_epoch(loader)
loader.close()
"""
    )


def test_another_environment_starts_another_server_and_open_sessions_continue(succeed_with):
    succeed_with("""
        write("library")
        data = dataset_with("library", code="return int(os.environ.get('CHANGED', 0))")
        first = load(data, persistent_workers=True)
        assert torch.cat(list(first)).tolist() == 40 * [0]
        [old] = servers()
        os.environ["CHANGED"] = "1"
        second = load(data)
        assert torch.cat(list(second)).tolist() == 40 * [1]
        [new] = set(servers()) - {old}
        assert importers("library") == [old, new]
        [template] = children(old)
        assert torch.cat(list(first)).tolist() == 40 * [0]
        assert children(old) == [template]
        first.close()
        wait_until(lambda: is_dead(old), "the server without a session has exited")
        assert torch.cat(list(second)).tolist() == 40 * [1]
        second.close()
        load(data)
        assert servers() == [new]
    """)


def test_sessions_continue_after_their_fork_server_was_killed(succeed_with):
    succeed_with("""
        logging.disable()
        write("library")
        data = dataset_with("library")
        loader = load(data, persistent_workers=True)
        check_epoch(loader)
        [server], [template] = servers(), templates()
        pids = loader._session.engine.pids
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: is_dead(server), "the server is dead")
        check_epoch(loader)
        assert loader._session.engine.pids == pids
        assert loader._session.engine.deaths.causes == []
        other = load(data)
        check_epoch(other)
        assert len(importers("library")) == 2
        os.kill(template, signal.SIGKILL)  # the next one comes from the new server
        check_epoch(loader)
        wait_until(lambda: loader._session.engine.collect_events(0.0) or len(templates()) == 2, "it is replaced")
        loader.close()
        other.close()
        assert held_resources()[1] == 0
    """)


def test_a_fork_server_that_is_killed_while_it_imports_is_replaced(succeed_with):
    succeed_with("""
        logging.disable()
        write("library", "import time; time.sleep(0.5)")
        data = dataset_with("library")
        before = held_resources()
        loader = load(data)
        batches = iter(loader)
        wait_until(servers, "the fork server has its command line")
        [server] = servers()
        wait_until(lambda: importers("library") == [server], "the fork server imports the library")
        os.kill(server, signal.SIGKILL)
        check_epoch(batches)
        assert importers("library") == [server, *servers()]
        assert loader._session.engine.deaths.causes == ["killed by SIGKILL"]
        loader.close()
        assert held_resources() == before
    """)


def test_a_stopped_fork_server_is_replaced(succeed_with):
    succeed_with("""
        logging.disable()
        data = dataset_with()
        loader = load(data, timeout=0.5)
        check_epoch(loader)
        loader.close()
        [server] = servers()
        os.kill(server, signal.SIGSTOP)
        loader = load(data, timeout=0.5)
        check_epoch(loader)
        assert server not in servers()
        assert loader._session.engine.deaths.causes == ["killed by SIGKILL"]
        loader.close()
    """)


def test_the_fork_server_ends_after_its_idle_limit_without_a_session(succeed_with):
    succeed_with("""
        fork_server.IDLE_LIMIT_S = 0.3
        data = dataset_with()
        loader = load(data, persistent_workers=True)
        check_epoch(loader)
        [server] = servers()
        time.sleep(1)
        check_epoch(loader)
        assert servers() == [server]
        loader.close()
        wait_until(lambda: is_dead(server), "the server has exited")
        with load(data) as other:
            check_epoch(other)
            assert len(servers()) == 1 and servers() != [server]
    """)


def test_a_forked_child_of_the_program_starts_its_own_fork_server(succeed_with):
    succeed_with("""
        data = dataset_with()
        loader = load(data, persistent_workers=True)
        check_epoch(loader)
        parent_servers = servers()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert fork_server._server is None and servers() == []
                other = load(data)
                check_epoch(other)
                assert len(servers()) == 1 and servers() != parent_servers
                other.close()
                fork_server.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0) == (pid, 0)
        check_epoch(loader)
        assert servers() == parent_servers
        loader.close()
        check_epoch(load(data))
        assert servers() == parent_servers
    """)


def test_more_descriptors_than_a_message_holds_keep_their_numbers(succeed_with):
    succeed_with("""
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
            assert len(children(servers()[0])) == 1  # the template was forked
        assert held_resources() == before
    """)


def test_the_template_is_a_separate_interpreter_if_the_fork_server_has_another_module(succeed_with):
    succeed_with("""
        write("dependency", "value = 1", folder="old")
        import dependency
        write("dependency", "value = 2", folder="site-packages")
        write("library", "import dependency")
        data = dataset_with("library", code="return self.value")
        data.value = dependency.value
        del sys.modules["dependency"]
        import dependency
        sys.modules["dependency"].__file__ = str(Path(tmp) / "old" / "dependency.py")
        with load(data) as loader:
            assert torch.cat(list(loader)).tolist() == 40 * [1]
            assert started_as("template") == templates() and len(templates()) == 1
        expected = (
            "the template is a separate interpreter, since it cannot be forked from the fork server: "
            "it has imported another dependency"
        )
        assert expected in logged, logged
    """)


def test_the_template_is_a_separate_interpreter_if_a_library_took_its_descriptors(succeed_with):
    succeed_with("""
        code = f"if os.getpid() != {os.getpid()}:\\n"
        code += "    for number in range(3, 100):\\n"
        code += "        try: os.fstat(number)\\n"
        code += "        except OSError: os.dup2(os.open('/dev/null', os.O_RDONLY), number)\\n"
        write("library", code)
        with load(dataset_with("library")) as loader:
            check_epoch(loader)
            assert started_as("template") == templates() and len(templates()) == 1
        expected = "the template is a separate interpreter, since it cannot be forked from the fork server: a library"
        assert any(text.startswith(expected) for text in logged), logged
    """)


def test_warnings_that_the_program_ignores_are_not_printed_when_a_library_is_imported(succeed_with):
    succeed_with("""
        write("library", "import warnings; warnings.warn('this library is old', FutureWarning)")
        warnings.filterwarnings("ignore", "this library is old")
        with load(dataset_with("library")) as loader:
            check_epoch(loader)
        assert len(importers("library")) == 1
    """)


def test_workers_of_an_iterable_dataset_share_torch(succeed_with):
    succeed_with("""
        class Stream:
            def __iter__(self):
                info = gl.get_worker_info()
                return iter(range(info.id, 40, info.num_workers))
        with load(Stream()) as loader:
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))
            assert all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in [*servers(), *templates()])
    """)


def test_atexit_functions_of_a_library_run_in_the_fork_server_alone(succeed_with):
    succeed_with("""
        write("library", f"import atexit\\natexit.register(lambda: open(f'{tmp}/ended-{{os.getpid()}}', 'w').close())")
        data = dataset_with("library")
        for _ in range(2):
            with load(data) as loader:
                check_epoch(loader)
        [server] = servers()
        ended = lambda: sorted(path.name for path in Path(tmp).glob("ended-*"))
        assert ended() == []
        fork_server.close()
        assert ended() == [f"ended-{server}"]
    """)


def test_unseeded_random_numbers_differ_between_sessions(succeed_with):
    succeed_with("""
        write("library", "import numpy.random")
        import library
        class Drawing(Numbers):
            def __setstate__(self, state):
                vars(self).update(state)
                self.numbers = np.random.rand(), random.random()
            def __getitem__(self, index): return library and np.array(self.numbers)
        draws = []
        for _ in range(2):
            with load(Drawing()) as loader:
                batch = next(iter(loader))
                draws.append(batch[0].tolist())
        assert len(servers()) == 1
        assert draws[0][0] != draws[1][0] and draws[0][1] != draws[1][1], draws
    """)


def test_no_fork_server_starts_in_a_worker_or_while_a_spawned_process_starts(succeed_with):
    succeed_with("""
        import multiprocessing
        from gpuload.datasets.worker import THIS_PROCESS
        write("library")
        data = dataset_with("library")
        for owner, name in ((THIS_PROCESS, "is_worker"), (multiprocessing.current_process(), "_inheriting")):
            setattr(owner, name, True)
            with load(data) as loader:
                assert servers() == []
                check_epoch(loader)
                assert servers() == [] and len(started_as("template")) == 1
            setattr(owner, name, False)
        with load(data):
            wait_until(servers, "the fork server has its command line")
    """)


# Makes `os.fork` fail in the process that runs this code as long as a file exists.
FAILING_FORK = """
def failing_fork(fork=os.fork):
    if os.path.exists({path!r}):
        raise OSError(11, "Resource temporarily unavailable")
    return fork()
"""


def test_a_worker_that_cannot_be_forked_in_mid_epoch_is_forked_later(succeed_with):
    succeed_with(f"""
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


def test_a_template_that_cannot_be_forked_in_mid_epoch_is_forked_later(succeed_with):
    succeed_with(f"""
        logging.disable()
        pool.RETRY_INTERVAL_S = 0.2
        write("library", {FAILING_FORK!r}.format(path=tmp + "/block") + "os.fork = failing_fork")
        data = dataset_with("library")
        os.fork = sys.modules["library"].failing_fork.__defaults__[0]
        loader = load(data, persistent_workers=True)
        engine = lambda: loader._session.engine
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_epoch(loader)
            Path(tmp, "block").touch()
            os.kill(templates()[0], signal.SIGKILL)
            wait_until(lambda: engine().collect_events(0.0) or caught, "a fork has failed")
            check_epoch(loader)
            assert templates() == []
            Path(tmp, "block").unlink()
            wait_until(lambda: engine().collect_events(0.0) or len(templates()) == 1, "it is replaced")
        assert "the workers' template could not be forked: " in str(caught[0].message), caught
        check_epoch(loader)
        loader.close()
        assert held_resources()[1] == 0
    """)
