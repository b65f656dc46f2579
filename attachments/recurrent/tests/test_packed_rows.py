"""Recurrent layers keep the sequences of a packed row apart."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from attachments.recurrent import layers
from clotho.models.policy import Policy
from tests.scoring.layouts.reference_scores import (
    Shapes,
    largest_error,
    policy_of,
    random_sequences,
    the_plain_way,
    the_way_of,
)
from tests.scoring.layouts.test_check_layout import prove
from tests.small_models import tiny

pytestmark = pytest.mark.needs_float32


@cache
def policy(architecture: str) -> Policy:
    """One policy for all seeds, with the layers of the attachment."""
    made = policy_of(architecture)
    layers.install()
    return made


def shapes(seed: int) -> Shapes:
    """Groups of uneven prompts and completions, in rows of two sequences and more."""
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(1, 9)), rng.integers(1, 30, size=3).tolist()) for _ in range(2)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next", "kimi_linear", "mamba2", "falcon_h1"])
def test_values_and_gradients_are_those_of_sequences_alone(architecture: str, seed: int) -> None:
    """Within 1e-5 relative: log-probabilities, the loss, and the gradient of every parameter."""
    sequences = random_sequences(shapes(seed), seed=seed)
    found = the_way_of("packed", policy(architecture), sequences, budget=200)
    assert largest_error(the_plain_way(policy(architecture), sequences), found) < 1e-5


@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear", "mamba2", "falcon_h1"])
def test_a_state_that_stays_between_sequences_is_refused(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load time sees what a sequence leaves to the next one."""
    model = tiny(architecture)
    layers.install()
    assert prove(model, "packed").gap == 3
    monkeypatch.setattr(layers, "NO_STATE", 0.0)
    with pytest.raises(ValueError, match="logits differ"):
        prove(model, "packed")


def test_layers_of_mlx_lm_that_cannot_reset_a_state_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In packed rows, as without the attachment; the message says what to choose."""
    model = tiny("mamba2")
    monkeypatch.setattr("mlx_lm.models.mamba2.ssm_update", layers.whole)
    with pytest.raises(ValueError, match=r'"packed" does not suit.*cannot reset its state.*"padded" or "auto"'):
        prove(model, "packed")
