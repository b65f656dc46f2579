"""LossSettings of `[learner]`: no key in vain, no contradiction, and nothing refused that makes sense."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.config.dependencies import DEPENDENCES
from clotho.config.keys import settable
from clotho.config.presets import OBJECTIVES, SHAPES, USES
from clotho.config.rules import validate
from protocols.errors import ProfileError
from tests.config.test_profile_rules import TAP, profile

ATROPOS = {"enabled": True, "mock": True}
ENVIRONMENT = {"name": "environment", "factory": "a:B", "mode": "replace", "at": "scorer"}
DECOUPLED = {"ratio_reference": "batch_start", "update_epochs": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "gpro"}, "learner.objective must be one of grpo, dr_grpo, "),
        ({"objective": "grppo"}, "or module:function, not 'grppo'; did you mean grpo?"),
        ({"objective": "dppo_tv", "ratio_reference": "batch_start"}, 'learner.ratio_reference contradicts learner.objective: dppo_tv needs '
         '"sampler"'),
        ({"correction": "truncate"}, "learner.correction would count the disagreement with the sampler twice: learner."
         'ratio_reference = "sampler" has the ratio against the sampler already; set learner.ratio_reference = "batch_start"'),
        ({"correction_high": 3.0}, 'learner.correction_high has no effect: learner.correction = "none" has no bounds'),
        ({"correction_low": 0.5}, "learner.correction_low has no effect"),
        ({**DECOUPLED, "correction": "mask", "correction_low": 2.0, "correction_high": 5.0},
         "learner.correction_low = 2 and learner.correction_high = 5 must have 1 between them"),
        ({**DECOUPLED, "correction": "mask", "correction_high": 0.5}, "must have 1 between them"),
        ({"outlier_high": 0.5}, "learner.outlier_high must be 0 (off) or more than 1, not 0.5"),
        ({"dual_clip": 1.0}, "learner.dual_clip must be 0 (off) or more than 1, not 1"),
        ({"ratio_reference": "batch_start", "clip_low": 0.1}, "learner.clip_low has no effect: with learner.ratio_reference = "
         '"batch_start" and a single optimizer step per batch the ratio is always 1'),
        ({"ratio_reference": "batch_start", "dual_clip": 3.0}, "learner.dual_clip has no effect"),
        ({"ratio_reference": "batch_start", "objective": "sapo", "sapo_tau_pos": 2.0}, "learner.sapo_tau_pos has no effect"),
        ({"proximal": "interpolate"}, "learner.proximal has no effect"),
        ({"ratio_reference": "batch_start", "proximal": "interpolate"}, "learner.proximal has no effect"),
        ({"update_epochs": 2, "proximal": "interpolate"}, "learner.proximal has no effect"),
        ({"advantage": "mean", "advantage_deviation": "sample"}, "learner.advantage_deviation has no effect"),
        ({"advantage": "leave_one_out", "advantage_epsilon": 1e-6}, "learner.advantage_epsilon has no effect"),
        ({"advantage": "environment"}, "learner.advantage has nothing to learn from: "),
        ({"reference": "environment"}, "learner.reference has no effect: learner.kl_beta = 0"),
        ({"kl_beta": 0.1, "reference": "environment"}, "learner.reference has nothing to be computed from: "
         "atropos.enabled = false"),
        ({"distillation_weight": 0.1}, "learner.distillation_weight has no effect: atropos.enabled = false: only "
         "environments bring a teacher"),
        ({"overlong_penalty": 0.5}, "learner.overlong_penalty has no effect"),
        ({"overlong_buffer": 256}, "learner.overlong_buffer is too large: it must be less than sampling.max_tokens"),
        ({"dynamic_limit": 2.0}, "learner.dynamic_limit has no effect"),
        (
            {"dynamic_sampling": True, "dynamic_limit": 1.1, "batch_size": 4},
            "learner.dynamic_limit is too small: so many times learner.batch_size",
        ),
        ({"num_minibatches": 17}, "learner.num_minibatches = 17 must be at most the groups of an update, 16"),
        ({"kl_estimator": "k1"}, "learner.kl_estimator has no effect: learner.kl_beta = 0"),
        ({"kl_in": "reward"}, "learner.kl_in has no effect"),
        ({"kl_unbiased": True}, "learner.kl_unbiased has no effect"),
        ({"kl_target": 0.1}, "learner.kl_target has no effect"),
        ({"reference": "average"}, "learner.reference has no effect"),
        ({"kl_beta": 0.1, "kl_in": "reward", "kl_unbiased": True}, "learner.kl_unbiased has no effect: learner.kl_in"),
        ({"kl_beta": 0.1, "kl_horizon": 5}, "learner.kl_horizon has no effect: learner.kl_target = 0"),
        ({"kl_beta": 0.1, "reference_interval": 5}, "learner.reference_interval has no effect"),
        ({"kl_beta": 0.1, "reference": "snapshot", "ref_ema": 0.9}, "learner.ref_ema has no effect"),
        ({"entropy_decay": 0.9}, "learner.entropy_decay has no effect: learner.entropy_weight = 0"),
        ({"entropy_weight": 0.1, "entropy_decay": 0.9, "entropy_target": 0.2}, "learner.entropy_decay has no effect: "
         "learner.entropy_target moves the weight; leave out one of the two"),
        ({"entropy_step": 0.1}, "learner.entropy_step has no effect"),
        ({"optimizer": "sgd", "beta1": 0.8}, "learner.beta1 has no effect: learner.optimizer must be one that reads "
         "it: adamw, lion and muon"),
        ({"optimizer": "adafactor", "beta2": 0.8}, "learner.beta2 has no effect"),
        ({"optimizer": "lion", "epsilon": 1e-6}, "learner.epsilon has no effect"),
        ({"momentum": 0.5}, "learner.momentum has no effect: learner.optimizer must be one that reads it: muon and"),
        ({"min_learning_rate": 1.0}, "learner.min_learning_rate is too large: it must be at most"),
        ({"schedule": "constant", "min_learning_rate": 1e-6}, "learner.min_learning_rate has no effect"),
        ({"warmup_steps": 100}, "learner.warmup_steps is too large: it must be less than steps"),
    ],
)  # fmt: skip
def test_what_is_in_vain_or_contradicts_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    """One line, which begins with the key."""
    with pytest.raises(ProfileError) as caught:
        validate(profile(learner=settings))
    assert message in str(caught.value)
    assert str(caught.value).startswith("profile: learner.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"async": False, "learner": {"max_staleness": 2}}, "learner.max_staleness has no effect: with async = false"),
        ({"policy": {"kind": "full"}, "learner": {"lora_plus": 4.0}}, "learner.lora_plus has no effect"),
        ({"actors": [TAP], "learner": {"advantage": "environment"}}, "learner.advantage has nothing to learn from"),
        ({"actors": [ENVIRONMENT], "learner": {"advantage": "environment", "overlong_buffer": 8}},
         "learner.overlong_buffer has no effect"),
        ({"actors": [ENVIRONMENT], "learner": {"advantage": "environment", "kl_beta": 0.1, "kl_in": "reward"}},
         "learner.kl_in has no effect"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p = 0.9"),
        ({"sampling": {"min_p": 0.1}}, "sampling.min_p = 0.1"),
        ({"sampling": {"top_k": 257}}, "sampling.top_k = 257"),
    ],
)  # fmt: skip
def test_rules_with_other_sections_are_kept(sections: dict[str, Any], message: str) -> None:
    """What the learner needs of sampling, policy and run."""
    with pytest.raises(ProfileError) as caught:
        validate(profile(**sections))
    assert message in str(caught.value)


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_an_objective_takes_the_settings_that_it_reads_and_no_others(objective: str, name: str) -> None:
    """One of the user's own takes all of them."""
    value = 2.0 if name == "dual_clip" else 0.5
    validate(profile(learner={"objective": "my.module:objective", name: value}))
    settings = {"objective": objective, name: value}
    if name in USES[objective]:
        validate(profile(learner=settings))
        return
    with pytest.raises(ProfileError, match=rf"learner\.{name} has no effect: it belongs to "):
        validate(profile(learner=settings))


