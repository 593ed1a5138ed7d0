"""Data is never unpickled or run, and the header of a file is checked before memory is allocated for its pixels.

The first half searches the source of the package. Permitted calls are listed with a reason; a call that is not listed,
or an entry without a call, makes a test fail.
"""

from __future__ import annotations

import ast
import json
import struct
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.programs import run_python
from PIL import Image

import gpuload

PACKAGE = Path(gpuload.__file__).parent

# Calls that run their argument, or that build objects from bytes: full name → effect.
UNSAFE = {
    "builtins.eval": "runs text",
    "builtins.exec": "runs text",
    "builtins.compile": "compiles text",
    "builtins.__import__": "imports a name",
    "code.InteractiveInterpreter": "runs text",
    "cloudpickle.load": "unpickles",
    "cloudpickle.loads": "unpickles",
    "dill.load": "unpickles",
    "dill.loads": "unpickles",
    "joblib.load": "unpickles",
    "marshal.load": "unmarshals",
    "marshal.loads": "unmarshals",
    "numpy.lib.format.read_array": "may unpickle",
    "os.popen": "runs a shell",
    "os.system": "runs a shell",
    "pandas.read_pickle": "unpickles",
    "pickle.Unpickler": "unpickles",
    "pickle.load": "unpickles",
    "pickle.loads": "unpickles",
    "shelve.open": "unpickles",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "torch.hub.load": "runs what it downloads",
    "torch.load": "unpickles",
    "yaml.full_load": "builds objects",
    "yaml.load": "builds objects",
    "yaml.unsafe_load": "builds objects",
}

# (file, function, call) → the reason why the argument does not come from a data file.
ALLOWED = {
    ("ring/packing.py", "read_content", "pickle.loads"): "samples that gpuload's worker wrote to the ring",
    ("workers/bootstrap.py", "_start", "marshal.loads"): "the parent's settings, from a memfd that only it writes",
    ("workers/protocol.py", "receive_request", "marshal.loads"): "requests of the parent to the process that forks",
    ("workers/planned.py", "make_plan", "pickle.loads"): "the main process's description of a batch, in the ring",
    ("loader/state.py", "_states_to_json", "pickle.loads"): "states of the user's dataset, from workers",
    ("workers/source.py", "__init__", "pickle.loads"): "these states, and those of load_state_dict, from the parent",
    ("workers/protocol.py", "unpack", "pickle.loads"): "keys of the user's sampler, sent by the parent",
    ("workers/pool.py", "_greet", "marshal.loads"): "the greeting of gpuload's worker",
    ("workers/start.py", "unpack", "marshal.loads"): "the start times that gpuload's interpreter measured",
    ("datasets/arrow_rows.py", "load", "pickle.Unpickler"): "the user's dataset, packed by the parent in a job",
    ("workers/job.py", "_read_header", "marshal.loads"): "the offsets of a job's parts in the parent's memfd",
    ("workers/job.py", "<module>", "pickle.Unpickler"): "the user's dataset, from the parent's memfd",
    ("workers/dataset_changes.py", "apply_changes", "pickle.load"): "values of the user's dataset, from the parent",
}

NAMED_MEMORY = ("/dev/shm", "shm_open", "multiprocessing.shared_memory", "SharedMemory")
LOCAL_SOCKET_CALLS = ("socketpair", "send_fds", "recv_fds", "CMSG_LEN", "getdefaulttimeout", "setdefaulttimeout")
NETWORK_CALLS = {"bind", "connect", "connect_ex", "listen", "accept", "create_connection", "create_server"}


