"""Packing of scored groups into padded micro-batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from actors.compute.batch import TOKEN_BUCKET, MicroBatch, bucket, build_batch
from protocols.score import ScoredGroup
from tests.compute.learning import random_groups, scored_group

Row = tuple[tuple[int, ...], tuple[int, ...], float]


def rows(micro: MicroBatch) -> list[Row]:
    """Read a micro-batch back: per sequence its inputs, its completion tokens, and its advantage."""
    S = micro.tokens_B_S.shape[1]
    real_N = micro.weight_N == 1.0
    found = []
    for row, length in enumerate(micro.lengths_B):
        mine_N = real_N & (micro.position_N // S == row)
        inputs = tuple(int(token) for token in micro.tokens_B_S[row, :length])
        targets = tuple(int(token) for token in micro.target_N[mine_N])
        assert micro.position_N[mine_N].tolist() == list(range(row * S + length - len(targets), row * S + length))
        found.append((inputs, targets, float(micro.advantage_N[mine_N][0])))
    return found


def expected(groups: list[ScoredGroup], advantages: list[list[float]]) -> list[Row]:
    """What `rows` must find."""
    return [
        ((g.group.prompt.tokens + c.tokens)[:-1], c.tokens, float(np.float32(a)))
        for g, advantages_G in zip(groups, advantages, strict=True)
        for c, a in zip(g.group.completions, advantages_G, strict=True)
    ]


@pytest.mark.parametrize("budget", [1, 40, 64, 200, 10_000])
def test_every_completion_is_packed_exactly_once(budget: int) -> None:
    """Whatever the budget: the same sequences, in micro-batches within it or of a single sequence."""
    groups = random_groups(50, groups=5)
    advantages = [list(g.rewards) for g in groups]
    batch = build_batch(groups, advantages, budget=budget)
    assert Counter(row for m in batch.micro_batches for row in rows(m)) == Counter(expected(groups, advantages))
    assert batch.tokens == sum(len(c.tokens) for g in groups for c in g.group.completions)
    assert all(m.tokens_B_S.size <= budget or len(m.tokens_B_S) == 1 for m in batch.micro_batches)


def test_a_logit_position_comes_just_before_its_token() -> None:
    """Prompt 7 8, completion 4 5 6: inputs 7 8 4 5; position 1 predicts 4, position 2 predicts 5, position 3 the 6."""
    micro = build_batch([scored_group([[4, 5, 6]], [1.0], prompt=[7, 8])], [[0.5]], budget=100).micro_batches[0]
    assert micro.tokens_B_S.tolist() == [[7, 8, 4, 5, 0, 0, 0, 0]]
    assert micro.position_N[:3].tolist() == [1, 2, 3]
    assert micro.target_N[:3].tolist() == [4, 5, 6]
    assert micro.advantage_N[:3].tolist() == [0.5] * 3


def test_padding_weighs_nothing_and_repeats_a_real_token() -> None:
    """The row of tokens has a bucketed length; what fills it is as finite as the first token."""
    micro = build_batch([scored_group([[4, 5, 6]], [1.0])], [[0.5]], budget=100).micro_batches[0]
    assert len(micro.weight_N) == TOKEN_BUCKET
    assert micro.weight_N.sum() == 3
    for row_N in micro[2:7]:
        assert set(row_N[3:].tolist()) == {row_N[0].item()}


def test_packing_is_deterministic() -> None:
    """Equal groups give equal bytes."""
    first, second = (build_batch(random_groups(50), [[0.0] * 4] * 3, budget=64).micro_batches for _ in range(2))
    assert [[a.tobytes() for a in m] for m in first] == [[a.tobytes() for a in m] for m in second]


def test_lengths_are_bucketed_with_little_waste() -> None:
    """At most 16 lengths per octave, at least as long as asked, and less than 1/8 longer beyond 64 tokens."""
    assert [bucket(n) for n in (1, 8, 9, 64, 65, 129)] == [8, 8, 16, 64, 72, 144]
    assert len({bucket(n) for n in range(1025, 2049)}) <= 16
    assert all(n <= bucket(n) < n + max(8, n / 8) for n in range(1, 4096))


def test_empty_completions_are_left_out() -> None:
    """There is nothing to learn from no tokens; a batch of nothing but such is refused."""
    batch = build_batch([scored_group([[], [3]], [0.0, 1.0])], [[-1.0, 1.0]], budget=100)
    assert batch.tokens == 1
    with pytest.raises(ValueError, match="at least one completion token"):
        build_batch([scored_group([[], []], [0.0, 1.0])], [[-1.0, 1.0]], budget=100)
