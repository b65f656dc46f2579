"""Log-probabilities, entropies and cross-entropies of logits, and their gradients in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from clotho.scoring.token_scores import SampledTokens, SamplingDistribution, Teacher, score
from tests.scoring.scored import token_scores

PLAIN = SamplingDistribution(1.0)
LAWS = [PLAIN, SamplingDistribution(0.6), SamplingDistribution(1.7, ((3, 2.0), (0, -1.5)))]


def oracle(
    logits_V: np.ndarray, target: int, distribution: SamplingDistribution, support_K: list[int] | None = None
) -> tuple[float, float]:
    """Return log-probability and entropy of one token in float64 from the definition."""
    z_V = logits_V.astype(np.float64).copy()
    for token, addend in distribution.logit_bias:
        z_V[token] += addend
    z_V /= distribution.temperature
    allowed = list(range(len(z_V))) if support_K is None else support_K
    p = np.exp(z_V[allowed] - z_V[allowed].max())
    p /= p.sum()
    return float(np.log(p[allowed.index(target)])), float(-(p[p > 0] * np.log(p[p > 0])).sum())


def difference(function: Callable[[np.ndarray], float], x_V: np.ndarray) -> np.ndarray:
    """Return the gradient by central differences in float64."""
    step, gradient_V = 1e-6, np.zeros_like(x_V)
    for i in range(len(x_V)):
        up, down = x_V.copy(), x_V.copy()
        up[i], down[i] = up[i] + step, down[i] - step
        gradient_V[i] = (function(up) - function(down)) / (2 * step)
    return gradient_V


def test_scores_by_hand() -> None:
    """Logits ln 1, ln 2, ln 1: p = 1/4, 1/2, 1/4; the entropy is 1.5 bits."""
    scores = token_scores(mx.log(mx.array([[1.0, 2.0, 1.0]])), mx.array([1]), distribution=PLAIN)
    assert scores.logp_N.item() == pytest.approx(math.log(0.5))
    assert scores.entropy_N.item() == pytest.approx(1.5 * math.log(2.0))


def test_gradients_by_hand() -> None:
    """p = 1/4, 1/2, 1/4, token 1: d logp = (-1/4, 1/2, -1/4); dH_i = -p_i (log p_i + H) = ln 2 (1/8, -1/4, 1/8)."""
    logits_1_V = mx.log(mx.array([[1.0, 2.0, 1.0]]))
    logp = mx.grad(lambda z: token_scores(z, mx.array([1]), distribution=PLAIN).logp_N[0])(logits_1_V)
    entropy = mx.grad(lambda z: token_scores(z, mx.array([1]), distribution=PLAIN).entropy_N[0])(logits_1_V)
    np.testing.assert_allclose(np.array(logp), [[-0.25, 0.5, -0.25]], atol=1e-6)
    np.testing.assert_allclose(np.array(entropy), math.log(2) * np.array([[0.125, -0.25, 0.125]]), atol=1e-6)


def test_bias_and_temperature_by_hand() -> None:
    """Logits 0 and 0, ln 9 added to the second, at temperature 2: p = 1/4, 3/4."""
    scores = token_scores(
        mx.zeros((1, 2)), mx.array([1]), distribution=SamplingDistribution(2.0, ((1, math.log(9.0)),))
    )
    assert scores.logp_N.item() == pytest.approx(math.log(0.75))


@pytest.mark.parametrize("support", [None, [1, 3, 4]])
@pytest.mark.parametrize("distribution", LAWS)
def test_scores_and_gradients_equal_their_definition(
    distribution: SamplingDistribution, support: list[int] | None
) -> None:
    """The reference is in float64 with finite differences, for both scores at once."""
    logits_N_V, target_N = np.random.default_rng(0).normal(size=(3, 6)) * 2, [3, 1, 4]
    support_N_K = None if support is None else mx.array([[4, 1, 3, -1]] * 3)
    g_logp_N, g_entropy_N = [0.7, -1.3, 0.2], [-0.4, 0.9, 1.1]

    def weighted(logits_N_V: mx.array) -> mx.array:
        scores = token_scores(logits_N_V, mx.array(target_N), distribution=distribution, support_N_K=support_N_K)
        return mx.sum(scores.logp_N * mx.array(g_logp_N) + scores.entropy_N * mx.array(g_entropy_N))

    scores = token_scores(
        mx.array(logits_N_V, dtype=mx.float32), mx.array(target_N), distribution=distribution, support_N_K=support_N_K
    )
    gradient_N_V = np.array(mx.grad(weighted)(mx.array(logits_N_V, dtype=mx.float32)))
    for n, target in enumerate(target_N):
        expected = oracle(logits_N_V[n], target, distribution, support)
        assert (scores.logp_N[n].item(), scores.entropy_N[n].item()) == pytest.approx(expected, rel=1e-5, abs=1e-6)

        def total(x_V: np.ndarray, n: int = n, target: int = target) -> float:
            logp, entropy = oracle(x_V, target, distribution, support)
            return g_logp_N[n] * logp + g_entropy_N[n] * entropy

        np.testing.assert_allclose(gradient_N_V[n], difference(total, logits_N_V[n]), rtol=1e-5, atol=2e-7)


def test_a_support_equals_a_mask_on_all_other_tokens() -> None:
    """Minus infinity outside the support gives the same scores and the same gradient inside it, and none outside."""
    logits_N_V = mx.random.normal((2, 8), key=mx.random.key(1))
    support_N_K, target_N = mx.array([[2, 5, 6], [7, 0, -1]]), mx.array([6, 0])
    outside_N_V = np.ones((2, 8), dtype=bool)
    outside_N_V[0, [2, 5, 6]] = outside_N_V[1, [7, 0]] = False
    distribution = SamplingDistribution(0.8)

    def loss(logits_N_V: mx.array, support_N_K: mx.array | None) -> mx.array:
        logp_N, entropy_N, _ = token_scores(logits_N_V, target_N, distribution=distribution, support_N_K=support_N_K)
        return mx.sum(logp_N * mx.array([1.0, -2.0]) + 0.5 * entropy_N)

    masked_N_V = mx.where(mx.array(outside_N_V), -math.inf, logits_N_V)
    replayed, replayed_gradient = mx.value_and_grad(loss)(logits_N_V, support_N_K)
    whole, whole_gradient = mx.value_and_grad(loss)(masked_N_V, None)
    assert replayed.item() == pytest.approx(whole.item(), rel=1e-6)
    np.testing.assert_allclose(np.array(replayed_gradient), np.array(whole_gradient), atol=1e-6)
    assert not np.array(replayed_gradient)[outside_N_V].any()


def test_a_support_of_one_token_has_log_probability_zero() -> None:
    """Entropy and gradient are 0 too."""
    support_N_K = mx.array([[2, -1]])
    scores = token_scores(mx.array([[5.0, 1.0, -3.0]]), mx.array([2]), distribution=PLAIN, support_N_K=support_N_K)
    assert (scores.logp_N.item(), scores.entropy_N.item()) == (0.0, 0.0)


def test_tokens_of_probability_zero_leave_finite_scores() -> None:
    """A logit of minus infinity: probability 0, entropy of the others."""
    z_N_V = mx.array([[0.0, -math.inf, 0.0]])
    scores = token_scores(z_N_V, mx.array([0]), distribution=PLAIN)
    assert scores.entropy_N.item() == pytest.approx(math.log(2.0))
    gradient = mx.grad(lambda z: sum(s.sum() for s in token_scores(z, mx.array([0]), distribution=PLAIN)[:2]))(z_N_V)
    np.testing.assert_allclose(np.array(gradient), [[0.5, 0.0, -0.5]], atol=1e-6)


def test_sums_over_a_large_vocabulary_are_exact_to_rounding() -> None:
    """Compared with float64. A sequential sum of 100,000 probabilities would differ by 1e-4."""
    logits_1_V = mx.random.normal((1, 100_000), key=mx.random.key(2)) * 2
    scores = token_scores(logits_1_V, mx.array([7]), distribution=PLAIN)
    expected = oracle(np.array(logits_1_V)[0], 7, PLAIN)
    assert (scores.logp_N.item(), scores.entropy_N.item()) == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_bfloat16_logits_are_scored_in_float32(dtype: mx.Dtype) -> None:
    """The scores equal those of the widened logits. The gradients have the type of the logits."""
    logits_N_V = mx.random.normal((2, 50), key=mx.random.key(3)).astype(dtype)
    target_N = mx.array([4, 9])
    scores = token_scores(logits_N_V, target_N, distribution=PLAIN)
    wide = token_scores(logits_N_V.astype(mx.float32), target_N, distribution=PLAIN)
    assert scores.logp_N.dtype == scores.entropy_N.dtype == mx.float32
    assert scores.logp_N.tolist() == wide.logp_N.tolist()
    gradient = mx.grad(lambda z: mx.sum(token_scores(z, target_N, distribution=PLAIN).logp_N))(logits_N_V)
    assert gradient.dtype == dtype


ALTERNATIVES = [[2, 5, -1], [0, 1, 3], [-1, -1, -1]]
SHARES = [[0.75, 0.25, 0.0], [0.2, 0.5, 0.3], [0.0, 0.0, 0.0]]


def cross_entropy(logits_V: np.ndarray, n: int, distribution: SamplingDistribution) -> float:
    """Return the cross-entropy of one row of the teacher's alternatives in float64 from the definition."""
    rows = zip(ALTERNATIVES[n], SHARES[n], strict=True)
    return sum((-share * oracle(logits_V, token, distribution)[0] for token, share in rows if token >= 0), 0.0)


