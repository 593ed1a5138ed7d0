"""Break gpuload in one place at a time, and report which test notices: ``python tests/mutants/run.py [NAME …]``.

Each ``*.patch`` in this folder is a mutant: a sentence that says what is broken, the file of tests that noticed it
last, and a patch of a few lines. The script applies the patch to a copy of the working tree, and runs that file until a
test fails. If none does, it runs the tests of the package that the patch changes, and then the entire suite. The exit
status is 1 if a mutant is not noticed. Install the packages of `make test-integrations` first.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["PATCHES", "ROOT", "apply", "changed_module", "noticing_file"]

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PATCHES = {path.stem: path for path in sorted(FOLDER.glob("*.patch"))}
IGNORED_FOLDERS = ("--ignore=tests/project", "--ignore=tests/mutants")
TEST_LIMIT_S = 120  # a mutant may hang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of patches in this folder; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at once (default: one per CPU)")
    options = parser.parse_args()
    if unknown := set(options.names) - PATCHES.keys():
        parser.error(f"no such patches in {FOLDER}: {', '.join(sorted(unknown))}")
    names = options.names or list(PATCHES)
    missed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, (test, seconds) in zip(names, pool.map(noticed_by_its_package, names), strict=True):
            print(f"{name}: {test or 'its package misses it'} ({seconds:.0f} s)", flush=True)
            if test is None:
                missed.append(name)
    for name in list(missed):  # each with all processors
        test, seconds = noticed_by_all(name)
        print(f"{name}: {test or 'NOT NOTICED'} (whole suite, {seconds:.0f} s)", flush=True)
        if test is not None:
            missed.remove(name)
    print(f"{len(names) - len(missed)} of {len(names)} mutants noticed")
    sys.exit(bool(missed))


def apply(name: str, folder: Path, *options: str) -> None:
    """Apply a patch to the files of a folder, which need not be a repository. Raises CalledProcessError if it fails."""
    environment = {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", *options, str(PATCHES[name])]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True, capture_output=True, text=True)


def changed_module(name: str) -> Path:
    """Return the module that a patch changes, relative to the root."""
    [module] = re.findall(r"^\+\+\+ b/(\S+)", PATCHES[name].read_text(), re.MULTILINE)
    return Path(module)


def noticed_by_its_package(name: str) -> tuple[str | None, float]:
    test, seconds = first_failure(name, [noticing_file(name)])
    if test is None:
        test, package_seconds = first_failure(name, list(tests_of(changed_module(name))))
        seconds += package_seconds
    return test, seconds


def noticed_by_all(name: str) -> tuple[str | None, float]:
    return first_failure(name, ["--numprocesses", "logical", "--maxprocesses", "8", *IGNORED_FOLDERS, "tests"])


def noticing_file(name: str) -> str:
    """Return the file of tests that the patch names."""
    [path] = re.findall(r"^Noticed by (\S+\.py)\.$", PATCHES[name].read_text(), re.MULTILINE)
    return path


def tests_of(module: Path) -> Iterator[str]:
    """Yield the test file of a module, then the folders that contain it; pytest runs no test twice."""
    folder = Path("tests", *module.parts[1:-1])
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    if (ROOT / folder / f"test_{module.name}").is_file():
        yield str(folder / f"test_{module.name}")
    while folder.name != "tests":
        yield str(folder)
        folder = folder.parent


def first_failure(name: str, arguments: list[str]) -> tuple[str | None, float]:
    """Run tests on a mutant. Return the first test that fails, or None, and the time in seconds."""
    shared = os.environ.get("GPULOAD_SHARED", str(ROOT.parent / "shared"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}"]
    with tempfile.TemporaryDirectory(prefix="mutant-") as copy:
        for path in list_files():
            target = Path(copy, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target)
        apply(name, Path(copy))
        start = time.monotonic()
        result = subprocess.run(
            [*command, "-m", "not exhaustive", "--no-header", "--tb=no", "-rfE", *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": copy, "OMP_NUM_THREADS": "1", "GPULOAD_SHARED": shared},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - start
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", result.stdout, re.MULTILINE)
    if result.returncode in (1, 2) and failed:
        return failed[0], seconds
    if result.returncode in (0, 5):  # all tests passed, or there were none
        return None, seconds
    raise RuntimeError(f"pytest ended with {result.returncode} on {name}:\n{result.stdout}{result.stderr}")


def list_files() -> list[str]:
    """Return the files of the working tree that git tracks, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for path in output if path and (ROOT / path).is_file()]


if __name__ == "__main__":
    main()
