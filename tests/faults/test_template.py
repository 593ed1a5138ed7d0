"""The template, from which workers are forked: it is replaced when it dies, and workers are like fresh processes."""

from __future__ import annotations

import sqlite3
import zipfile

import pytest


@pytest.mark.parametrize("when", ["before it is ready", "after the first batch", "while a worker is forked"])
def test_a_template_that_is_killed_is_replaced_and_no_sample_is_lost(run_without_errors, when):
    run_without_errors(f"""
        logging.disable()
        when = {when!r}
        before = held_resources()
        loader = number_loader(die_once_at(17, 29))
        batches = iter(loader)
        wait_until(template_pids, "the template has its command line")
        [first_pid] = template_pids()
        if when == "before it is ready":
            os.kill(first_pid, signal.SIGKILL)
        seen = [next(batches)]
        if when == "after the first batch":
            os.kill(first_pid, signal.SIGKILL)
            wait_until(lambda: is_dead(first_pid) and not child_pids(first_pid), "the template is dead")
        if when == "while a worker is forked":
            fork = process.Template.fork
            def kill_and_fork(self, *request):
                process.Template.fork = fork
                os.kill(self.pid, signal.SIGSTOP)  # it must not read the request
                os.kill(self.pid, signal.SIGKILL)
                return fork(self, *request)
            process.Template.fork = kill_and_fork
        seen += batches
        assert sorted(torch.cat(seen).tolist()) == list(range(40)), seen
        wait_until(lambda: loader._session.engine.collect_events(0.0) or len(template_pids()) == 1, "one template runs")
        assert template_pids() != [first_pid]
        check_epoch(loader)
        loader.close()
        assert held_resources() == before, (held_resources(), before)
    """)


def test_objects_of_the_dataset_are_frozen_in_workers(run_without_errors):
    """If a garbage collection in a worker traversed them, it would write to the pages that workers share."""
    run_without_errors("""
        import gc
        class Data:
            def __init__(self):
                self.entries = [[]]
            def __len__(self):
                return 40
            def __getitem__(self, index):
                list_of_worker = [[]]
                return [any(entry is value for entry in gc.get_objects()) for value in (self.entries, list_of_worker)]
        loader = gl.Loader(Data(), 4, num_workers=2, device="cpu")
        tracked = [(of_dataset.any(), of_worker.all()) for of_dataset, of_worker in loader]
        assert tracked == [(False, True)] * 10, tracked  # the collector does not traverse frozen objects
        loader.close()
    """)


def test_workers_continue_after_their_template_was_killed(run_without_errors):
    run_without_errors("""
        logging.disable()
        loader = number_loader(length=400)
        batches = iter(loader)
        seen = [next(batches)]
        pids = set(loader._session.engine.pids)
        os.kill(template_pids()[0], signal.SIGKILL)
        seen += batches
        check_epoch(seen, 400)
        assert set(loader._session.engine.pids) == pids
        loader.close()
    """)


def test_a_worker_that_dies_after_its_template_has_an_unknown_exit_status(run_without_errors):
    run_without_errors("""
        loader = number_loader(length=400)
        batches = iter(loader)
        next(batches)
        engine = loader._session.engine
        victim = engine.pids[0]
        os.kill(template_pids()[0], signal.SIGSTOP)  # so that it can no longer reap processes
        os.kill(template_pids()[0], signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        assert torch.cat([*batches]).tolist() == list(range(4, 400))
        assert "its exit status is unknown" in " ".join(engine.deaths.causes)
        loader.close()
    """)


def test_exit_handlers_registered_at_import_run_in_the_template_alone(run_without_errors, tmp_path):
    module = tmp_path / "own_module.py"
    module.write_text(
        "import atexit, os, tempfile\n"
        "folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)\n"
        "atexit.register(lambda: open(os.environ['EXITS'] + f'/{os.getpid()}', 'w').close())\n"
        "class Data:\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, index):\n"
        "        assert os.path.isdir(folder.name)\n"
        "        return index\n"
    )
    (tmp_path / "exits").mkdir()
    run_without_errors("""
        exits = os.environ["EXITS"] = f"{tmp}/exits"
        warnings.simplefilter("ignore", ResourceWarning)  # about a temporary folder that is removed at exit
        sys.path.insert(0, tmp)
        import own_module
        loader = gl.Loader(own_module.Data(), 4, num_workers=2, device="cpu", persistent_workers=True)
        for _ in loader: pass
        [template] = template_pids()
        engine = loader._session.engine
        engine.resize(1)  # a worker exits normally
        for batch in loader: pass
        wait_until(lambda: engine.collect_events(0.0) or len(worker_pids()) == 1, "a worker has exited")
        for batch in loader: pass
        assert os.listdir(exits) == []
        loader.close()
        assert os.listdir(exits) == [str(template)]
    """)