def test_cross_entropy_by_hand() -> None:
    """Logits ln 1, ln 2, ln 1: p = 1/4, 1/2, 1/4; alternatives 1 and 0 with 3/4 and 1/4: (3/4 + 2/4) ln 2."""
    teacher = Teacher(mx.array([[1, 0]]), mx.array([[0.75, 0.25]]))
    logits_1_V = mx.log(mx.array([[1.0, 2.0, 1.0]]))

    def total(z: mx.array) -> mx.array:
        found = score(z, SampledTokens(mx.array([1]), None, PLAIN, teacher=teacher)).cross_entropy_N
        assert found is not None
        return found[0]

    value, gradient = mx.value_and_grad(total)(logits_1_V)
    assert value.item() == pytest.approx(1.25 * math.log(2.0))
    np.testing.assert_allclose(np.array(gradient), [[0.25 - 0.25, 0.5 - 0.75, 0.25]], atol=1e-6)


@pytest.mark.parametrize("temperatures", [None, [0.5, 2.0, 1.1]])
@pytest.mark.parametrize("support", [None, [1, 3, 4]])
@pytest.mark.parametrize("distribution", LAWS)
def test_each_token_has_its_own_temperature_and_teacher(
    distribution: SamplingDistribution, support: list[int] | None, temperatures: list[float] | None
) -> None:
    """The reference is in float64 with finite differences. The third token has no teacher."""
    logits_N_V, target_N = np.random.default_rng(4).normal(size=(3, 6)) * 2, [3, 1, 4]
    draws = SampledTokens(
        mx.array(target_N),
        None if support is None else mx.array([[4, 1, 3, -1]] * 3),
        distribution,
        None if temperatures is None else mx.array(temperatures),
        Teacher(mx.array(ALTERNATIVES), mx.array(SHARES)),
    )
    weights = [[0.7, -1.3, 0.2], [-0.4, 0.9, 1.1], [0.6, 1.7, -2.0]]

    def weighted(logits_N_V: mx.array) -> mx.array:
        pairs = zip(score(logits_N_V, draws), weights, strict=True)
        return sum((mx.sum(score_N * mx.array(w)) for score_N, w in pairs if score_N is not None), mx.array(0.0))

    narrow_N_V = mx.array(logits_N_V, dtype=mx.float32)
    scores, gradient_N_V = score(narrow_N_V, draws), np.array(mx.grad(weighted)(narrow_N_V))
    for n, target in enumerate(target_N):
        own = distribution if temperatures is None else distribution._replace(temperature=temperatures[n])

        def values(x_V: np.ndarray, n: int = n, target: int = target, own: SamplingDistribution = own) -> list[float]:
            return [*oracle(x_V, target, own, support), cross_entropy(x_V, n, own)]

        def total(x_V: np.ndarray, n: int = n, values: Callable[[np.ndarray], list[float]] = values) -> float:
            return sum(w[n] * value for w, value in zip(weights, values(x_V), strict=True))

        found = [x[n].item() for x in scores if x is not None]
        assert found == pytest.approx(values(logits_N_V[n]), rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(gradient_N_V[n], difference(total, logits_N_V[n]), rtol=1e-5, atol=5e-7)


def test_equal_temperatures_per_token_equal_one_temperature() -> None:
    """One number or an array."""
    logits_N_V, target_N = mx.random.normal((4, 9), key=mx.random.key(5)), mx.array([1, 2, 3, 4])
    one = score(logits_N_V, SampledTokens(target_N, None, SamplingDistribution(0.7)))
    many = score(logits_N_V, SampledTokens(target_N, None, SamplingDistribution(9.0), mx.full(4, 0.7)))
    np.testing.assert_allclose(np.array(many.logp_N), np.array(one.logp_N), rtol=1e-6)
    np.testing.assert_allclose(np.array(many.entropy_N), np.array(one.entropy_N), rtol=1e-6)


def test_without_a_teacher_there_is_no_cross_entropy() -> None:
    """The result is None instead of zero."""
    assert token_scores(mx.zeros((1, 2)), mx.array([1]), distribution=PLAIN).cross_entropy_N is None
