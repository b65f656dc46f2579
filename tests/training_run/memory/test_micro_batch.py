"""The shape of the largest micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.models import blocked_attention
from clotho.settings.engine import SamplingSection
from clotho.settings.model import ModelSection
from tests.learner_settings import learner_settings
from training_run.memory.micro_batch import BlockPass, MicroBatchShape, largest_micro_batch
from training_run.profile.data import DataSection, RewardSection
from training_run.profile.schema import Profile


def shape(*, prompt: int = 24, completion: int = 41, size: int = 8, **learner: Any) -> MicroBatchShape:
    """Of batches of four groups, in micro-batches of 512 tokens."""
    profile = Profile(
        model=ModelSection(path="model"),
        data=DataSection(train="train.jsonl"),
        rewards=(RewardSection(name="exact"),),
        sampling=SamplingSection(max_tokens=completion, group_size=size),
        learner=learner_settings(**{"batch_size": 4, "micro_batch_tokens": 512, "layout": "padded", **learner}),
    )
    return largest_micro_batch(profile, prompt=prompt, completion=completion)


def test_padded_rows_hold_prompt_and_completion_without_its_last_token() -> None:
    """24 + 40 tokens: eight rows of 64 fill 512; 8 x 41 scored tokens are rounded up to 384."""
    padded = shape()
    assert padded.passes == (BlockPass(rows=8, queries=64, keys=64),)
    assert (padded.positions, padded.scored, padded.several) == (512, 384, True)


def test_a_shared_prompt_counts_once_and_is_attended_to_by_every_completion() -> None:
    """One prompt of 24 and eight completions of 40, each of whose tokens sees 64 keys."""
    shared = shape(layout="shared", batch_size=1)
    assert shared.passes == (BlockPass(rows=1, queries=24, keys=24), BlockPass(rows=8, queries=40, keys=64))
    assert shared.positions == 24 + 8 * 40
    assert not shared.several


def test_pairs_of_query_and_key_exist_at_once_in_one_block_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 64 and blocks of 16 queries; a model that cannot divide attention has all pairs."""
    shared = shape(layout="shared", batch_size=1)
    assert shared.pairs(divides=True) == shared.pairs(divides=False) == (24 * 24 + 8 * 40 * 64, 0)
    monkeypatch.setattr(blocked_attention, "MOST_KEYS", 24)
    monkeypatch.setattr(blocked_attention, "QUERIES", 16)
    assert shared.pairs(divides=True) == (24 * 24, 8 * 16 * 64)
    assert shared.pairs(divides=False) == (24 * 24 + 8 * 40 * 64, 0)


def test_mini_batches_are_cut_apart_before_micro_batches_are() -> None:
    """Four groups of two in one step are 512 tokens; in four steps, each has 128."""
    assert shape(size=2).positions == 512
    quarter = shape(size=2, num_minibatches=4)
    assert quarter.positions == 128
    assert not quarter.several


def test_a_large_batch_is_not_laid_out_as_a_whole() -> None:
    """The largest part of a million sequences is that of a few."""
    assert shape(batch_size=1_000_000).passes == shape().passes
