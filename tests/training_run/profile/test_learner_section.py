"""Every key of the learner's section changes the update, and sampling that it cannot learn from is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from clotho.models.parameters import Parameters, flat
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.training.update import PolicyLearner, Update
from protocols.errors import ProfileError
from protocols.rollout import ScoredGroup, TeacherTokens
from tests.learner_settings import path_of
from tests.recorded_turns import RecordedTurns
from tests.training.policies_and_groups import BigramPolicy, learner, random_groups, same_bits, tiny_policy
from training_run.profile.keys import KEYS

UNSCALED = {"max_grad_norm": 0.0, "epsilon": 1e-2}
"""Clipping and Adam hide the size of a gradient; these let it be seen."""

CORRECTED = {"ratio_reference": "batch_start", "correction": "truncate"}
TWO_STEPS = {"ratio_reference": "batch_start", "num_minibatches": 2}
OF_PAIRS = {"objective": "dpo", **UNSCALED}

EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "objective": ("cispo", {}),
    "advantage": ("mean", {}),
    "advantage_deviation": ("sample", UNSCALED),
    "advantage_epsilon": (1.0, UNSCALED),
    "gradient_norm": ("length", {"advantage": "optimal_baseline"}),
    "step_scale": ("ess", {}),
    "exponent": (1.0, {"step_scale": "ess"}),
    "base": (0.3, {"step_scale": "ess"}),
    "loss_aggregation": ("sequence_mean", {}),
    "clip_low": (0.01, {}),
    "clip_high": (0.01, {}),
    "dual_clip": (1.05, {}),
    "quadratic_kl": (1.0, {"objective": "dppo_tv"}),
    "sapo_tau_pos": (3.0, {"objective": "sapo"}),
    "sapo_tau_neg": (3.0, {"objective": "sapo"}),
    "mask_truncated": (True, {}),
    "ratio_reference": ("batch_start", {}),
    "correction": ("truncate", {"ratio_reference": "batch_start"}),
    "correction_low": (0.999, CORRECTED),
    "correction_high": (1.01, CORRECTED),
    "outlier_low": (0.9, {}),
    "outlier_high": (1.5, {}),
    "off_policy_mask": (1e-3, {}),
    "kl_beta": (0.5, {}),
    "kl_estimator": ("k2", {"kl_beta": 0.5}),
    "kl_in": ("reward", {"kl_beta": 0.5}),
    "kl_unbiased": (True, {"kl_beta": 0.5}),
    "kl_target": (1e-3, {"kl_beta": 0.5}),
    "kl_horizon": (1, {"kl_beta": 0.5, "kl_target": 1e-3}),
    "reference": ("snapshot", {"kl_beta": 0.5}),
    "reference_interval": (1, {"kl_beta": 0.5, "reference": "snapshot"}),
    "ref_ema": (0.1, {"kl_beta": 0.5, "reference": "average"}),
    "beta": (0.5, OF_PAIRS),
    "objective_reference": ("base", OF_PAIRS),
    "label_smoothing": (0.25, OF_PAIRS),
    "nll_weight": (0.5, OF_PAIRS),
    "desirable_weight": (0.5, {**OF_PAIRS, "objective": "kto"}),
    "undesirable_weight": (0.5, {**OF_PAIRS, "objective": "kto"}),
    "odds_weight": (0.5, {**OF_PAIRS, "objective": "orpo"}),
    "target_margin": (0.5, {**OF_PAIRS, "objective": "simpo"}),
    "entropy_weight": (0.5, {}),
    "entropy_decay": (0.1, {"entropy_weight": 0.5}),
    "entropy_target": (9.0, {}),
    "entropy_step": (0.5, {"entropy_target": 9.0}),
    "distillation_weight": (0.5, {}),
    "optimizer": ("sgd", {}),
    "learning_rate": (2e-2, {}),
    "schedule": ("linear", {}),
    "warmup_steps": (2, {}),
    "min_learning_rate": (5e-3, {"schedule": "cosine"}),
    "beta1": (0.5, {}),
    "beta2": (0.5, {}),
    "epsilon": (1e-2, {}),
    "momentum": (0.5, {"optimizer": "sgd"}),
    "weight_decay": (0.5, {}),
    "max_grad_norm": (1e-3, {"epsilon": 1e-2}),
    "update_epochs": (2, {}),
    "num_minibatches": (2, {}),
}
SAME_BY_LAW = {"micro_batch_tokens", "max_turn_ms", "layout"}
"""They decide how an update is computed, never what it is: their tests compare results."""

IN_THE_ACTORS = {
    "batch_size",
    "max_staleness",
    "max_bad_steps",
    "max_equal_batches",
    "max_failed_batches",
    "dynamic_sampling_max_ratio",
    "overlong_penalty",
}


def some_cut_off(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The same groups; the first completion of each reached its limit."""
    found = []
    for one in groups:
        first, *others = one.group.completions
        completions = (replace(first, finish_reason="length"), *others)
        found.append(replace(one, group=replace(one.group, completions=completions)))
    return found