class Calls(ast.NodeVisitor):
    """A visitor that lists the calls and names in a module, with full names and the functions that contain them."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: dict[str, str] = {}
        self.inside = ["<module>"]
        self.calls: list[tuple[str, str, ast.Call]] = []
        self.mentions: list[tuple[str, str]] = []
        for node in ast.walk(tree):  # an import in a function counts for the entire module
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.visit(tree)

    def name_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, f"builtins.{node.id}")
        if isinstance(node, ast.Attribute):
            return f"{self.name_of(node.value)}.{node.attr}"
        return "?"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append((self.inside[-1], self.name_of(node.func), node))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.mentions.append((self.inside[-1], self.name_of(node)))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.mentions.append((self.inside[-1], self.name_of(node)))


def unsafe_uses(source: str) -> Iterator[tuple[str, str]]:
    """Yield the function and the name of each unsafe call."""
    visitor = Calls(ast.parse(source))
    for function, name in visitor.mentions:  # also without a call, as in `map(pickle.loads, …)`
        if name in UNSAFE:
            yield function, name
    for function, name, node in visitor.calls:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "numpy.load" and not is_constant(keywords.get("allow_pickle"), False):
            yield function, "numpy.load without allow_pickle=False"
        if "shell" in keywords and not is_constant(keywords["shell"], False):
            yield function, f"{name} with shell={ast.unparse(keywords['shell'])}"
        if None in keywords and name.startswith("subprocess."):
            yield function, f"{name} with ** arguments"


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def sources() -> list[Path]:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 40, "fewer modules than expected"
    return paths


@pytest.mark.slow
def test_calls_that_unpickle_or_run_data_are_listed_with_a_reason():
    uses = {
        (path.relative_to(PACKAGE).as_posix(), function, name)
        for path in sources()
        for function, name in unsafe_uses(path.read_text())
    }
    text = "not in ALLOWED (tests/test_security.py): list it with a reason, if no byte of a data file can reach it"
    assert uses - set(ALLOWED) == set(), text
    assert set(ALLOWED) - uses == set(), "in ALLOWED (tests/test_security.py), but not in the source: remove it"


UNSAFE_SOURCES = [
    "import pickle\npickle.loads(b'')",
    "from pickle import loads as read\ndef f(x):\n    return read(x)",
    "import pickle as p\nlist(map(p.loads, []))",
    "import cloudpickle\ncloudpickle.load(f)",
    "import marshal\nmarshal.loads(b'')",
    "eval('1')",
    "exec('1')",
    "import numpy as np\nnp.load('x.npy')",
    "import numpy as np\nnp.load('x.npy', allow_pickle=True)",
    "import torch\ntorch.load('x')",
    "import yaml\nyaml.load('x')",
    "def f():\n    import shelve\n    shelve.open('x')",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "import subprocess\nsubprocess.Popen('ls', **options)",
    "import os\nos.system('ls')",
    "class A:\n    def f(self):\n        import pickle\n        class U(pickle.Unpickler): ...",
]
SAFE_SOURCES = [
    "import pickle\npickle.dumps(1)  # pickle.loads",
    "'pickle.loads(x)'",
    "import numpy as np\nnp.load('x.npy', allow_pickle=False)",
    "import re\nre.compile('x')",
    "import subprocess\nsubprocess.run(['ls'])",
]


@pytest.mark.parametrize("source", [*UNSAFE_SOURCES, *SAFE_SOURCES])
def test_unsafe_uses_finds_only_unsafe_calls(source):
    assert bool(list(unsafe_uses(source))) == (source in UNSAFE_SOURCES)


@pytest.mark.slow
def test_sockets_are_pairs_that_connect_to_no_network():
    for path in sources():
        visitor = Calls(ast.parse(path.read_text()))
        imported = {name.split(".")[0] for name in visitor.names.values()}
        if path.name != "shipping.py":  # shares objects of the user between processes
            assert "multiprocessing" not in imported, path
        if not path.name.startswith("remote"):  # reads the user's URLs with fsspec
            assert not imported & {"aiohttp", "fsspec", "http", "requests", "socketserver", "urllib"}, path
            if path.parts[-2:] != ("workers", "ray.py"):  # Ray runs it in an event loop
                assert "asyncio" not in imported, path
        for function, name, node in visitor.calls if "socket" in imported else ():
            place = f"{path.name}:{node.lineno} in {function}: {name}"
            assert name.rsplit(".", 1)[-1] not in NETWORK_CALLS, place
            if name == "socket.socket":  # an inherited end of a pair
                assert [keyword.arg for keyword in node.keywords] == ["fileno"], place
                assert not node.args, place
            elif name.startswith("socket."):
                assert name.removeprefix("socket.") in LOCAL_SOCKET_CALLS, place


@pytest.mark.slow
def test_shared_memory_is_anonymous():
    for path in sources():
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                assert not any(name in node.value for name in NAMED_MEMORY), f"{path}:{node.lineno}"
        names = {name for _, name in Calls(tree).mentions} | set(Calls(tree).names.values())
        assert not any(memory in name for memory in NAMED_MEMORY for name in names), path


# -- headers come before memory ---------------------------------------------------------------------------------------

SIDE = 60_000  # 3.6 gigapixels: 10.8 GB as RGB


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png() -> bytes:
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    )


def jpeg(kind: int = 0xC0) -> bytes:
    frame = struct.pack(">BHHB", 8, SIDE, SIDE, 3) + bytes([1, 0x22, 0, 2, 0x11, 0, 3, 0x11, 0])
    scan = bytes([3, 1, 0, 2, 0, 3, 0, 0, 63, 0])
    tables = b"\xff\xdb" + struct.pack(">H", 67) + bytes([0] + [1] * 64)
    return (
        b"\xff\xd8" + tables
        + b"\xff" + bytes([kind]) + struct.pack(">H", 2 + len(frame)) + frame
        + b"\xff\xda" + struct.pack(">H", 2 + len(scan)) + scan + bytes(50) + b"\xff\xd9"
    )  # fmt: skip


def tiff() -> bytes:
    tags = [(256, 4, SIDE), (257, 4, SIDE), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1),
            (278, 4, SIDE), (279, 4, 10)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4) + bytes(10)


def webp() -> bytes:
    # An extended header permits up to 2**24 pixels per side, and up to 2**32 in total.
    canvas = struct.pack("<I", SIDE - 1)[:3] * 2
    parts = b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas + b"VP8L" + struct.pack("<I", 6) + b"\x2f" + bytes(5)
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WEBP" + parts


def gif() -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, SIDE, SIDE, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", SIDE, SIDE, 0x80, 0, 0) + bytes(6) + frame + b"\x3b"


BOMBS = {
    "PNG": png(),
    "JPEG": jpeg(),
    "progressive JPEG": jpeg(0xC2),
    "TIFF": tiff(),
    "WebP": webp(),
    "GIF": gif(),
    "BMP": b"BM" + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, SIDE, SIDE, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(45),
    "PPM": b"P6 %d %d 255\n" % (SIDE, SIDE) + bytes(99),
    "QOI": b"qoif" + struct.pack(">IIBB", SIDE, SIDE, 3, 0) + bytes(99),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """The errors of decoding each bomb in a subprocess, by name, and how many bytes the peak memory grew."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, data in BOMBS.items():
        (folder / name).write_bytes(data)
    program = """
        import json, resource, sys
        from pathlib import Path
        from gpuload import Decode, DecodeError, Encoded
        from gpuload.decode import Decoder

        def peak_bytes():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

        decoder = Decoder(Decode(exif=True))
        before = peak_bytes()
        messages = {}
        for path in sorted(Path(sys.argv[1]).iterdir()):
            encoded = Encoded(path.read_bytes())
            try:
                decoder.decode(encoded, decoder.header(encoded))
            except DecodeError as error:
                messages[path.name] = str(error)
        print(json.dumps([messages, peak_bytes() - before]))
    """
    return json.loads(run_python(textwrap.dedent(program), folder)[0])