def test_finalizers_created_in_workers_run_when_they_exit(run_without_errors, tmp_path):
    """`weakref` registers one exit function per process, which must run the finalizers of that process only."""
    (tmp_path / "finalizing.py").write_text(
        """import os, weakref
def create_file(name): open(f"{os.environ['EXITS']}/{name}-{os.getpid()}", "w").close()
class Data:
    def __len__(self): return 40
    def __getitem__(self, index):
        if not hasattr(self, "finalizer"):
            self.finalizer = weakref.finalize(self, create_file, "worker")
        return index
data = Data()
finalizer = weakref.finalize(data, create_file, "template")
"""
    )
    (tmp_path / "exits").mkdir()
    run_without_errors("""
        os.environ["EXITS"] = f"{tmp}/exits"
        sys.path.insert(0, tmp)
        import finalizing
        finalizing.finalizer.detach()  # so that this process writes no file at exit
        loader = gl.Loader(finalizing.Data(), 4, num_workers=2, device="cpu", persistent_workers=True)
        wait_until(lambda: list(loader) and all(w.samples for w in loader.stats().workers), "each has loaded a sample")
        names = {f"worker-{pid}" for pid in loader._session.engine.pids}
        names |= {f"template-{pid}" for pid in template_pids()}
        loader.close()
        assert set(os.listdir(os.environ["EXITS"])) == names, os.listdir(os.environ["EXITS"])
    """)


def test_a_worker_that_is_forked_later_has_the_current_environment_of_its_parent(run_without_errors, tmp_path):
    (tmp_path / "other").mkdir()
    run_without_errors("""
        import resource
        logging.disable()
        class Environment:
            def __len__(self): return 400
            def __getitem__(self, index):
                die_once_at(100)(index)
                variables = [os.environ.get(name) for name in ("NEW", "OLD", "OMP_NUM_THREADS")]
                limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
                return str((os.getcwd(), *variables, limit, os.readlink("/proc/self/fd/1")))
        os.environ["OLD"] = "1"
        loader = gl.Loader(Environment(), 4, num_workers=1, device="cpu", chunk_size=1, prefetch_factor=1)
        batches = iter(loader)
        first_batch = next(batches)
        os.chdir(f"{tmp}/other")
        os.environ["NEW"] = "2"
        del os.environ["OLD"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.dup2(os.open(f"{tmp}/printed", os.O_WRONLY | os.O_CREAT), 1)
        last_batch = list(batches)[-1]
        assert last_batch[0] == str((f"{tmp}/other", "2", None, "1", 0, f"{tmp}/printed")), last_batch
        assert first_batch[0] != last_batch[0]
        loader.close()
    """)


def test_text_printed_at_import_is_printed_once(run_without_errors, tmp_path):
    (tmp_path / "printing.py").write_text(
        """print("imported", end=" ")
class Data:
    def __len__(self): return 40
    def __getitem__(self, index): return index
"""
    )
    run_without_errors("""
        sys.path.insert(0, tmp)
        os.environ.pop("PYTHONUNBUFFERED", None)
        import printing
        sys.stdout.flush()
        os.dup2(os.open(f"{tmp}/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        with gl.Loader(printing.Data(), 4, num_workers=3, device="cpu") as loader:
            check_epoch(loader)
        assert Path(f"{tmp}/printed").read_text() == "imported "
    """)


# -- forked workers compared with separate interpreters ---------------------------------------------------------------