def with_a_teacher(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The same groups; a teacher would have said 1 or 3 everywhere."""

    def said(tokens: int) -> TeacherTokens:
        return TeacherTokens(tokens=((1, 3),) * tokens, logprobs=((-0.5, -1.5),) * tokens)

    return [replace(g, teacher=tuple(said(len(c.tokens)) for c in g.group.completions)) for g in groups]


def two_updates(**keys: Any) -> Update:
    """The second of two updates of a bigram policy whose ratios leave the clip range on both sides."""
    one = learner(BigramPolicy(), steps=3, **keys)
    one.update(with_a_teacher(some_cut_off(random_groups(5))))
    return one.update(with_a_teacher(some_cut_off(random_groups(5, seed=1))))


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_of_the_learner_changes_the_update(key: str) -> None:
    """No option without effect."""
    value, beside = EFFECTS[key]
    without = parameters_without(tuple(sorted(beside.items())))
    assert not same_bits(without, two_updates(**beside, **{key: value}).parameters)


@cache
def parameters_without(beside: tuple[tuple[str, Any], ...]) -> Parameters:
    """The parameters after two updates with these keys, which many keys are compared with."""
    return two_updates(**dict(beside)).parameters


def test_b_learns_at_a_rate_of_its_own() -> None:
    """LoRA+: with sixteen times the rate B moves sixteen times as far in its first step, and A as before."""
    plain, plus = (learner(tiny_policy(), lora_plus=ratio).update(random_groups(32)) for ratio in (1.0, 16.0))
    one, other = flat(plain.parameters), flat(plus.parameters)
    for name, value in one.items():
        expected = 16.0 * value if name.endswith("lora_b") else value
        assert mx.allclose(other[name], expected, rtol=1e-5, atol=1e-7).item(), name


def test_the_interpolated_batch_start_policy_differs_from_the_computed_one() -> None:
    """With several optimizer steps per batch."""
    computed, interpolated = (
        two_updates(**{**TWO_STEPS, "ratio_reference": kind}) for kind in ("batch_start", "batch_start_interpolated")
    )
    assert not same_bits(computed.parameters, interpolated.parameters)


def test_no_key_of_the_learner_was_forgotten() -> None:
    """Every other key decides only how an update is computed, or takes effect in an actor."""
    known = {f"learner.{path_of(name)}" for name in EFFECTS.keys() | SAME_BY_LAW | IN_THE_ACTORS - {"overlong_penalty"}}
    known |= {"learner.lora_plus", "learner.objective.function", "learner.objective.options", "learner.router_replay"}
    found = {path for path in KEYS if path.startswith("learner.") and ".overlong_penalty." not in path}
    assert {path.removesuffix(".type") for path in found} == {path.removesuffix(".type") for path in known} | {
        "learner.kl_penalty.control",
        "learner.entropy_bonus",
    }


def test_the_budget_of_a_micro_batch_decides_how_often_an_update_pauses() -> None:
    """Smaller parts, more turns for everyone else."""
    pauses = []
    for tokens in (1024, 24):
        lane = RecordedTurns()
        learner(BigramPolicy(), lane=lane, micro_batch_tokens=tokens).update(random_groups(5))
        pauses.append(lane.pauses)
    assert pauses[1] > pauses[0]


@pytest.mark.parametrize(
    "keys",
    [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.1}, {"repetition_penalty": 1.1}],
    ids=lambda keys: next(iter(keys)),
)
def test_sampling_that_the_learner_cannot_evaluate_is_refused(keys: dict[str, Any]) -> None:
    """Honest probabilities: the distribution that was sampled is the one that is differentiated, or none is."""
    with pytest.raises(ProfileError, match=r"sampling\."):
        PolicyLearner(BigramPolicy(), LearnerSection(), SamplingSection(**keys), steps=1)
