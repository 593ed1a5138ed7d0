"""Libraries that are used in the template that workers are forked from, and then in the workers."""

from __future__ import annotations

import textwrap

import pytest
from helpers import lacking
from helpers.http_server import served

FORKED_LOG = "workers are forked from a template"
THREADS_LOG = "a library started threads when it was imported, or the dataset did when it was unpickled"

# The packages; the code at the import of the dataset's module, in which each process has its own `file_name`; what must
# be true in each sample; the text in the log.
LIBRARIES = {
    "OpenBLAS": (
        (),
        """
        import numpy as np
        matrix = np.random.default_rng(0).random((300, 300))
        product, values = matrix @ matrix, np.linalg.svd(matrix)[1]
        """,
        "(matrix @ matrix == product).all() and np.allclose(np.linalg.svd(matrix)[1], values)",
        FORKED_LOG,
    ),
    "OpenMP with one thread": (
        (),
        """
        import torch
        matrix = torch.rand(300, 300)
        product = matrix @ matrix
        """,
        "torch.get_num_threads() == 1 and torch.equal(matrix @ matrix, product)",
        FORKED_LOG,
    ),
    "OpenMP with three threads": (
        (),
        """
        import torch
        torch.set_num_threads(3)
        matrix = torch.rand(300, 300)
        product = (matrix @ matrix).exp().sum()
        """,
        "torch.get_num_threads() == 3 and torch.allclose((matrix @ matrix).exp().sum(), product)",
        THREADS_LOG,
    ),
    "OpenCV": (
        ("cv2",),
        """
        import cv2
        import numpy as np
        grey = np.full((300, 300, 3), 100, np.uint8)
        """,
        "cv2.imdecode(cv2.imencode('.png', cv2.blur(grey, (9, 9)))[1], 1).tolist() == grey.tolist()",
        FORKED_LOG,
    ),
    "OpenCV with two threads": (
        ("cv2",),
        """
        import cv2
        import numpy as np
        grey = np.full((2000, 2000, 3), 100, np.uint8)
        cv2.setNumThreads(2)
        cv2.cvtColor(grey, cv2.COLOR_BGR2HSV)
        """,
        "(cv2.blur(grey, (9, 9)) == grey).all()",
        THREADS_LOG,
    ),
    "pyarrow": (
        ("pyarrow",),
        """
        import pyarrow as pa
        import pyarrow.compute as pc
        numbers = pa.table({"a": range(1000)})
        with pa.OSFile(str(file_name), "wb") as sink, pa.ipc.new_stream(sink, numbers.schema) as writer:
            writer.write(numbers)
        mapped = pa.ipc.open_stream(pa.memory_map(str(file_name))).read_all()
        assert pc.sum(numbers["a"]).as_py() == 499500
        """,
        "pc.sum(mapped['a']).as_py() == 499500 and mapped['a'][index].as_py() == index",
        FORKED_LOG,
    ),
    "pyarrow's threads": (
        ("pyarrow",),
        """
        import pyarrow as pa
        import pyarrow.parquet as pq
        pq.write_table(pa.table({"a": range(1000)}), file_name)
        numbers = pq.read_table(file_name)
        """,
        "pq.read_table(file_name) == numbers",
        THREADS_LOG,
    ),
    "np.memmap": (
        (),
        """
        import numpy as np
        with open(file_name, "wb") as file:
            np.save(file, np.arange(1000))
        numbers = np.load(file_name, mmap_mode="r+")
        """,
        "int(numbers[index]) == index",
        FORKED_LOG,
    ),
    "LMDB": (
        ("lmdb",),
        """
        import lmdb
        with lmdb.open(str(file_name)) as environment, environment.begin(write=True) as transaction:
            for number in range(40):
                transaction.put(b"%d" % number, b"%d" % number)
        environment = None
        def value(index):
            global environment
            environment = environment or lmdb.open(str(file_name), readonly=True)
            with environment.begin() as transaction:
                return transaction.get(b"%d" % index)
        """,
        "value(index) == b'%d' % index",
        FORKED_LOG,
    ),
    "HDF5": (
        ("h5py",),
        """
        import h5py
        with h5py.File(file_name, "w") as file:
            file["numbers"] = range(40)
        file = None
        def value(index):
            global file
            file = file or h5py.File(file_name)
            return int(file["numbers"][index])
        """,
        "value(index) == index",
        FORKED_LOG,
    ),
    "PIL": (
        (),
        """
        import io
        from PIL import Image
        Image.init()
        kinds = [kind for kind in ("PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP", "AVIF") if kind in Image.SAVE]
        def grey(kind):
            file = io.BytesIO()
            Image.new("RGB", (64, 64), (80, 80, 80)).save(file, kind)
            return Image.open(file).convert("L").getextrema()
        expected = [grey(kind) for kind in kinds]
        """,
        "[grey(kind) for kind in kinds] == expected",
        FORKED_LOG,
    ),
}


def write_module(folder, at_import: str, condition: str) -> str:
    """Write the module of a dataset. Return a program that loads it and assigns its log line to `text`."""
    (folder / "own_module.py").write_text(
        "import os, pathlib\n"
        + "file_name = pathlib.Path(__file__).with_name(f'of {os.getpid()}')\n"
        + textwrap.dedent(at_import)
        + "class Data:\n"
        + "    def __len__(self): return 40\n"
        + f"    def __getitem__(self, index): return index, bool({condition})\n"
    )
    return """
        logged = record_worker_log()
        sys.path.insert(0, tmp)
        import own_module
        with gl.Loader(own_module.Data(), 4, num_workers=2, device="cpu") as loader:
            indices, is_right = map(torch.cat, zip(*loader))
        assert indices.tolist() == list(range(40))
        assert is_right.all(), is_right
        [text] = [text for text in logged if "template" in text]
    """


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=lacking.needs(*packages)) for name, (packages, *_) in LIBRARIES.items()]
)
def test_a_library_that_was_used_in_the_template_works_in_the_workers(run_without_errors, tmp_path, library):
    _, at_import, condition, expected = LIBRARIES[library]
    program = write_module(tmp_path, at_import, condition)
    run_without_errors(program + f"    assert {expected!r} in text, text\n")


# The code at the import of the dataset's module, and the text in the log.
FILESYSTEMS = {
    "of HTTP with its event loop, in the template": ("files = fsspec.filesystem('http')", THREADS_LOG),
    "of HTTP with its event loop, in the workers": ("files = None", FORKED_LOG),
    "of files and memory, in the template": (
        "fsspec.filesystem('file').info('/'); fsspec.filesystem('memory').pipe('a', b'b'); files = None",
        FORKED_LOG,
    ),
}


@lacking.needs("aiohttp")
@pytest.mark.parametrize("opened", FILESYSTEMS)
def test_a_filesystem_of_fsspec_works_wherever_it_is_opened(run_without_errors, tmp_path, opened):
    at_import, expected = FILESYSTEMS[opened]
    at_import = f"""
import os
import fsspec
import fsspec.implementations.http
{at_import}
def content(index):
    global files
    files = files or fsspec.filesystem("http")
    return files.cat(os.environ["URL"] + f"/{{index}}")
"""
    program = write_module(tmp_path, at_import, "content(index) == b'file %d' % index")
    with served({str(index): b"file %d" % index for index in range(40)}) as server:
        run_without_errors(
            f"os.environ['URL'] = {server.url!r}\n" + textwrap.dedent(program) + f"assert {expected!r} in text, text\n"
        )