# A dataset that calls a function. Unless `forked`, it starts a thread when it is unpickled, so that its workers are
# separate interpreters.
FUNCTION_DATA = """
class FunctionData:
    def __init__(self, forked, function):
        self.forked, self.function = forked, function
    def __setstate__(self, state):
        vars(self).update(state)
        if not self.forked:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    def __len__(self): return 400
    def __getitem__(self, index): return self.function(index)
"""


def test_a_forked_worker_has_the_same_environment_as_a_separate_interpreter(run_without_errors, tmp_path):
    (tmp_path / "other").mkdir()
    run_without_errors(f"""
        import resource
        exec({FUNCTION_DATA!r})
        def describe(index):
            if index in (0, 100):
                with contextlib.suppress(FileExistsError):
                    open(f"{{tmp}}/{{len(os.listdir('/proc/self/task'))}} {{index}}", "x").close()
                    if index:
                        os.kill(os.getpid(), signal.SIGKILL)
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            facts = {{name: status[name].strip() for name in ("SigBlk", "SigIgn", "Umask", "Cpus_allowed")}}
            facts["handled"] = [number for number in range(1, 65) if callable(signal.getsignal(number))]
            facts["limits"] = Path("/proc/self/limits").read_text()
            facts["group"] = os.getpgid(0), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0)
            facts["folder"], facts["argv"] = os.getcwd(), sys.argv
            facts["streams"] = [os.readlink(f"/proc/self/fd/{{number}}") for number in (0, 1, 2)]
            facts["environment"] = dict(os.environ)
            return facts

        def limit(which, soft):
            resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))

        logged = record_worker_log()
        cpus = os.sched_getaffinity(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR2}})
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.sched_setaffinity(0, {{max(cpus)}})
        os.umask(0o077)
        os.nice(1)
        limit(resource.RLIMIT_STACK, 4 << 20)
        os.environ["OMP_NUM_THREADS"] = "7"
        options = {{"num_workers": 1, "device": "cpu", "chunk_size": 1, "prefetch_factor": 1, "collate_fn": list}}
        loaders = [gl.Loader(FunctionData(forked, describe), 4, **options) for forked in (True, False)]
        iterators = [iter(loader) for loader in loaders]
        facts, facts_of_interpreter = [next(batches)[0] for batches in iterators]
        assert facts == facts_of_interpreter, (facts, facts_of_interpreter)
        assert facts["environment"]["OMP_NUM_THREADS"] == "1"
        assert int(facts["SigBlk"], 16) == 1 << signal.SIGUSR2 - 1  # bit 0 is signal 1

        signal.pthread_sigmask(signal.SIG_SETMASK, {{signal.SIGUSR1, signal.SIGINT}})
        os.sched_setaffinity(0, cpus)
        limit(resource.RLIMIT_CORE, 0)
        os.environ["MKL_NUM_THREADS"] = "7"
        os.chdir(f"{{tmp}}/other")
        facts, facts_of_interpreter = [list(batches)[-1][-1] for batches in iterators]
        assert facts == facts_of_interpreter, (facts, facts_of_interpreter)
        assert facts["environment"]["MKL_NUM_THREADS"] == "1"
        assert int(facts["SigBlk"], 16) == 1 << signal.SIGUSR1 - 1  # workers unblock SIGINT
        assert facts["folder"] == f"{{tmp}}/other"
        # One file for each number of threads (1 if forked) and index: each loader has replaced its worker.
        assert {{"1 0", "1 100", "2 0", "2 100"}} <= set(os.listdir(tmp)), os.listdir(tmp)
        assert ["are forked" in text for text in logged if "template" in text] == [True, False]
        for loader in loaders:
            loader.close()
    """)


