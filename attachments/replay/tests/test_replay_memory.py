"""Replayed groups in the estimate of memory."""

from __future__ import annotations

from msgspec.structs import replace

from attachments.replay.sections import REPLAY, BufferedReplay
from training_run.memory.estimate import estimate_memory
from training_run.memory.micro_batch import most_groups
from training_run.profile.load import load_profile

REPLAYED = BufferedReplay(capacity=8, groups=2)


def test_an_update_has_replayed_groups_beside_those_of_its_batch() -> None:
    """They can all be in one micro-batch."""
    profile = load_profile("local-m3", {"learner.batch_size": 3})
    assert most_groups(profile) == 3
    assert most_groups(REPLAY.put(profile, REPLAYED)) == 5


def test_replayed_groups_make_mini_batches() -> None:
    """Of one new group, two mini-batches are one; with old ones beside it, weights are held midway as well."""
    profile = load_profile("local-m3", {"learner.batch_size": 1})
    usual = replace(profile, learner=replace(profile.learner, num_minibatches=2))
    larger = REPLAY.put(usual, REPLAYED)
    assert estimate_memory(usual.model, usual).midway == 0
    estimate = estimate_memory(larger.model, larger)
    assert estimate.midway >= estimate.optimizer > 0