@pytest.mark.parametrize("name", BOMBS)
def test_decoder_refuses_a_decompression_bomb_by_its_header(refusals, name):
    assert len(BOMBS[name]) < 250
    messages, _ = refusals
    message = messages[name]
    if name == "WebP" and "DecompressionBombError" in message:  # Pillow's plugin checks the size first
        assert "Image size (3600000000 pixels) exceeds limit" in message
    else:
        assert message == (
            "the header says 60,000×60,000 = 3,600,000,000 pixels, more than max_pixels=178,956,970: perhaps a "
            "decompression bomb; if it is not, pass Decode(max_pixels=…)"
        )


def test_decoder_allocates_no_memory_for_a_decompression_bomb(refusals):
    _, peak_growth_bytes = refusals
    assert peak_growth_bytes < 48 << 20  # Pillow and its libraries; the smallest of the images would take 3.6 GB


@pytest.mark.slow
def test_decoder_bytes_is_at_least_the_memory_that_decoding_takes(tmp_path):
    # `Decode.max_memory` limits decoder_bytes. A small region is decoded, so that the result needs no memory.
    image = Image.new("RGBA", (3000, 3000), (9, 200, 77, 100))
    formats = {
        "WEBP": {"method": 0}, "AVIF": {"speed": 10, "subsampling": "4:4:4"}, "JPEG2000": {"tile_size": (1500, 1500)},
        "TIFF": {"compression": "tiff_lzw", "strip_size": 1 << 30}, "PNG": {}, "QOI": {}, "JPEG": {"progressive": True},
    }  # fmt: skip
    program = """
        import json, sys
        from gpuload import Decode
        from gpuload.datasets.sample import read
        from gpuload.decode import Decoder
        from gpuload.decode.header import MULTI_SCAN_BYTES, decoder_bytes

        def peak_bytes():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

        decoder, image = Decoder(Decode()), read(sys.argv[1])
        header = decoder.header(image)
        before = peak_bytes()
        decoder.decode(image, header, (0, 0, 10, 10))
        used_bytes, pixels = peak_bytes() - before, header.height * header.width
        opened = header.opened
        print(json.dumps([used_bytes, decoder_bytes(image.data, opened, 1) if opened else MULTI_SCAN_BYTES * pixels]))
    """
    for name, options in formats.items():
        path = tmp_path / name
        (image.convert("RGB") if name == "JPEG" else image).save(path, name, **options)
        used_bytes, counted_bytes = json.loads(run_python(textwrap.dedent(program), path)[0])
        assert used_bytes < counted_bytes + (24 << 20), name  # 24 MB for the decoder's library
