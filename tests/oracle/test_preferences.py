"""Objectives of preferences in whole updates, against loops in float64: value, gradient and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from clotho.models.parameters import flat
from clotho.settings.engine import SamplingSection
from clotho.training.update import PolicyLearner
from protocols.rollout import ScoredGroup
from protocols.step import UpdateMetrics
from tests.learner_settings import PREFERENCES, learner_settings
from tests.oracle.preferences import OF_PAIRS, Judged, log_ratio, loss
from tests.training.policies_and_groups import BigramPolicy, random_groups

Array = NDArray[np.float64]
Weights = dict[str, Array]

CASES: dict[str, dict[str, Any]] = {
    "dpo": {}, "dpo, smoothed": {"label_smoothing": 0.2, "nll_weight": 0.5, "beta": 0.4}, "ipo": {"beta": 0.3},
    "kto": {"beta": 0.5}, "kto, weighted": {"desirable_weight": 0.7, "undesirable_weight": 1.3},
    "orpo": {"odds_weight": 0.3}, "simpo": {},
}  # fmt: skip


def log_probabilities(weights: Weights) -> Array:
    """Return those of each token behind each other one, (V, V)."""
    z_V_V = weights["model.weight"] @ weights["lm_head.weight"].T
    return np.asarray(z_V_V - np.log(np.exp(z_V_V).sum(axis=1, keepdims=True)))


def rows(table_V_V: Array, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    """Return the log-probability of each token of a completion."""
    return [float(table_V_V[a, b]) for a, b in zip((prompt[-1], *tokens[:-1]), tokens, strict=True)]


def judged(groups: list[ScoredGroup], policy: Array, reference: Array, *, shift: int = 0) -> list[Judged]:
    """Return the best and the worst completion of each group. shift: behind the prompt of a later group."""
    found = []
    for number, group in enumerate(groups):
        prompt = groups[(number + shift) % len(groups)].group.prompt.tokens
        for better, pick in ((True, max), (False, min)):
            completion = group.group.completions[group.rewards.index(pick(group.rewards))]
            parts = [rows(table, prompt, completion.tokens) for table in (policy, reference)]
            found.append(Judged(pair=number, better=better, policy=parts[0], reference=parts[1]))
    return found


def differences(value: Callable[[Weights], float], at: Weights, *, step: float = 1e-6) -> Weights:
    """Return the gradient by central differences."""
    found = {}
    for name, array in at.items():
        found[name] = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            sides = []
            for sign in (1.0, -1.0):
                moved = array.copy()
                moved[place] += sign * step
                sides.append(value({**at, name: moved}))
            found[name][place] = (sides[0] - sides[1]) / (2 * step)
    return found


def float64(tree: Any) -> Weights:
    """Return the arrays of a policy by name."""
    return {name: np.array(array, dtype=np.float64) for name, array in flat(tree).items()}


def settings_of(name: str, **keys: Any) -> Any:
    """Return those of a learner whose step is the gradient; the reference policy has other weights."""
    keys |= {} if name in ("orpo", "simpo") else {"objective_reference": "base"}
    return learner_settings(
        objective=name, warmup_steps=0, optimizer="sgd", learning_rate=1.0, momentum=0.0, max_grad_norm=0.0,
        layout="padded", **keys,
    )  # fmt: skip


@pytest.mark.parametrize("budget", [1024, 8], ids=["one micro-batch", "a pair each"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_float64(case: str, budget: int) -> None:
    """To 1e-6: the best and the worst completion of each group, whichever micro-batch they are in."""
    name = case.partition(",")[0]
    policy, groups = BigramPolicy(), random_groups(5, groups=4, size=3, seed=1)
    settings = settings_of(name, micro_batch_tokens=budget, **CASES[case])
    before, frozen = float64(policy.trainable()), log_probabilities(float64(policy._frozen))
    others = judged(groups, log_probabilities(before), frozen, shift=1)
    point = max(0.0, float(np.mean([log_ratio(one) for one in others])))

    def slow(weights: Weights) -> float:
        found = judged(groups, log_probabilities(weights), frozen)
        return loss(name, found, settings.objective, reference_point=point)

    update = PolicyLearner(policy, settings, SamplingSection(), steps=9).update(groups)
    assert update.metrics.loss == pytest.approx(slow(before), abs=1e-6)
    after, expected = float64(update.parameters), differences(slow, before)
    for weight in before:
        np.testing.assert_allclose(before[weight] - after[weight], expected[weight], atol=1e-6)
    metrics: UpdateMetrics = update.metrics
    assert (metrics.ratio_mean, metrics.mismatch_kl, metrics.clip_fraction) == (1.0, 0.0, 0.0)
    assert metrics.trained_tokens == sum(len(one.policy) for one in others)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    """To 1e-5: what TRL 1.16.0 computes with PyTorch for the same policy, reference policy and tokens."""
    recorded = json.loads((Path(__file__).parent / "trl_losses.json").read_text(encoding="utf-8"))[name]
    policy, groups = BigramPolicy(), random_groups(5, groups=4, size=3, seed=1)
    before = float64(policy.trainable())
    update = PolicyLearner(policy, settings_of(name, **recorded["settings"]), SamplingSection(), steps=9).update(groups)
    assert update.metrics.loss == pytest.approx(recorded["loss"], abs=1e-5)
    for weight, after in float64(update.parameters).items():
        np.testing.assert_allclose(before[weight] - after, recorded["gradient"][weight], atol=1e-5)


def test_the_loops_know_every_objective_of_preferences() -> None:
    """An objective without an oracle is not verified."""
    assert {*OF_PAIRS, "kto"} == {*PREFERENCES} == {case.partition(",")[0] for case in CASES}


def test_metrics_are_means_over_pairs() -> None:
    """Accuracy and margin of the implicit reward, and the log-ratios of better and worse completions."""
    policy, groups = BigramPolicy(), random_groups(5, groups=4, size=2, seed=3)
    tables = (log_probabilities(float64(tree)) for tree in (policy.trainable(), policy._frozen))
    ratios = [log_ratio(one) for one in judged(groups, *tables)]
    better, worse = np.array(ratios[::2]), np.array(ratios[1::2])
    learner = PolicyLearner(policy, settings_of("dpo", micro_batch_tokens=8), SamplingSection(), steps=9)
    metrics = learner.update(groups).metrics
    assert metrics.preference_accuracy == pytest.approx(float((better > worse).mean()))
    assert metrics.preference_margin == pytest.approx(0.1 * float((better - worse).mean()), abs=1e-5)
    assert metrics.better_log_ratio == pytest.approx(float(better.mean()), abs=1e-5)
    assert metrics.worse_log_ratio == pytest.approx(float(worse.mean()), abs=1e-5)


def test_the_first_snapshot_is_the_reference_by_default() -> None:
    """Before the first update, all log-ratios and the reference point are 0; afterwards they are not."""
    groups = random_groups(5, groups=4, size=2, seed=3)
    policy = BigramPolicy()
    snapshot = replace(settings_of("kto"), objective=learner_settings(objective="kto").objective)
    learner = PolicyLearner(policy, snapshot, SamplingSection(), steps=9)
    first = learner.update(groups).metrics
    assert first.loss == pytest.approx(0.5, abs=1e-6)
    assert first.better_log_ratio == pytest.approx(0.0, abs=1e-6)
    assert learner.update(groups).metrics.better_log_ratio != 0.0
