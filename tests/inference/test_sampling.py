"""Drawing tokens: the right distribution, the right support, and nothing at the edges of float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from clotho.inference.sampling import choose_token, invert_cdf, row_parameters, sample, uniforms
from protocols.sampling import Sampling
from tests.inference.engine_helpers import processed


def draws(logits_V: np.ndarray, sampling: Sampling, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` tokens from the same logits, each with a seed of its own."""
    rows = mx.array(np.broadcast_to(logits_V.astype(np.float32), (count, len(logits_V))))
    plan = row_parameters([sampling] * count, len(logits_V))
    uniform = mx.array(uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)))
    sampled = sample(rows, uniform, plan, None)
    return np.array(sampled.token_B), np.array(sampled.logp_B)


@pytest.mark.parametrize("vocabulary", [11, 700, 1280])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.8), Sampling(top_k=7), Sampling(min_p=0.05)],
    ids=["plain", "temperature", "top-p", "top-k", "min-p"],
)
def test_tokens_are_drawn_in_proportion_to_their_probability(vocabulary: int, sampling: Sampling) -> None:
    """Chi-square of 10,000 draws against the twin's distribution, in one stage and in two, stays below 5 sigma."""
    logits_V = np.random.default_rng(3).normal(size=vocabulary)
    expected_V = np.exp(processed(logits_V, (), sampling))
    token_B, logp_B = draws(logits_V, sampling, 10_000)
    assert (expected_V[token_B] > 0).all()
    np.testing.assert_allclose(logp_B, np.log(expected_V[token_B]), atol=1e-4)
    common = expected_V * 10_000 >= 10
    observed = np.append(np.bincount(token_B, minlength=vocabulary)[common], (~common)[token_B].sum())
    wanted = np.append(expected_V[common], expected_V[~common].sum()) * 10_000
    chi_square = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9))[wanted > 0].sum()
    freedom = (wanted > 0).sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_masked_token_is_never_drawn_whatever_the_uniform() -> None:
    """At both ends of the uniform's range, and between masked tokens, a token of positive weight is chosen."""
    weight = np.zeros((6, 640), dtype=np.float32)
    weight[:, [130, 400]] = 1.0, 2.0
    edge = np.array([[2.0**-24, 2.0**-24], [1 - 2.0**-24, 1 - 2.0**-24]] * 3, dtype=np.float32)
    for weights in (weight, weight[:, 120:410]):
        index, total = choose_token(mx.array(weights), mx.array(edge))
        assert set(np.array(index).tolist()) == {
            130 - 120 * (weights is not weight),
            400 - 120 * (weights is not weight),
        }
        np.testing.assert_array_equal(np.array(total), np.full(6, 3.0))


def test_a_target_that_rounding_puts_beyond_the_last_prefix_takes_the_heaviest() -> None:
    """With a uniform of exactly 1, which is never sampled, the heaviest index is returned instead of the first."""
    index, _ = invert_cdf(mx.array([[0.0, 1.0, 3.0, 0.0]]), mx.array([[1.0]]))
    assert index.item() == 2


def test_top_p_keeps_the_likeliest_token_however_small_p_is() -> None:
    """The support is never empty."""
    token_B, logp_B = draws(np.array([0.1, 0.2, 0.3]), Sampling(top_p=1e-6), 50)
    assert set(token_B.tolist()) == {2}
    np.testing.assert_allclose(logp_B, 0.0, atol=1e-6)


def test_greedy_takes_the_first_of_equal_logits_and_reports_the_untempered_probability() -> None:
    """Temperature 0 ignores the filters."""
    token_B, logp_B = draws(np.array([0.0, 1.0, 1.0, -1.0]), Sampling(temperature=0.0, top_k=1), 1)
    assert token_B.tolist() == [1]
    np.testing.assert_allclose(logp_B, [1.0 - np.log(1 + 2 * np.e + np.exp(-1))], atol=1e-6)


def test_a_plan_without_settings_has_no_arrays() -> None:
    """What no row uses is not computed: plain rows need neither sort, nor penalty, nor bias, nor scaling."""
    plan = row_parameters([Sampling(), None, Sampling(top_k=500)], 400)
    assert not plan.all_greedy
    unused = (plan.greedy_B, plan.inverse_temperature_B, plan.filters, plan.penalty_B, plan.bias)
    assert all(setting is None for setting in unused)
    assert plan.top_logprobs == 0
    assert plan.recording is None


def test_only_rows_that_filter_and_are_asked_to_record_do() -> None:
    """Supports are as wide as the largest top-k among them; a greedy row and one that keeps every token have none."""
    settings = [
        Sampling(top_k=9),
        Sampling(top_k=5, top_p=0.9),
        Sampling(),
        Sampling(temperature=0.0, top_k=8),
        Sampling(top_k=6),
        Sampling(top_k=500),
        None,
    ]
    recording = row_parameters(settings, 400, recorded=[5, 4, 3, 2, 1]).recording
    assert recording is not None
    assert (np.array(recording.row_R).tolist(), recording.width) == ([1, 4], 6)


def test_alternatives_come_best_first() -> None:
    """As many as asked for, with log-probabilities of the processed distribution."""
    logits = np.array([0.0, 3.0, 1.0, 2.0])
    plan = row_parameters([Sampling(temperature=2.0, top_logprobs=3)], 4)
    sampled = sample(mx.array(logits[None].astype(np.float32)), mx.array([[0.5, 0.5]]), plan, None)
    assert sampled.top_token_B_N is not None
    assert sampled.top_logp_B_N is not None
    assert np.array(sampled.top_token_B_N).tolist() == [[1, 3, 2]]
    expected = processed(logits, (), Sampling(temperature=2.0))
    np.testing.assert_allclose(np.array(sampled.top_logp_B_N)[0], expected[[1, 3, 2]], atol=1e-5)
