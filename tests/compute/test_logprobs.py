"""Teacher-forced log-probabilities and entropies."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from actors.compute.logprobs import TeacherForcing, token_scores
from actors.compute.trees import flat
from tests.compute.learning import VOCAB, largest_difference, tiny_policy


def slow_scores(logits_V: np.ndarray, target: int, temperature: float) -> tuple[float, float]:
    """Log-probability and entropy of one token, in float64, from the definition."""
    p_V = np.exp(logits_V.astype(np.float64) / temperature)
    p_V /= p_V.sum()
    return float(np.log(p_V[target])), float(-(p_V * np.log(p_V)).sum())


def test_scores_by_hand() -> None:
    """Logits ln 1, ln 2, ln 1: p = 1/4, 1/2, 1/4; the entropy is 1.5 bits."""
    scores = token_scores(mx.log(mx.array([[1.0, 2.0, 1.0]])), mx.array([1]), temperature=1.0)
    assert scores.logp_N.item() == pytest.approx(math.log(0.5))
    assert scores.entropy_N.item() == pytest.approx(1.5 * math.log(2.0))


def test_temperature_divides_the_logits() -> None:
    """Logits 0 and 2 ln 3 at temperature 2: p = 1/4, 3/4."""
    scores = token_scores(mx.array([[0.0, 2.0 * math.log(3.0)]]), mx.array([1]), temperature=2.0)
    assert scores.logp_N.item() == pytest.approx(math.log(0.75))


def test_the_entropy_has_its_own_gradient() -> None:
    """dH/dz_j = -p_j (log p_j + H)."""
    z_V = mx.array([0.3, -1.0, 0.7, 0.0])
    gradient_V = mx.grad(lambda z: token_scores(z[None], mx.array([0]), temperature=1.0).entropy_N[0])(z_V)
    p_V = np.array(mx.softmax(z_V), dtype=np.float64)
    H = -(p_V * np.log(p_V)).sum()
    np.testing.assert_allclose(np.array(gradient_V), -p_V * (np.log(p_V) + H), atol=1e-6)


def test_words_that_are_never_said_leave_entropy_and_gradient_finite() -> None:
    """A logit of minus infinity: probability 0, entropy that of the others."""
    z_N_V = mx.array([[0.0, -math.inf, 0.0]])
    scores = token_scores(z_N_V, mx.array([0]), temperature=1.0)
    assert scores.entropy_N.item() == pytest.approx(math.log(2.0))
    gradient = mx.grad(lambda z: sum(s.sum() for s in token_scores(z, mx.array([0]), temperature=1.0)))(z_N_V)
    assert np.isfinite(np.array(gradient)).all()


TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 0, 0]]
POSITIONS = [2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
TARGETS = [1, 5, 9, 2, 6, 3, 1, 8, 2, 8]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_those_of_the_whole_model_one_token_at_a_time(temperature: float) -> None:
    """The slow twin: full logits of each row alone, without padding, softmax in float64."""
    policy = tiny_policy()
    forcing = TeacherForcing(policy.model, VOCAB)
    scores = forcing(mx.array(TOKENS), mx.array(POSITIONS), mx.array(TARGETS), temperature=temperature)
    for n, (position, target) in enumerate(zip(POSITIONS, TARGETS, strict=True)):
        row, column = divmod(position, 8)
        logits_V = np.array(policy.model(mx.array([TOKENS[row][: column + 1]]))[0, -1])
        logp, entropy = slow_scores(logits_V, target, temperature)
        assert scores.logp_N[n].item() == pytest.approx(logp, abs=2e-5)
        assert scores.entropy_N[n].item() == pytest.approx(entropy, abs=2e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_running_the_head_in_pieces_changes_neither_scores_nor_gradients(kind: str, tied: bool) -> None:
    """Three rows at a time, recomputed for the gradient; the head's own weights, tied or not, get theirs."""
    policy = tiny_policy(kind=kind, tied=tied)
    parameters = policy.trainable()
    results = []
    for budget in (10_000, 3 * VOCAB):
        forcing = TeacherForcing(policy.model, VOCAB, budget=budget)

        def loss(traced: dict[str, object], forcing: TeacherForcing = forcing) -> mx.array:
            with policy.using(traced):
                scores = forcing(mx.array(TOKENS), mx.array(POSITIONS), mx.array(TARGETS), temperature=0.8)
            return mx.sum(scores.logp_N * mx.arange(10)) + mx.sum(scores.entropy_N)

        with policy.using(parameters):
            results.append(mx.value_and_grad(loss)(parameters))
            mx.eval(results[-1])
    (whole, whole_gradient), (pieces, pieces_gradient) = results
    assert pieces.item() == pytest.approx(whole.item(), rel=1e-6)
    assert largest_difference(whole_gradient, pieces_gradient) < 1e-4
    assert max(np.abs(np.array(g)).max() for g in flat(whole_gradient).values()) > 1e-2
