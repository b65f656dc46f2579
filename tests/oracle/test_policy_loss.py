"""Every objective, aggregation, correction and penalty against loops in float64: value, and gradient by differences."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.settings.learner import LearnerSection
from clotho.training.objectives.contract import ObjectiveInputs
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import TokenLossInputs, initial_loss_coefficients, loss_weights, policy_loss
from tests.learner_settings import OF_TOKENS, learner_settings
from tests.oracle.policy_loss import TOKEN_LOSSES, Example, Rows, loss, slopes

MAX_TOKENS = 9
TO_SAMPLER = {"ratio_reference": "sampler", "correction": "off"}
PENALTIES = {"kl_beta": 0.3, "entropy_weight": 0.2}

CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, its recipe": {"objective": name} for name in TOKEN_LOSSES},
    **{
        f"{name}, ratio to the sampler": {"objective": name, "clip_low": 0.1, "clip_high": 0.1, **TO_SAMPLER}
        for name in ("gspo", "gspo_token", "rloo")
    },
    "dppo_tv, narrow": {"objective": "dppo_tv", "clip_low": 0.1, "clip_high": 0.1},
    **{
        f"aggregation {kind}": {"objective": "grpo", "loss_aggregation": kind}
        for kind in ("token_mean", "sequence_mean", "token_sum", "group_mean")
    },
    **{
        f"correction {kind}": {"objective": "grpo", "ratio_reference": "batch_start", "correction": kind, **bounds}
        for kind, bounds in (
            ("off", {}),
            ("truncate", {"correction_low": 0.7, "correction_high": 1.3}),
            ("mask", {"correction_low": 0.7, "correction_high": 1.3}),
            ("truncate_sequence", {"correction_low": 0.5, "correction_high": 1.5}),
            ("reject_sequence", {"correction_low": 0.5, "correction_high": 1.5}),
            ("reject_geometric", {"correction_low": 0.9, "correction_high": 1.1}),
        )
    },
    **{
        f"kl {kind}, unbiased {unbiased}": {"objective": "grpo", "kl_estimator": kind, "kl_unbiased": unbiased}
        for kind in ("k1", "k2", "k3", "abs")
        for unbiased in (False, True)
    },
    "dual clip": {"objective": "grpo", "dual_clip": 1.2},
    "outliers": {"objective": "grpo", "outlier_low": 0.5, "outlier_high": 1.9},
    "off-policy mask": {"objective": "grpo", "off_policy_mask": 0.02},
    "sapo, other temperatures": {"objective": "sapo", "sapo_tau_pos": 2.0, "sapo_tau_neg": 0.5},
}


def batch(seed: int) -> tuple[list[Example], Rows]:
    """Five completions of two groups, one to six tokens, some of which do not count; and log-probabilities."""
    rng = np.random.default_rng(seed)
    examples, rows = [], []
    for group in (0, 0, 0, 1, 1):
        T = int(rng.integers(1, 7))
        logp = rng.uniform(-3.0, -0.1, T)
        learned = rng.random(T) < 0.8
        learned[0] = True
        examples.append(
            Example(
                group=group,
                behaviour=(logp + rng.normal(0, 0.3, T)).tolist(),
                proximal=(logp + rng.normal(0, 0.2, T)).tolist(),
                reference=(logp + rng.normal(0, 0.5, T)).tolist(),
                advantage=[float(rng.normal())] * T,
                entropy=rng.uniform(0.1, 2.0, T).tolist(),
                learned=learned.tolist(),
            )
        )
        rows.append(logp.tolist())
    return examples, rows


def inputs(examples: list[Example], settings: LearnerSection, *, several_steps: bool) -> TokenLossInputs:
    """The same batch in the learner's form, with two tokens of padding at the end."""
    groups = sorted({e.group for e in examples})
    lengths = [[len(e.indices()) for e in examples if e.group == g] for g in groups]
    shares = np.concatenate(loss_weights(settings.objective.loss_aggregation, lengths, max_tokens=MAX_TOKENS))

    def tokens(values: list[list[float]]) -> mx.array:
        row = [v for one in values for v in one]
        return mx.array([*row, row[0], row[0]], dtype=mx.float32)

    def masked(values: list[list[float]]) -> mx.array:
        return mx.array([v for one in values for v in one] + [0.0, 0.0], dtype=mx.float32)

    seen = ObjectiveInputs(
        old_logp_N=tokens([e.behaviour for e in examples]),
        rollout_logp_N=tokens([e.behaviour for e in examples]),
        advantage_N=tokens([e.advantage for e in examples]),
        loss_mask_N=masked([[float(yes) for yes in e.learned] for e in examples]),
        sequence_N=mx.array([i for i, e in enumerate(examples) for _ in e.learned] + [0, 0], dtype=mx.int32),
        sequences=len(examples),
        group_B=mx.array([e.group for e in examples], dtype=mx.int32),
        reference_logp_N=tokens([e.reference for e in examples]),
    )
    return TokenLossInputs(
        tokens=seen,
        proximal_N=tokens([e.proximal for e in examples]) if several_steps else None,
        loss_weight_N=masked([[float(share)] * len(e.learned) for e, share in zip(examples, shares, strict=True)]),
        on_policy_mask_N=masked([[1.0] * len(e.learned) for e in examples]),
    )


@pytest.mark.parametrize("several_steps", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_loops(case: str, several_steps: bool) -> None:
    """To 1e-5 of the loss and 2e-5 of the largest slope, by log-probability and by entropy."""
    name = CASES[case]["objective"]
    settings = learner_settings(
        objective=name, **PENALTIES, **{k: v for k, v in CASES[case].items() if k != "objective"}
    )
    examples, rows = batch(seed=len(case))
    entropies = [e.entropy for e in examples]

    def slow(logp: Rows, entropy: Rows) -> float:
        return loss(
            examples, logp, rows, entropy, settings=settings, max_tokens=MAX_TOKENS, several_steps=several_steps
        )

    def fast(logp_N: mx.array, entropy_N: mx.array) -> mx.array:
        value, _, _ = policy_loss(
            logp_N,
            entropy_N,
            inputs(examples, settings, several_steps=several_steps),
            settings=settings,
            loss_coefficients=initial_loss_coefficients(settings),
            objective=objective(settings.objective),
        )
        return value

    flat = [mx.array([*(v for row in part for v in row), 0.5, 0.5]) for part in (rows, entropies)]
    value, gradient = mx.value_and_grad(fast, argnums=(0, 1))(*flat)
    assert float(value) == pytest.approx(slow(rows, entropies), rel=1e-5, abs=1e-6)
    expected = [
        [s for row in slopes(lambda moved: slow(moved, entropies), rows) for s in row],
        [s for row in slopes(lambda moved: slow(rows, moved), entropies) for s in row],
    ]
    for found, slope in zip(gradient, expected, strict=True):
        scale = max(map(abs, slope))
        np.testing.assert_allclose(np.array(found), [*slope, 0.0, 0.0], atol=2e-5 * scale + 1e-9)


def test_the_loops_know_every_objective_of_tokens() -> None:
    """An objective without an oracle is not verified."""
    assert TOKEN_LOSSES.keys() == {*OF_TOKENS}
