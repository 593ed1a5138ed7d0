"""Workers inherit from the user's process settings of libraries, modules that they cannot import, and the import path.
A warning names values of modules that they do not inherit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ImageOps import exif_transpose

from gpuload.workers.inherited import describe_differences, is_simple, library_values, module_values

pytestmark = pytest.mark.processes


PRINTING = """
    import json
    import gpuload as gl
    from helpers.map_datasets import MapDataset

    def print_batches(dataset, epochs=1, **options):
        options = {"num_workers": 1, "device": "cpu", "collate_fn": list, **options}
        with gl.Loader(dataset, 2, **options) as loader:
            for _ in range(epochs):
                print(json.dumps(list(loader)), flush=True)
"""


@pytest.fixture
def run_program(tmp_path):
    """Return a function that runs a program in a folder with these modules and `printing`. It returns the JSON values
    that the program printed, and its standard error."""

    def run_program(program: str, **modules: str) -> tuple[list, str]:
        for name, text in {"train": program, "printing": PRINTING, **modules}.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{Path(__file__).parents[1]}"}
        command = [sys.executable, "train.py"]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()], result.stderr

    return run_program


# -- values of modules ------------------------------------------------------------------------------------------------


def test_a_warning_names_values_of_modules_that_worker_init_fn_does_not_set(run_program):
    program = """
        import config
        import nested
        from data import sample
        from printing import MapDataset, print_batches

        def set_values(worker):
            config.SIZE, nested.cfg.depth = 224, 7

        config.SIZE, nested.cfg.depth, config.UNUSED = 224, 7, 5
        for init in (set_values, None):
            print_batches(MapDataset(sample, 2), worker_init_fn=init)
    """
    data = """
        import config
        from nested import cfg

        def sample(index):
            return helper()

        def helper():
            return config.SIZE, cfg.depth, config.SAME
    """
    config = "SIZE, SAME, UNUSED = 1, 3, 4"
    nested = "class Config: pass\ncfg = Config()\ncfg.depth = 2"
    printed, stderr = run_program(program, data=data, config=config, nested=nested)
    assert printed == [[[[224, 7, 3]] * 2], [[[1, 2, 3]] * 2]]
    assert stderr.count("RuntimeWarning") == 1
    assert "config.SIZE is 224 here and 1 in workers" in stderr
    assert "cfg.depth is 7 here and 2 in workers" in stderr
    assert "worker_init_fn" in stderr
    assert "UNUSED" not in stderr
    assert "SAME" not in stderr


def import_module_from(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("SIZE = 1\ndef f(): return SIZE", {"SIZE": 1}),
        ("SIZE = {'a': (1,)}\nclass f:\n  @property\n  def g(self): return [SIZE for _ in ()]", {"SIZE": {"a": (1,)}}),
        ("class C:\n  SIZE = 1\n  OTHER = 2\ndef f(): return C.SIZE", {"C.SIZE": 1}),
        ("import types\nNS = types.SimpleNamespace(SIZE=1)\ndef f(): return NS.SIZE", {"NS.SIZE": 1}),
        ("SIZE = 1\ndef g(): return SIZE\ndef f(): return g()", {"SIZE": 1}),
        ("SIZE = 1\nimport functools\ng = lambda x: SIZE\nf = functools.partial(g, 1)", {"SIZE": 1}),
        ("SIZE = list(range(100))\ndef f(): return SIZE", {}),
        ("SIZE = object()\ndef f(): return SIZE", {}),
        ("SIZE = 1\ndef f(SIZE): return SIZE", {}),
    ],
)  # fmt: skip
def test_module_values_returns_simple_values_that_code_refers_to(code, expected, tmp_path, monkeypatch):
    values = module_values([import_module_from("users_module", code, tmp_path, monkeypatch).f])
    assert values == ({"users_module": expected} if expected else {})


def test_module_values_skips_installed_packages():
    def f():
        return np.pi, os.sep, json.decoder

    assert module_values([f, np.random.default_rng(0), Image.new("L", (1, 1))]) == {}


class Reader:
    def read(self, path):
        return path

    __call__ = read


REPLACEMENTS = {
    "function": (lambda path: path, __name__),
    "with the original's name": (functools.wraps(Image.open)(lambda path: path), __name__),
    "partial": (functools.partial(Image.open, mode="r"), "functools"),
    "method": (Reader().read, __name__),
    "object": (Reader(), __name__),
    "built-in": (print, "builtins"),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_library_values_names_the_owner_of_a_replaced_function(kind, monkeypatch):
    def f():
        return Image.open

    replacement, owner = REPLACEMENTS[kind]
    before = library_values([f])["PIL.Image"]
    assert "open" not in before
    monkeypatch.setattr(Image, "open", replacement)
    after = library_values([f])["PIL.Image"]
    assert after == before | {"open": owner}
    monkeypatch.undo()
    assert describe_differences({}, {"PIL.Image": after}) == [
        f"PIL.Image.open is a function of {owner} here and of PIL.Image in workers"
    ]


def test_library_values_covers_modules_functions_and_classes_that_code_names():
    def f(image):
        import torch.nn

        return Image.open, exif_transpose(image), torch.nn.functional.relu

    class Rows(torch.utils.data.TensorDataset):
        pass

    libraries = library_values([f, Rows(torch.zeros(1))])
    assert libraries.keys() >= {
        "PIL.Image",
        "PIL.ImageOps",
        "torch.nn",
        "torch.nn.functional",
        "torch.utils.data.dataset",
    }
    assert not {"json", "os", "gpuload", "builtins", __name__} & libraries.keys()


def test_library_values_contains_constants_but_not_registries(monkeypatch):
    values = library_values([Image.new("L", (1, 1))])["PIL.Image"]
    assert values["MAX_IMAGE_PIXELS"] == Image.MAX_IMAGE_PIXELS
    assert not {"ID", "MIME", "EXTENSION", "OPEN", "_initialized", "__name__"} & values.keys()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    monkeypatch.setattr(Image, "WARN_POSSIBLE_FORMATS", True)
    changed_values = library_values([Image.new("L", (1, 1))])["PIL.Image"]
    assert describe_differences({}, {"PIL.Image": values, "not_there": {"X": 1}}) == [
        f"PIL.Image.MAX_IMAGE_PIXELS is {values['MAX_IMAGE_PIXELS']} here and 5 in workers",
        "PIL.Image.WARN_POSSIBLE_FORMATS is False here and True in workers",
    ]
    assert describe_differences({}, {"PIL.Image": changed_values}) == []


def test_a_warning_names_constants_and_functions_of_libraries_that_the_program_changed(run_program):
    program = """
        import numpy as np
        from PIL import Image, ImageFile, PngImagePlugin
        from printing import MapDataset, print_batches

        def sample(index):
            return Image.open.__module__, len(np.zeros(3))

        def open_image(path):
            return path

        Image.init()  # adds to Pillow's lists, which are not compared
        Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK = 12345, 2 << 20  # sent to workers
        for step in range(2):
            print_batches(MapDataset(sample, 1), num_workers=2)
            Image.open, Image.WARN_POSSIBLE_FORMATS = open_image, True
    """
    printed, stderr = run_program(program)
    assert printed == [[[["PIL.Image", 3]]]] * 2
    assert stderr.count("RuntimeWarning") == 1
    assert (
        "PIL.Image.WARN_POSSIBLE_FORMATS is True here and False in workers; PIL.Image.open is a function of __main__ "
        "here and of PIL.Image in workers. Workers import modules again" in stderr
    )


def test_describe_differences_names_both_values(tmp_path, monkeypatch):
    loaded = import_module_from(
        "users_module", "SIZE, NAN, KIND = 1, float('nan'), 1\nclass C: x = 'a'", tmp_path, monkeypatch
    )
    here = {"SIZE": 224, "NAN": float("nan"), "KIND": True, "C.x": "b", "NEW": 3}
    assert describe_differences({loaded.__name__: here, "not_there": {"x": 1}}, {}) == [
        "users_module.SIZE is 224 here and 1 in workers",
        "users_module.KIND is True here and 1 in workers",
        "users_module.C.x is 'b' here and 'a' in workers",
        "users_module.NEW is 3 here and does not exist in workers",
    ]


def test_is_simple_accepts_only_small_builtin_values():
    for value in (1, 1.0, "a", None, True, b"a", [1, "a"], {"a": (1, 2)}, ()):
        assert is_simple(value), value
    for value in ("a" * 2000, [1] * 100, object(), [[[1]]], np.zeros(2), {"a": object()}):
        assert not is_simple(value), value


# -- settings of libraries --------------------------------------------------------------------------------------------

SETTINGS = """
    import decimal, logging, socket, sys, warnings
    import numpy as np
    import torch
    from PIL import Image, ImageFile, PngImagePlugin
    import plugin
    from printing import MapDataset, print_batches

    def settings(index):
        import decimal, io, logging, socket, sys, warnings
        import torch
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("quiet", RuntimeWarning)
            warnings.warn("loud", RuntimeWarning)
        return [
            ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, str(torch.get_default_dtype()),
            logging.getLogger("a.b").level, logging.root.level, logging.root.manager.disable,
            decimal.getcontext().prec, np.geterr()["over"], socket.getdefaulttimeout(),
            [str(warning.message) for warning in caught], Image.open(io.BytesIO(b"ODD...")).size,
            PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY, ImageFile.MAXBLOCK,
            sys.getrecursionlimit(), str(np.array([1 / 3])), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ]

    Image.register_open("ODD", plugin.OddImage, lambda prefix: prefix.startswith(b"ODD"))
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = True, 12345
    PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY, ImageFile.MAXBLOCK = 1 << 21, 1 << 22, 1 << 18
    sys.setrecursionlimit(2345)
    np.set_printoptions(precision=2)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    logging.getLogger("a.b").setLevel(7)
    logging.root.setLevel(33)
    logging.disable(5)
    decimal.getcontext().prec = 99
    np.seterr(over="raise")
    socket.setdefaulttimeout(77)
    warnings.filterwarnings("ignore", message="quiet")
    for workers in (0, 2):
        print_batches(MapDataset(settings, 1), num_workers=workers)
