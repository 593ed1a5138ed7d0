"""Names, arguments and defaults equal torchvision's, and docs/transforms.md lists them."""

from __future__ import annotations

import enum
import inspect

import pytest
from helpers import peers
from transforms.catalogue import BEGIN, END, PAGE, table
from transforms.specs import SPECS

from gpuload import transforms as T

# torchvision's Lambda has another first argument.
TORCHVISION_NAMES = [name for name, spec in SPECS.items() if spec.torchvision is not None and name != "Lambda"]


def test_table_in_transforms_md_is_up_to_date():
    text = PAGE.read_text()
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert written == table(), f"{PAGE} is out of date, run `python tests/transforms/catalogue.py`"


@pytest.mark.parametrize("name", TORCHVISION_NAMES)
def test_arguments_and_defaults_equal_torchvisions(name):
    def parameters_of(kind: type) -> list[tuple]:
        return [
            (key, value.default.value if isinstance(value.default, enum.Enum) else value.default, value.kind)
            for key, value in inspect.signature(kind).parameters.items()
        ]

    parameters = parameters_of(getattr(T, name))
    torchvision_parameters = parameters_of(getattr(peers.torchvision().transforms.v2, name))
    count = len(parameters) - len(SPECS[name].more)
    assert parameters[:count] == torchvision_parameters
    assert [key for key, _, _ in parameters[count:]] == [*SPECS[name].more], "edit `more` in tests/transforms/specs.py"
    assert inspect.Parameter.empty not in [default for _, default, _ in parameters[count:]]


@pytest.mark.parametrize("name", SPECS)
def test_specs_have_torchvision_arguments_if_torchvision_has_the_transform(name):
    is_in_torchvision = hasattr(peers.torchvision().transforms.v2, name)
    assert is_in_torchvision == (SPECS[name].torchvision is not None), "edit `torchvision` in tests/transforms/specs.py"
