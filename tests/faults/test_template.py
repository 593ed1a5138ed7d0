"""The process that workers are forked from: it dies, it is replaced, and workers are what fresh processes would be."""

from __future__ import annotations

import sqlite3

import lacking
import pytest


@pytest.mark.parametrize("when", ["before it is ready", "after the first batch", "while a worker is forked"])
def test_a_template_that_is_killed_is_replaced_and_no_sample_is_lost(succeed, when):
    succeed(f"""
        import logging
        logging.disable()
        when = {when!r}
        def die(index):  # each worker, once
            if index in (17, 29) and not os.path.exists(f"{{tmp}}/{{index}}"):
                open(f"{{tmp}}/{{index}}", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        before = left()
        loader = numbers(die)
        batches = iter(loader)
        wait_until(templates, "its command line is there")
        [first] = templates()
        if when == "before it is ready":
            os.kill(first, signal.SIGKILL)
        seen = [next(batches)]
        if when == "after the first batch":
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{{first}}").exists() or not children(first), "it is dead")
        if when == "while a worker is forked":
            fork = process.Template.fork
            def killed(self, number, ends):
                process.Template.fork = fork
                os.kill(self.pid, signal.SIGSTOP)  # so that the request is not read
                os.kill(self.pid, signal.SIGKILL)
                return fork(self, number, ends)
            process.Template.fork = killed
        seen += batches
        assert sorted(torch.cat(seen).tolist()) == list(range(40)), seen
        wait_until(lambda: loader._session.engine.gather(0.0) or len(templates()) == 1, "there is another")
        assert templates() != [first]
        assert torch.cat(list(loader)).tolist() == list(range(40))
        loader.close()
        assert left() == before
    """)


def test_workers_go_on_without_their_template(succeed):
    succeed("""
        import logging
        logging.disable()
        loader = numbers(length=400)
        batches = iter(loader)
        seen = [next(batches)]
        team = set(loader._session.engine.pids)
        os.kill(templates()[0], signal.SIGKILL)
        seen += batches
        assert torch.cat(seen).tolist() == list(range(400))
        assert set(loader._session.engine.pids) == team
        loader.close()
    """)


def test_a_worker_whose_template_is_gone_ends_with_an_unknown_status(succeed):
    succeed("""
        loader = numbers(length=400)
        batches = iter(loader)
        next(batches)
        engine = loader._session.engine
        victim = engine.pids[0]
        os.kill(templates()[0], signal.SIGSTOP)  # it reaps nobody any more
        os.kill(templates()[0], signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        rest = torch.cat([*batches]).tolist()
        assert rest == list(range(4, 400))
        causes = engine.deaths.causes
        assert any("nobody knows how" in cause for cause in causes), causes
        loader.close()
    """)


def test_ends_of_what_was_made_at_import_are_left_to_the_template(succeed, tmp_path):
    module = tmp_path / "own_module.py"
    module.write_text(
        "import atexit, os, tempfile\n"
        "folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)\n"
        "atexit.register(lambda: open(os.environ['TOLD'] + f'/{os.getpid()}', 'w').close())\n"
        "class Data:\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, index):\n"
        "        assert os.path.isdir(folder.name)\n"
        "        if index == 17 and not os.path.exists(os.environ['TOLD'] + '/left'):\n"
        "            open(os.environ['TOLD'] + '/left', 'w').close()\n"
        "        return index\n"
    )
    (tmp_path / "told").mkdir()
    succeed(f"""
        os.environ["TOLD"] = {str(tmp_path / "told")!r}
        warnings.simplefilter("ignore", ResourceWarning)  # a temporary folder that goes with its process
        sys.path.insert(0, {str(tmp_path)!r})
        import own_module
        loader = gl.Loader(own_module.Data(), 4, num_workers=2, device="cpu", persistent_workers=True)
        for _ in loader: pass
        [template] = templates()
        engine = loader._session.engine
        engine.resize(1)  # a worker leaves in order
        for batch in loader: pass
        wait_until(lambda: engine.gather(0.0) or len(workers()) == 1, "one has left")
        for batch in loader: pass
        assert sorted(os.listdir({str(tmp_path / "told")!r})) == ["left"]
        loader.close()
        assert sorted(os.listdir({str(tmp_path / "told")!r})) == sorted(["left", str(template)])
    """)


def test_finalizers_that_workers_made_run_at_their_ends(succeed, tmp_path):
    """And those of the template at its own: the standard library has one function for all of a process."""
    (tmp_path / "finalizing.py").write_text(
        """import os, weakref
def told(name): open(f"{os.environ['TOLD']}/{name}-{os.getpid()}", "w").close()
class Data:
    def __len__(self): return 40
    def __getitem__(self, index):
        if not hasattr(self, "finalizer"):
            self.finalizer = weakref.finalize(self, told, "worker")
        return index
kept = Data()
finalizer = weakref.finalize(kept, told, "template")
"""
    )
    (tmp_path / "told").mkdir()
    succeed(f"""
        os.environ["TOLD"] = {str(tmp_path / "told")!r}
        sys.path.insert(0, {str(tmp_path)!r})
        import finalizing
        finalizing.finalizer.detach()  # of this process
        loader = gl.Loader(finalizing.Data(), 4, num_workers=2, device="cpu", persistent_workers=True)
        for _ in range(3): list(loader)  # each worker has a sample
        wait_until(lambda: list(loader) and all(w.samples for w in loader.stats().workers), "each has a sample")
        names = {{f"worker-{{pid}}" for pid in loader._session.engine.pids}}
        names |= {{f"template-{{pid}}" for pid in templates()}}
        loader.close()
        assert set(os.listdir(os.environ["TOLD"])) == names, os.listdir(os.environ["TOLD"])
    """)