"""
PLUGIN = """
    from PIL import ImageFile

    class OddImage(ImageFile.ImageFile):
        format = "ODD"

        def _open(self):
            self._size, self._mode, self.tile = (3, 4), "L", []
"""


def test_settings_of_libraries_are_the_same_in_workers(run_program):
    (here, in_worker), stderr = run_program(SETTINGS, plugin=PLUGIN)
    assert here == in_worker
    settings = [True, 12345, "torch.float64", 7, 33, 5, 99, "raise", 77, ["loud"], [3, 4]]
    settings += [1 << 21, 1 << 22, 1 << 18, 2345, "[0.33]", "high", True, True]
    assert here == [[settings]]
    assert stderr == ""


@pytest.mark.parametrize("where", ["data", "program"])
def test_settings_of_torch_reach_only_workers_that_import_it(run_program, where):
    program = """
        import torch
        from torchvision import set_image_backend
        import data
        from printing import MapDataset, print_batches

        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        set_image_backend("accimage")
        print_batches(MapDataset(data.settings, 1))
    """
    data = f"""
        {"import torch, torchvision" if where == "data" else ""}
        import sys

        def settings(index):
            if (torch := sys.modules.get("torch")) is None:
                return None
            backend = sys.modules["torchvision"].get_image_backend()
            deterministic = torch.are_deterministic_algorithms_enabled()
            return torch.get_float32_matmul_precision(), deterministic, backend
    """
    torchvision = """
        backend = "PIL"

        def set_image_backend(name):
            global backend
            backend = name

        def get_image_backend():
            return backend
    """
    printed, stderr = run_program(program, data=data, torchvision=torchvision)
    assert printed == [[[["medium", True, "accimage"] if where == "data" else None]]]
    assert stderr == ""


def test_a_filter_that_makes_warnings_errors_does_not_apply_to_imports(run_program):
    program = """
        import warnings
        import data
        from printing import MapDataset, print_batches

        warnings.simplefilter("error")
        print_batches(MapDataset(data.sample, 1))
    """
    data = """
        import warnings
        warnings.warn("odd")

        def sample(index):
            try:
                warnings.warn("odd")
            except UserWarning:
                return "an error"
    """
    printed, _ = run_program(program, data=data)
    assert printed == [[["an error"]]]


@pytest.mark.parametrize("where", ["program", "data"])
def test_a_default_socket_timeout_does_not_apply_to_the_sockets_of_workers(run_program, where):
    line = "import socket; socket.setdefaulttimeout(0.05)"
    program = f"""
        {line if where == "program" else ""}
        import data
        from printing import MapDataset, print_batches

        print_batches(MapDataset(data.sample, 4), epochs=2, num_workers=2)
    """
    data = f"""
        import time
        {line if where == "data" else ""}

        def sample(index):
            time.sleep(0.1)
            return index
    """
    printed, stderr = run_program(program, data=data)
    assert printed == [[[0, 1], [2, 3]]] * 2
    assert stderr == ""


# -- modules that workers cannot import -------------------------------------------------------------------------------

SPAWNED = """
    import collections
    from printing import MapDataset, print_batches

    Point = collections.namedtuple("Point", "x y")
    SCALE = 3

    def scaled(value):
        return SCALE * value

    def sample(key):
        return Point(key.x, scaled(key.x))

    def collate(samples):
        return [type(samples[0]).__name__, isinstance(samples[0], Point), *map(list, samples)]

    def work(rank):
        def init(worker):
            globals()["SCALE"] = 5

        keys = [Point(0, 0), Point(1, 0)]
        print_batches(MapDataset(sample, 2), sampler=keys, collate_fn=collate, worker_init_fn=init)
