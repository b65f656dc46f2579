"""The table of a memory estimate."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from clotho.monitoring.summary import print_estimate
from protocols.summary import MemoryEstimate, MemoryPart

SMALL = msgspec.convert(
    {name: 2**20 for name in MemoryEstimate.__struct_fields__ if name != "shipped_shape"}, MemoryEstimate
)
PARTS = [
    MemoryPart(component="logits", bytes=2**20, change="learner.micro_batch_tokens"),
    MemoryPart(component="base weights", bytes=2**30, change="model.path"),
]


def printed(estimate: MemoryEstimate) -> str:
    """What the screen shows."""
    console = Console(file=io.StringIO(), width=120)
    print_estimate(console, estimate, PARTS, 2**34)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_largest_part_comes_first_with_what_makes_it_smaller() -> None:
    """And the total stands beside what the machine has."""
    text = printed(SMALL)
    assert text.index("base weights") < text.index("logits")
    assert all(words in text for words in ("1 GiB", "model.path", "of 16 GiB"))


@pytest.mark.parametrize("shipped", [False, True])
def test_an_estimate_from_a_shipped_configuration_says_so(shipped: bool) -> None:
    """The reader must know that no file of the model was seen."""
    text = printed(msgspec.structs.replace(SMALL, shipped_shape=shipped))
    assert ("configuration that ships with the project" in text) == shipped
