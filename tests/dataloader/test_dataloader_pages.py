"""docs/dataloader.md has a row for each behavior of DataLoader, docs/dataloader-tests.md the tests for each row."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import gpuload as gl

ROOT = Path(__file__).parent.parent.parent
TEST_LINK = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

# The classes of PyTorch's test/test_dataloader.py, and of torchdata's test/stateful_dataloader/test_state_dict.py.
TORCH_TEST_CLASSES = [
    "TestDatasetRandomSplit", "TestTensorDataset", "TestStackDataset", "TestConcatDataset", "TestDataLoader",
    "TestDataLoaderDeviceType", "IntegrationTestDataLoaderDataPipe", "TestStringDataLoader", "TestDictDataLoader",
    "TestDataLoaderPersistentWorkers", "TestNamedTupleDataLoader", "TestCustomPinFn", "TestIndividualWorkerQueue",
    "TestSetAffinity", "TestConvAfterFork", "TestOutOfOrderDataLoader",
]  # fmt: skip
TORCHDATA_TEST_CLASSES = [
    "TestStatefulDataLoaderIterable_shard0", "TestStatefulDataLoaderMap_shard1", "TestStatefulSampler_shard1",
    "TestStatefulDataLoaderGenerator_shard2", "TestStatefulDataLoaderGeneratorNoState_shard2",
    "TestSnapshotZero_shard2", "TestSnapshotEnd_shard2", "TestNumWorkersMismatch_shard3",
    "TestConcurrentDataLoaders_shard3", "TestFastStateDictRequest_shard3", "TestJsonSerDe_shard3",
    "TestInitialState_shard0", "TestStatefulDataLoaderIterable2_shard0", "TestDynamicStateIterableDataset_shard0",
    "TestDatasetIteratorStateDuplication_shard0", "TestFastStateDictRequestRoundRobin_shard3",
    "TestMultiEpochSDL_shard0", "TestEndOfEpochBehavior_shard0", "TestNotStatefulSamplerSDL_shard0",
    "TestMultiEpochState_shard0", "TestSingleIterCalled_shard0", "TestStateInitializationDataset",
    "TestOutOfOrderWithCheckpointing",
]  # fmt: skip


def table_rows(page: str, section: str) -> list[list[str]]:
    """Return the cells of a section's table, row by row."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


ARGUMENTS = table_rows("dataloader.md", "Arguments")
BEHAVIORS = [
    *table_rows("dataloader.md", "What DataLoader does"),
    *table_rows("dataloader.md", "What StatefulDataLoader does"),
]
DATALOADER_TESTS = table_rows("dataloader-tests.md", "What PyTorch's tests of DataLoader cover")
STATE_TESTS = table_rows("dataloader-tests.md", "What torchdata's tests of StatefulDataLoader cover")
ROWS_WITH_TESTS = [*table_rows("dataloader-tests.md", "Arguments"), *DATALOADER_TESTS, *STATE_TESTS]


@cache
def function_names(path: str) -> set[str]:
    file = ROOT / path
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", [*ARGUMENTS, *BEHAVIORS], ids=lambda row: row[0].strip("`"))
def test_each_answer_in_dataloader_md_begins_with_the_same_or_differs(row):
    _, answer = row
    assert answer.startswith(("the same", "differs"))
    assert not TEST_LINK.search(answer), "name tests in docs/dataloader-tests.md only"


@pytest.mark.parametrize("row", ROWS_WITH_TESTS, ids=lambda row: row[0].strip("`"))
def test_each_row_names_tests_that_exist(row):
    named = TEST_LINK.findall(row[-1])
    assert named, "the row lists no tests"
    assert TEST_LINK.sub("", row[-1]).strip(", ") == "", "the row's last cell may contain only names of tests"
    missing = [f"{path}::{name}" for path, name in named if name not in function_names(path)]
    assert missing == [], "docs/dataloader-tests.md names tests that do not exist"


def test_each_row_of_dataloader_md_has_a_row_of_tests():
    assert {row[0] for row in ARGUMENTS} <= {row[0] for row in ROWS_WITH_TESTS}, "add rows to docs/dataloader-tests.md"
    described = sorted(behavior for behavior, _ in BEHAVIORS)
    tested = sorted(behavior for _, behavior, _ in [*DATALOADER_TESTS, *STATE_TESTS])
    assert described == tested, "docs/dataloader.md and docs/dataloader-tests.md must have the same rows"


def test_argument_rows_are_the_arguments_of_dataloader():
    arguments = list(inspect.signature(DataLoader.__init__).parameters)[1:]
    documented = sorted(row[0].strip("`") for row in ARGUMENTS)
    assert documented == sorted(arguments), "edit the table Arguments of docs/dataloader.md"


def test_class_rows_are_the_classes_of_torchs_and_torchdatas_tests():
    def names(table):
        return [re.match(r"`(\w+)`", row[0])[1] for row in table]

    assert set(names(DATALOADER_TESTS)) == set(TORCH_TEST_CLASSES), (
        "edit docs/dataloader-tests.md or TORCH_TEST_CLASSES"
    )
    assert sorted(names(STATE_TESTS)) == sorted(TORCHDATA_TEST_CLASSES), "edit the page or TORCHDATA_TEST_CLASSES"


def test_each_argument_of_loader_is_documented():
    text = inspect.getdoc(gl.Loader).split("Args:")[1].split("Raises:")[0]
    argument_lines = re.findall(r"^ {4}(\w[\w, ]*): ", text, re.MULTILINE)
    documented = [name.strip() for names in argument_lines for name in names.split(",")]
    arguments = list(inspect.signature(gl.Loader.__init__).parameters)[1:]
    assert sorted(documented) == sorted(arguments), "edit the section Args of Loader's docstring"


def test_loader_lacks_only_pin_memory_device_and_switches_on_only_persistent_workers():
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(gl.Loader.__init__).parameters
    different_defaults = {  # None, False and 0 count as equal (`shuffle`, `num_workers`)
        name for name in theirs if name in ours and bool(theirs[name].default) is not bool(ours[name].default)
    }
    assert different_defaults == {"persistent_workers"}
    assert set(theirs) - set(ours) == {"pin_memory_device"}