"""


@pytest.mark.parametrize("start", [
    "import torch.multiprocessing as mp; mp.spawn(work, nprocs=1)",
    "import multiprocessing as mp, concurrent.futures as c; "
    "c.ProcessPoolExecutor(1, mp.get_context('spawn')).submit(work, 0).result()",
])  # fmt: skip
def test_the_script_of_a_spawned_process_is_sent_by_value(run_program, start):
    printed, stderr = run_program(textwrap.dedent(SPAWNED) + f"\nif __name__ == '__main__':\n    {start}\n")
    assert printed == [[["Point", True, [0, 0], [1, 5]]]]
    assert "Error" not in stderr


def test_a_module_that_was_loaded_by_path_is_sent_by_value(run_program):
    program = """
        import importlib.util, sys
        from printing import MapDataset, print_batches

        spec = importlib.util.spec_from_file_location("my_data", "other/data.py")
        module = sys.modules["my_data"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.SIZE = 7
        print_batches(MapDataset(module.sample, 2))
    """
    data = """
        SIZE = 1

        def sample(index):
            return [SIZE, index]
    """
    printed, stderr = run_program(program, other__data=data, my_data="raise ImportError('the wrong one')")
    assert printed == [[[[7, 0], [7, 1]]]]
    assert stderr == ""


def test_a_relative_import_path_is_resolved_against_the_initial_working_directory(run_program):
    """Hydra, for example, changes to another folder for each run."""
    program = """
        import os, sys
        sys.path.insert(0, "lib")
        import mine
        from printing import MapDataset, print_batches

        os.mkdir("run")
        os.chdir("run")
        print_batches(MapDataset(mine.sample, 1))
    """
    mine = """
        def sample(index):
            import mine
            return [mine is not None, __name__]
    """
    printed, stderr = run_program(program, lib__mine=mine)
    assert printed == [[[[True, "mine"]]]]
    assert stderr == ""


def test_workers_share_lists_of_bytes(run_program):
    program = """
        from printing import MapDataset, print_batches

        class Blobs(MapDataset):
            def __getitem__(self, index):
                with open("/proc/self/smaps_rollup") as file:
                    private = sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))
                return [len(self.blobs), self.blobs[7] == bytes([7]) * 1_000_000, self.same is self.blobs, private]

        dataset = Blobs(samples=1)
        dataset.blobs = dataset.same = [bytes([n]) * 1_000_000 for n in range(100)]
        print_batches(dataset)
    """
    [[[[*content, private_kb]]]], _ = run_program(program)
    assert content == [100, True, True]
    assert private_kb < 90_000  # the list has 100 MB
