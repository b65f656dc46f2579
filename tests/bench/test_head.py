"""`head`: both implementations make the same update from the same rollouts."""

from __future__ import annotations

import numpy as np

from bench import head
from bench.shapes import random_policy


def test_both_heads_can_be_measured() -> None:
    """A small vocabulary keeps the test fast."""
    cost = head.measure(vocabulary=64, tokens=4, width=32, repeats=1)
    assert cost.seconds > 0.0
    assert cost.plain_bytes > 0
    assert len(cost.time_ratios) == 1


def test_both_heads_give_the_same_scores() -> None:
    """The comparison is only valid for equal updates."""
    policy = random_policy(layers=1, width=32, heads=4, key_heads=2, feed_forward=48, vocabulary=64)
    losses = []
    for plain in (True, False):
        learner = head.make_learner(policy, plain=plain)
        metrics = learner.update([head.group(64, 4)]).metrics
        losses.append((metrics.loss, metrics.entropy, metrics.grad_norm))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3, atol=1e-5)
