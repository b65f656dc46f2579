"""Sampler and learner agree about the same tokens."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest

from actors.compute.parity import probe
from actors.compute.trees import flat, nested
from tests.compute.learning import Bigram, BigramPolicy, tiny_policy
from tests.models import ARCHITECTURES, tiny


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_cached_decoding_and_teacher_forcing_agree(temperature: float) -> None:
    """In float32 to 1e-4 nats, with a moved adapter, at any temperature; greedy counts as untempered."""
    policy = tiny_policy()
    moved = {name: value + 0.05 for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    report = probe(policy, (1, 2, 3), (4, 5, 6, 7, 8), temperature)
    assert report.tokens == 5
    assert 0.0 <= report.mean_difference <= report.max_difference < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_agree_on_every_kind_of_architecture(architecture: str) -> None:
    """Dense, sliding windows, experts, recurrent and hybrid; beyond the window of eight tokens where there is one."""
    policy = BigramPolicy(tiny(architecture), vocab_size=64)
    policy.model.eval()
    report = probe(policy, range(1, 13), (4, 5, 6, 7, 8, 9), 0.8)
    assert report.max_difference < 2e-4


class ForgetsItsCache(Bigram):
    """Decoding from a cache gives other logits than the whole sequence at once: a broken cache."""

    layers: tuple[()] = ()

    def __call__(self, tokens_B_S: mx.array, cache: Any = None) -> mx.array:
        logits_B_S_V = super().__call__(tokens_B_S)
        return logits_B_S_V * 2.0 if cache is not None else logits_B_S_V


def test_a_broken_cache_is_seen() -> None:
    """The probe compares two computations, not one with itself."""
    report = probe(BigramPolicy(ForgetsItsCache()), (1, 2), (3, 4), 1.0)
    assert report.max_difference > 0.1


def test_probabilities_that_are_not_numbers_are_reported_as_such() -> None:
    """NaN weights give a difference that no threshold accepts."""
    policy = tiny_policy()
    broken = {name: value * math.nan for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(broken), version=1, step=1, fingerprint="broken")
    assert not math.isfinite(probe(policy, (1, 2), (3, 4), 1.0).max_difference)


@pytest.mark.parametrize(("prompt", "tokens"), [((), (1,)), ((1,), ())])
def test_a_probe_of_nothing_is_refused(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """There is no difference to take the maximum of."""
    with pytest.raises(ValueError, match="at least one token"):
        probe(tiny_policy(), prompt, tokens, 1.0)
