"""The clipped objective, its corrections and its gradient."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from actors.compute.objective import LossInputs, clipped_surrogate, grpo_loss
from protocols.profile import LearnerSection

SETTINGS = LearnerSection(clip_low=0.2, clip_high=0.28)


def surrogate(rho: float, A: float) -> tuple[float, float, bool]:
    """Value, derivative by logp, and whether clipped, for one token of this ratio and advantage."""

    def value(logp_N: mx.array) -> mx.array:
        return clipped_surrogate(logp_N, mx.array([-2.0]), mx.array([A]), clip_low=0.2, clip_high=0.28).objective_N[0]

    logp_N = mx.array([math.log(rho) - 2.0])
    J, gradient_N = mx.value_and_grad(value)(logp_N)
    terms = clipped_surrogate(logp_N, mx.array([-2.0]), mx.array([A]), clip_low=0.2, clip_high=0.28)
    return float(np.array(J)), float(np.array(gradient_N)[0]), bool(terms.clipped_N[0].item())


@pytest.mark.parametrize(
    ("rho", "A", "J", "gradient", "clipped"),
    [
        (1.0, 1.5, 1.5, 1.5, False),
        (1.0, -1.5, -1.5, -1.5, False),
        (1.5, 2.0, 2.56, 0.0, True),
        (1.25, 2.0, 2.5, 2.5, False),
        (0.5, 2.0, 1.0, 1.0, False),
        (0.5, -2.0, -1.6, 0.0, True),
        (1.5, -2.0, -3.0, -3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_surrogate_by_hand(rho: float, A: float, J: float, gradient: float, clipped: bool) -> None:
    """Range [0.8, 1.28]: J = min(rho A, clip(rho) A); dJ/dlogp = rho A where free and 0 where clipped.

    For example rho = 1.5, A = 2: min(3, 1.28 * 2) = 2.56, flat. rho = 1.5, A = -2: min(-3, -2.56) = -3, slope -3.
    """
    value, slope, active = surrogate(rho, A)
    assert value == pytest.approx(J, rel=1e-6)
    assert slope == pytest.approx(gradient, rel=1e-6)
    assert active is clipped


def inputs(N: int, *, seed: int = 0, reference: bool = True) -> tuple[mx.array, mx.array, LossInputs]:
    """Random log-probabilities, entropies and what else the loss takes; ratios straddle the clip range."""
    rng = np.random.default_rng(seed)
    logp_N = -np.abs(rng.normal(size=N)) - 0.3
    return (
        mx.array(logp_N, dtype=mx.float32),
        mx.array(rng.uniform(0.5, 2.0, N), dtype=mx.float32),
        LossInputs(
            behaviour_N=mx.array(logp_N + rng.normal(size=N) * 0.5, dtype=mx.float32),
            advantage_N=mx.array(rng.normal(size=N), dtype=mx.float32),
            weight_N=mx.array((np.arange(N) < N - 2).astype(np.float32)),
            fresh_N=mx.array((np.arange(N) % 2).astype(np.float32)),
            reference_N=mx.array(logp_N + rng.normal(size=N) * 0.3, dtype=mx.float32) if reference else None,
        ),
    )


def oracle(logp_N: np.ndarray, held_N: np.ndarray, entropy_N: np.ndarray, x: LossInputs, s: LearnerSection) -> float:
    """The loss in plain float64 loops; `held_N` is what stop_gradient holds still."""
    b, A, m = (np.array(value, dtype=np.float64) for value in (x.behaviour_N, x.advantage_N, x.weight_N))
    total = 0.0
    for t in range(len(logp_N)):
        old, w = b[t], 1.0
        if s.correction == "truncate":
            old, w = held_N[t], min(math.exp(held_N[t] - b[t]), s.correction_cap)
        rho = math.exp(logp_N[t] - old)
        loss = -w * min(rho * A[t], min(max(rho, 1 - s.clip_low), 1 + s.clip_high) * A[t])
        if x.reference_N is not None:
            d = float(np.array(x.reference_N)[t]) - logp_N[t]
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "abs": abs(d)}[s.kl_estimator]
            loss += s.kl_beta * kl
        total += m[t] * (loss - s.entropy_weight * entropy_N[t])
    return total / float(m.sum())


VARIANTS: list[dict[str, Any]] = [
    {},
    {"correction": "truncate", "correction_cap": 1.2},
    {"kl_beta": 0.1, "kl_estimator": "k1"},
    {"kl_beta": 0.1, "kl_estimator": "k2"},
    {"kl_beta": 0.1, "kl_estimator": "k3", "entropy_weight": 0.05},
    {"kl_beta": 0.1, "kl_estimator": "abs", "correction": "truncate"},
    {"clip_low": 0.05, "clip_high": 0.05},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loss_and_gradient_equal_a_float64_oracle(variant: dict[str, Any]) -> None:
    """Value to 1e-6, gradient to 1e-4 of central differences with step 1e-6."""
    settings = replace(SETTINGS, **variant)
    logp_N, entropy_N, x = inputs(24, reference="kl_beta" in variant)
    loss, gradient_N = mx.value_and_grad(
        lambda logp_N: grpo_loss(logp_N, entropy_N, x, settings=settings, total_tokens=22)[0]
    )(logp_N)
    exact_N, H_N = np.array(logp_N, dtype=np.float64), np.array(entropy_N, dtype=np.float64)
    assert loss.item() == pytest.approx(oracle(exact_N, exact_N, H_N, x, settings), rel=1e-5, abs=1e-6)
    steps_N_N = np.eye(len(exact_N)) * 1e-6
    slopes_N = [
        (oracle(exact_N + e, exact_N, H_N, x, settings) - oracle(exact_N - e, exact_N, H_N, x, settings)) / 2e-6
        for e in steps_N_N
    ]
    np.testing.assert_allclose(np.array(gradient_N), slopes_N, atol=1e-5)


def test_the_entropy_bonus_pulls_by_its_weight() -> None:
    """dL/dH_t = -entropy_weight m_t / T: more entropy, less loss."""
    logp_N, entropy_N, x = inputs(24)
    settings = replace(SETTINGS, entropy_weight=0.3)
    gradient_N = mx.grad(lambda H_N: grpo_loss(logp_N, H_N, x, settings=settings, total_tokens=22)[0])(entropy_N)
    np.testing.assert_allclose(np.array(gradient_N), -0.3 / 22 * np.array(x.weight_N), rtol=1e-6)


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_on_policy_gradient_is_reinforce(correction: str) -> None:
    """Where sampler and learner agree the ratio is 1, nothing is clipped, and dL/dlogp_t = -A_t m_t / T."""
    logp_N, entropy_N, x = inputs(24)
    settings = replace(SETTINGS, correction=correction)
    gradient_N = mx.grad(
        lambda logp: grpo_loss(logp, entropy_N, x._replace(behaviour_N=logp_N), settings=settings, total_tokens=22)[0]
    )(logp_N)
    np.testing.assert_allclose(np.array(gradient_N), -np.array(x.advantage_N * x.weight_N) / 22, rtol=1e-5)


def test_truncated_importance_weighs_by_the_capped_mismatch_and_never_clips() -> None:
    """Learner 3 times as likely, cap 2: weight 2. Half as likely: weight 1/2. Gradient: weight times A."""
    behaviour_N = mx.array([-2.0, -2.0])
    logp_N = behaviour_N + mx.log(mx.array([3.0, 0.5]))
    x = LossInputs(behaviour_N, mx.array([1.0, 1.0]), mx.ones(2), mx.ones(2), None)
    settings = replace(SETTINGS, correction="truncate", correction_cap=2.0)

    def loss(logp_N: mx.array) -> Any:
        return grpo_loss(logp_N, mx.zeros(2), x, settings=settings, total_tokens=2)

    (_, sums), gradient_N = mx.value_and_grad(loss)(logp_N)
    np.testing.assert_allclose(np.array(gradient_N), [-2.0 / 2, -0.5 / 2], rtol=1e-5)
    assert sums.clipped.item() == 0.0


def test_padding_never_changes_loss_gradient_or_metrics() -> None:
    """Tokens of weight zero, whatever else they hold, leave no trace."""
    logp_N, entropy_N, x = inputs(24)
    settings = replace(SETTINGS, kl_beta=0.1, entropy_weight=0.1)
    cut = LossInputs(*(value[:22] for value in x if value is not None))

    def loss(logp_N: mx.array, entropy_N: mx.array, x: LossInputs) -> Any:
        return grpo_loss(logp_N, entropy_N, x, settings=settings, total_tokens=22)

    (full, full_sums), full_N = mx.value_and_grad(loss)(logp_N, entropy_N, x)
    (short, short_sums), short_N = mx.value_and_grad(loss)(logp_N[:22], entropy_N[:22], cut)
    assert full.item() == pytest.approx(short.item(), rel=1e-6)
    np.testing.assert_allclose(np.array(full_N), [*np.array(short_N), 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(np.array(full_sums), np.array(short_sums), rtol=1e-5)


def test_zero_advantages_give_a_zero_gradient() -> None:
    """Without penalty or bonus, a group of equal rewards pulls nowhere at all."""
    logp_N, entropy_N, x = inputs(24, reference=False)
    still = x._replace(advantage_N=mx.zeros(24))
    gradient_N = mx.grad(lambda logp: grpo_loss(logp, entropy_N, still, settings=SETTINGS, total_tokens=22)[0])(logp_N)
    assert np.array(gradient_N).tolist() == [0.0] * 24


def test_metrics_are_sums_over_tokens() -> None:
    """Ratios 1, 2, 1/2 with A = 1: one of three clipped; k3 of the fresh ones with d = ln rho: rho - 1 - ln rho."""
    behaviour_N = mx.array([-1.0, -1.0, -1.0])
    logp_N = behaviour_N + mx.log(mx.array([1.0, 2.0, 0.5]))
    x = LossInputs(behaviour_N, mx.ones(3), mx.ones(3), mx.array([1.0, 1.0, 0.0]), None)
    _, sums = grpo_loss(logp_N, mx.array([0.5, 0.25, 0.25]), x, settings=SETTINGS, total_tokens=3)
    assert sums.clipped.item() == 1.0
    assert sums.ratio.item() == pytest.approx(3.5)
    assert sums.entropy.item() == pytest.approx(1.0)
    assert sums.mismatch.item() == pytest.approx(2.0 - 1.0 - math.log(2.0), rel=1e-5)
    assert sums.loss.item() == pytest.approx(-(1.0 + 1.28 + 0.5), rel=1e-6)
    assert sums.kl.item() == 0.0


def test_a_token_that_the_learner_finds_impossible_stays_finite() -> None:
    """A log-ratio of 500 nats is clamped; neither loss nor gradient overflows."""
    x = LossInputs(mx.array([-500.0, 0.0]), mx.array([-1.0, 1.0]), mx.ones(2), mx.ones(2), mx.array([-900.0, -0.1]))
    settings = replace(SETTINGS, kl_beta=0.1)
    (_, sums), gradient_N = mx.value_and_grad(
        lambda logp: grpo_loss(logp, mx.zeros(2), x, settings=settings, total_tokens=2)
    )(mx.array([0.0, -500.0]))
    assert np.isfinite(np.array([*sums, *gradient_N])).all()