def test_a_later_worker_has_the_surroundings_of_its_parent_at_that_time(succeed, tmp_path):
    (tmp_path / "other").mkdir()
    succeed("""
        import logging, resource
        logging.disable()
        class Told:
            def __len__(self): return 400
            def __getitem__(self, index):
                if index == 100 and not os.path.exists(f"{tmp}/once"):
                    open(f"{tmp}/once", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                found = os.getcwd(), os.environ.get("NEW"), os.environ.get("OLD")
                limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
                return str((*found, limit, os.environ["OMP_NUM_THREADS"], os.readlink("/proc/self/fd/1")))
        os.environ["OLD"] = "1"
        loader = gl.Loader(Told(), 4, num_workers=1, device="cpu", chunk_size=1, prefetch_factor=1)
        batches = iter(loader)
        first = next(batches)
        os.chdir(f"{tmp}/other")
        os.environ["NEW"] = "2"
        del os.environ["OLD"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        new = os.open(f"{tmp}/printed", os.O_WRONLY | os.O_CREAT)
        os.dup2(new, 1)
        last = list(batches)[-1]
        assert last[0] == str((f"{tmp}/other", "2", None, 0, "1", f"{tmp}/printed")), last
        assert first[0] != last[0]
        loader.close()
    """)


def test_what_is_printed_at_import_is_printed_once(succeed, tmp_path):
    (tmp_path / "printing.py").write_text(
        """print("imported", end=" ")
class Data:
    def __len__(self): return 40
    def __getitem__(self, index): return index
"""
    )
    succeed("""
        sys.path.insert(0, tmp)
        os.environ.pop("PYTHONUNBUFFERED", None)
        import printing
        sys.stdout.flush()
        os.dup2(os.open(f"{tmp}/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        with gl.Loader(printing.Data(), 4, num_workers=3, device="cpu") as loader:
            assert torch.cat(list(loader)).tolist() == list(range(40))
        assert Path(f"{tmp}/printed").read_text() == "imported "
    """)


# What the dataset does when it is unpickled, and how the log calls it.
UNFIT = {
    "threads": ("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "started threads"),
    "socket": ("held = socket.socketpair()", "an open socket"),
    "pipe": ("held = os.pipe()", "an open pipe"),
    "inotify": ("held = ctypes.CDLL(None).inotify_init()", "an open inotify"),
    "hdf5": ("import h5py; held = h5py.File(tmp + '/h5', 'r')", "an HDF5 file"),
    "lmdb": ("import lmdb; held = lmdb.open(tmp + '/lmdb', readonly=True, lock=False)", "an LMDB environment"),
    "written": ("held = open(tmp + '/held', 'w')", "open for writing"),
    "read": ("held = open(__file__, 'rb', buffering=0); held.read(1)", "at byte 1"),
    "sqlite": (
        "held = sqlite3.connect('file:' + tmp + '/db?mode=ro', uri=True); held.execute('select * from t')",
        "SQLite",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_where_something_must_not_be_shared_workers_have_interpreters_of_their_own(succeed, tmp_path, what):
    hold, told = UNFIT[what]
    if what in ("hdf5", "lmdb"):
        lacking.require("h5py", "lmdb")
        import h5py
        import lmdb

        h5py.File(tmp_path / "h5", "w").close()
        lmdb.open(str(tmp_path / "lmdb")).close()
    (tmp_path / "holding.py").write_text(
        f"""import ctypes, os, socket, sqlite3, threading, time
tmp = {str(tmp_path)!r}
class Data:
    def __getstate__(self): return {{}}
    def __setstate__(self, state):
        global held
        {hold}
    def __len__(self): return 40
    def __getitem__(self, index): return index
"""
    )
    with sqlite3.connect(tmp_path / "db") as database:
        database.execute("create table t (a)")
    succeed(f"""
        import logging
        said = []
        class Hear(logging.Handler):
            def emit(self, record): said.append(record.getMessage())
        logging.getLogger("gpuload.workers").addHandler(Hear())
        logging.getLogger("gpuload.workers").setLevel(logging.INFO)
        sys.path.insert(0, tmp)
        import holding
        with gl.Loader(holding.Data(), 4, num_workers=2, device="cpu") as loader:
            assert torch.cat(list(loader)).tolist() == list(range(40))
            assert templates() == []
            assert len(workers()) == 2
        [text] = [text for text in said if "interpreter of its own" in text]
        assert {told!r} in text, text
    """)
