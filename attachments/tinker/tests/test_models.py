"""The memory of a pass over a batch of a client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from attachments.tinker.models import pass_bytes
from tests.small_models import configuration, tiny


def estimated(architecture: str, tokens: int, longest: int) -> int:
    """The estimate for a model of two blocks with four heads."""
    base = SimpleNamespace(model=tiny(architecture), config=configuration(architecture, 64), vocab_size=64)
    return pass_bytes(cast(Any, base), tokens, longest)


def quadratic(architecture: str, length: int) -> float:
    """Bytes per pair of tokens of one row that is twice as long, beyond those of two rows."""
    return (estimated(architecture, 2 * length, 2 * length) - 2 * estimated(architecture, length, length)) / length**2


def test_a_block_that_computes_scores_itself_keeps_two_arrays_of_them() -> None:
    """Those of a model whose attention can be divided are one array, and none in long rows."""
    assert quadratic("gemma2", 256) == pytest.approx(2 * quadratic("qwen3", 256))
    assert quadratic("gemma2", 2048) == pytest.approx(quadratic("gemma2", 256))
    assert quadratic("qwen3", 2048) == pytest.approx(0.0, abs=1e-3)


def test_tokens_are_padded_to_rows_of_the_longest_length() -> None:
    """At least one row."""
    assert estimated("qwen3", 256, 64) == pytest.approx(4 * estimated("qwen3", 64, 64), rel=0.01)
    assert estimated("qwen3", 1, 64) == estimated("qwen3", 64, 64)
