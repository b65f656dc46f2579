"""Micro-batches and answers arrive at other ranks as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attachments.ranks.messages import (
    Computed,
    LogprobsShare,
    MicroBatchResult,
    decode_answer,
    decode_instruction,
    encode,
    part,
)
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TeacherRows, TrainingSequence, scored_only


def sequence(number: int, **fields: Any) -> TrainingSequence:
    """Return a completion of three tokens."""
    return scored_only((1, 2, 3), (4, 5, 6 + number))._replace(**fields)


TEACHER = TeacherRows(np.zeros((3, 2), dtype=np.int32), np.full((3, 2), 0.5, dtype=np.float32))
SEQUENCES = [
    sequence(0),
    sequence(1, temperature=0.5, reference_T=np.full(3, -1.0, dtype=np.float32)),
    sequence(2, reference_T=np.zeros(3, dtype=np.float32)),
]


def assert_same(first: object, second: object) -> None:
    """Compare two values, and arrays in them with their types."""
    if isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray)
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)
    elif isinstance(first, tuple):
        assert isinstance(second, type(first))
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize(
    "sequences",
    [
        SEQUENCES[1:],
        [sequence(0, teacher=TEACHER)],
        [sequence(0, supports=(b"\4\0\0\0",) * 3)],
        [sequence(0)._replace(route_I_E=np.arange(2 * sequence(0).inputs, dtype=np.uint8).reshape(-1, 2))],
    ],
    ids=["temperature and reference", "teacher", "support", "routes"],
)
def test_a_micro_batch_is_rebuilt_from_its_message(layout: str, sequences: list[TrainingSequence]) -> None:
    """Every array keeps type, shape and values, and what is missing stays missing."""
    (micro,) = build_micro_batches(sequences, layout=layout, budget=4096)
    message = LogprobsShare(number=7, parts=(part(3, micro),), reference=True)
    found = decode_instruction(encode(message))
    assert isinstance(found, LogprobsShare)
    assert (found.number, found.reference, found.parts[0].index) == (7, True, 3)
    assert_same(micro, found.parts[0].micro_batch())


def test_an_answer_keeps_its_arrays() -> None:
    """Log-probabilities, slopes and limits of the gradient."""
    logp_N = np.array([-1.5, -np.inf], dtype=np.float32)
    result = MicroBatchResult(index=2, logp_N=logp_N, slope_N=-logp_N, cut_N=np.array([0, 3], dtype=np.uint8))
    found = decode_answer(encode(Computed(number=1, fingerprint="f", results=(result,), metrics={"kl": (0.5, 2.0)})))
    assert isinstance(found, Computed)
    assert found.metrics == {"kl": (0.5, 2.0)}
    for name in ("logp_N", "slope_N", "cut_N"):
        assert_same(getattr(result, name), getattr(found.results[0], name))