def test_forked_workers_draw_the_same_random_numbers_as_separate_interpreters(run_without_errors):
    run_without_errors(f"""
        exec({FUNCTION_DATA!r})
        def draw(*_):
            return [random.random(), np.random.rand(), torch.rand(1).item(), torch.initial_seed()]
        samples, inits, hashes = {{}}, {{}}, {{}}
        for forked in (True, False):
            def record_seed(worker):
                Path(f"{{tmp}}/{{worker}}").write_text(str((draw(), gl.get_worker_info().seed)))
                Path(f"{{tmp}}/{{worker}} hash").write_text(str(hash("text")))
            logged = record_worker_log()
            options = {{"num_workers": 2, "device": "cpu", "collate_fn": list, "seed": 3}}
            with gl.Loader(FunctionData(forked, draw), 4, worker_init_fn=record_seed, **options) as loader:
                samples[forked] = list(loader)
            inits[forked] = [Path(f"{{tmp}}/{{worker}}").read_text() for worker in (0, 1)]
            hashes[forked] = {{Path(f"{{tmp}}/{{worker}} hash").read_text() for worker in (0, 1)}}
            assert ["are forked" in text for text in logged if "template" in text] == [forked]
        assert samples[True] == samples[False]
        assert inits[True] == inits[False]
        assert len(set(inits[True])) == 2
        # Forked workers share the template's hash seed; separate interpreters have their own.
        assert (len(hashes[True]), len(hashes[False])) == (1, 2)
    """)


def test_a_collate_fn_draws_different_random_numbers_in_each_worker(run_without_errors):
    run_without_errors("""
        from torch.utils.data import TensorDataset
        def draw(samples):
            open(f"{tmp}/{os.getpid()}.collates", "w").close()
            wait_until(lambda: len(list(Path(tmp).glob("*.collates"))) == 2, "both workers collate")
            return random.random(), np.random.rand(), torch.rand(1).item()
        logged = record_worker_log()
        data = TensorDataset(torch.arange(40))
        with gl.Loader(data, 4, num_workers=2, device="cpu", collate_fn=draw) as loader:
            batches = list(loader)
        for name, values in zip(("random", "numpy", "torch"), zip(*batches)):
            assert len(set(values)) == len(batches), (name, values)
        assert "are forked" in logged[0], logged
    """)


# -- datasets whose workers cannot be forked ---------------------------------------------------------------------------

# What the dataset does when it is unpickled, and the reason in the log.
PREVENTS_FORKING = {
    "threads": ("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "started threads"),
    "socket": ("held = socket.socketpair()", "an open socket"),
    "pipe": ("held = os.pipe()", "an open pipe"),
    "inotify": ("held = ctypes.CDLL(None).inotify_init()", "an open inotify"),
    "hdf5": ("import h5py; held = h5py.File(tmp + '/h5', 'r')", "an HDF5 file"),
    "lmdb": ("import lmdb; held = lmdb.open(tmp + '/lmdb', readonly=True, lock=False)", "an LMDB environment"),
    "written": ("held = open(tmp + '/held', 'w')", "open for writing"),
    "scratch": ("held = tempfile.TemporaryFile()", "open for writing"),
    "locked": ("held = open(__file__, 'rb'); fcntl.flock(held, fcntl.LOCK_SH)", "a lock of "),
    "cannot be opened again": (  # the process of the file has exited
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE); held = open(f'/proc/{child.pid}/maps'); "
        "child.communicate()",
        "which cannot be opened again (No such process)",
    ),
    "sqlite": (
        "held = sqlite3.connect('file:' + tmp + '/db?mode=ro', uri=True); held.execute('select * from t')",
        "SQLite",
    ),
}


@pytest.mark.parametrize("resource", PREVENTS_FORKING)
def test_workers_are_separate_interpreters_if_the_dataset_holds_what_forks_cannot_share(
    run_without_errors, tmp_path, resource
):
    opening_code, reason = PREVENTS_FORKING[resource]
    if resource == "hdf5":
        import h5py

        h5py.File(tmp_path / "h5", "w").close()
    if resource == "lmdb":
        import lmdb

        lmdb.open(str(tmp_path / "lmdb")).close()
    (tmp_path / "holding.py").write_text(
        f"""import ctypes, fcntl, os, socket, sqlite3, subprocess, tempfile, threading, time
tmp = {str(tmp_path)!r}
class Data:
    def __getstate__(self): return {{}}
    def __setstate__(self, state):
        global held
        {opening_code}
    def __len__(self): return 40
    def __getitem__(self, index): return index
"""
    )
    with sqlite3.connect(tmp_path / "db") as database:
        database.execute("create table t (a)")
    run_without_errors(f"""
        logged = record_worker_log()
        sys.path.insert(0, tmp)
        import holding
        with gl.Loader(holding.Data(), 4, num_workers=2, device="cpu") as loader:
            check_epoch(loader)
            assert template_pids() == []
            assert len(worker_pids()) == 2
        [text] = [text for text in logged if "separate interpreter" in text]
        assert {reason!r} in text, text
    """)