@pytest.mark.parametrize(
    "sections",
    [
        {"sampling": {"top_k": 256, "top_p": 0.9, "min_p": 0.1, "logit_bias": [[1, 2.0]]}},
        {"learner": {**DECOUPLED, "correction": "mask", "correction_low": 0.5, "clip_low": 0.1, "dual_clip": 3.0}},
        {"learner": {"ratio_reference": "batch_start", "num_minibatches": 2, "proximal": "interpolate"}},
        {"learner": {"ratio_reference": "batch_start", "objective": "my.module:objective", "clip_low": 0.1}},
        {"learner": {"kl_beta": 0.1, "kl_estimator": "k1", "kl_target": 0.1, "kl_horizon": 5, "kl_unbiased": True}},
        {"learner": {"kl_beta": 0.1, "reference": "average", "ref_ema": 0.9}},
        {
            "learner": {"kl_beta": 0.1, "reference": "snapshot", "reference_interval": 9},
            "collapse_detection": {"kl_high": 1.0},
        },
        {"learner": {"entropy_target": 0.2, "entropy_step": 0.1}},
        {"learner": {"entropy_weight": 0.2, "entropy_decay": 0.9}},
        {"learner": {"optimizer": "muon", "momentum": 0.8, "beta1": 0.8, "epsilon": 1e-6}},
        {"actors": [ENVIRONMENT], "learner": {"advantage": "environment", "outlier_low": 0.5}},
        {"atropos": ATROPOS, "learner": {"advantage": "environment"}},
        {"atropos": ATROPOS, "learner": {"kl_beta": 0.1, "reference": "environment", "distillation_weight": 0.1}},
        {"learner": {"outlier_low": 0.5, "outlier_high": 2.0, "off_policy_mask": 0.1}},
        {"learner": {"overlong_buffer": 255, "overlong_penalty": 0.5, "mask_truncated": True}},
        {"learner": {"num_minibatches": 20}, "replay": {"capacity": 8, "groups": 4}},
        {"learner": {"schedule": "constant", "warmup_steps": 3}},
        {"replay": {"capacity": 8, "sampling": "weighted", "priority": "recency", "exponent": 2.0}},
        {"collapse_detection": {"on_collapse": "rollback", "rollback_rate": 0.5, "max_rollbacks": 1}},
    ],
    ids=str,
)
def test_what_makes_sense_is_allowed(sections: dict[str, Any]) -> None:
    """The rules refuse no honest combination."""
    validate(profile(**sections))


def test_what_decides_about_a_key_stands_before_what_it_decides() -> None:
    """So that keys give up in one pass from the causes to the consequences, never the other way round."""
    last = {path: number for number, rule in enumerate(DEPENDENCES) for path in rule.keys}
    late = [
        (switch, rule.keys)
        for number, rule in enumerate(DEPENDENCES)
        for switch in rule.switches
        if last.get(switch, -1) > number
    ]
    assert late == []
    assert {path for rule in DEPENDENCES for path in rule.keys} <= settable().keys()