# -- files that each worker opens again --------------------------------------------------------------------------------

# How the module of a dataset opens its files when the dataset is unpickled, and how a sample reads the value of `index`
# from them. During the pause, other workers would move a shared position. `path` has 240 numbers of 8 bytes.
OPENED_AGAIN = {
    "plain file": (
        "file = open(path, 'rb')",
        "file.seek(8 * index); pause(); return int.from_bytes(file.read(8), 'little')",
    ),
    "mapped file": (
        "file = open(path, 'rb'); mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)",
        "file.seek(8 * index); pause(); value = file.read(8); assert value == mapped[8 * index :][:8]; "
        "return int.from_bytes(value, 'little')",
    ),
    "memmap and an open file": (
        "array = np.memmap(path, np.int64); file = open(path, 'rb', buffering=0)",
        "file.seek(8 * index); pause(); value = int.from_bytes(file.read(8), 'little'); assert value == array[index]; "
        "return value",
    ),
    "mapped zip": (
        "file = open(tmp + '/zip', 'rb'); mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); "
        "archive = zipfile.ZipFile(file)",
        "member = archive.open(str(index)); pause(); return int(member.read())",
    ),
    "deleted temporary file": (
        "file = tempfile.TemporaryFile(buffering=0); file.write(pathlib.Path(path).read_bytes()); "
        "mapped = mmap.mmap(file.fileno(), 0)",
        "file.seek(8 * index); pause(); return int.from_bytes(file.read(8), 'little')",
    ),
    "memfd": (
        "fd = os.memfd_create('numbers'); os.write(fd, pathlib.Path(path).read_bytes()); mapped = mmap.mmap(fd, 0)",
        "os.lseek(fd, 8 * index, os.SEEK_SET); pause(); return int.from_bytes(os.read(fd, 8), 'little')",
    ),
    "directory": (  # `scandir` reads a directory of 4,000 entries in several parts
        "entries = os.scandir(tmp + '/many')",
        "names.update(entry.name for entry in itertools.islice(entries, 200)); pause(); "
        "assert len(names) == min(4000, 200 * len(calls)); return index",
    ),
    "duplicates of a descriptor": (
        "file = open(path, 'rb', buffering=0); duplicate = os.dup(file.fileno())",
        "file.seek(8 * index); pause(); return int.from_bytes(os.read(duplicate, 8), 'little')",
    ),
}


@pytest.mark.parametrize("file_kind", OPENED_AGAIN)
def test_each_forked_worker_reads_from_its_own_position_in_files_that_the_dataset_had_open(
    run_without_errors, tmp_path, file_kind
):
    opening_code, reading_code = OPENED_AGAIN[file_kind]
    (tmp_path / "numbers").write_bytes(b"".join(number.to_bytes(8, "little") for number in range(240)))
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        for number in range(240):
            archive.writestr(str(number), str(number))
    (tmp_path / "many").mkdir()
    if file_kind == "directory":
        for number in range(4000):
            (tmp_path / "many" / str(number)).touch()
    (tmp_path / "holding.py").write_text(
        f"""import itertools, mmap, os, pathlib, tempfile, time, zipfile
import numpy as np
tmp = {str(tmp_path)!r}
path = tmp + "/numbers"
names, calls = set(), []
def pause():
    time.sleep(0.001)
    calls.append(1)
class Data:
    def __getstate__(self): return {{}}
    def __setstate__(self, state):
        exec({opening_code!r}, globals())
    def __len__(self): return 240
    def __getitem__(self, index):
        {reading_code}
"""
    )
    run_without_errors("""
        logged = record_worker_log()
        sys.path.insert(0, tmp)
        import holding
        with gl.Loader(holding.Data(), 4, num_workers=3, chunk_size=2, device="cpu") as loader:
            assert torch.cat(list(loader)).tolist() == list(range(240))
        assert "are forked" in " ".join(logged)
    """)
