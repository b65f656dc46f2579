"""Rules for `[learner]`: no setting without effect, no contradiction, and no refusal of a valid combination."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.errors import ProfileError
from tests.training_run.profile.profile_faults import TAP, decoded, fault

MOCK = "mock"
ENVIRONMENT = {"name": "environment", "factory": "a:B", "mode": "replace", "at": "scorer"}
BATCH_START = {"ratio_reference": "batch_start"}
TRUNCATE = {"type": "truncate", "high": 3.0}


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"objective": {"importance_correction": "truncate"}}, "objective.importance_correction"),
        ({"objective": {"outlier_high": 0.5}}, "objective.outlier_high"),
        ({"objective": {"dual_clip": 1.0}}, "objective.dual_clip"),
        ({"objective": {**BATCH_START, "clip_low": 0.1}}, "objective.clip_low"),
        ({"objective": {**BATCH_START, "dual_clip": 3.0}}, "objective.dual_clip"),
        ({"objective": {**BATCH_START, "type": "sapo", "sapo_tau_pos": 2.0}}, "objective.sapo_tau_pos"),
        ({"objective": {"ratio_reference": "batch_start_interpolated"}}, "objective.ratio_reference"),
        ({"objective": {"advantage": "environment"}}, "objective.advantage"),
        ({"objective": {"overlong_penalty": {"type": "linear", "buffer": 512}}}, "objective.overlong_penalty.buffer"),
        ({"objective": {"dynamic_sampling_max_ratio": 1.1}, "batch_size": 4}, "objective.dynamic_sampling_max_ratio"),
        ({"kl_penalty": {"type": "loss", "reference": "environment"}}, "kl_penalty.reference"),
        (
            {"kl_penalty": {"type": "loss", "reference": {"type": "snapshot", "interval": 100}}},
            "kl_penalty.reference.interval",
        ),
        ({"distillation_weight": 0.1}, "distillation_weight"),
        ({"num_minibatches": 17}, "num_minibatches"),
        ({"schedule": {"type": "cosine", "min_learning_rate": 1.0}}, "schedule.min_learning_rate"),
    ],
)
def test_a_setting_that_has_no_effect_or_contradicts_another_is_refused(learner: dict[str, Any], key: str) -> None:
    """The complaint names the key."""
    assert fault(learner=learner) == f"learner.{key}"


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"objective": {"type": "cispo", "dual_clip": 3.0}}, "learner.objective.dual_clip"),
        ({"objective": {"type": "dppo_tv", "ratio_reference": "sampler"}}, "learner.objective.ratio_reference"),
        (
            {"objective": {"advantage": {"type": "mean", "deviation": "sample"}}},
            "learner.objective.advantage.deviation",
        ),
        ({"optimizer": {"type": "sgd", "beta1": 0.8}}, "learner.optimizer.beta1"),
        ({"optimizer": {"type": "adafactor", "beta2": 0.8}}, "learner.optimizer.beta2"),
        ({"optimizer": {"momentum": 0.5}}, "learner.optimizer.momentum"),
        ({"schedule": {"type": "constant", "min_learning_rate": 1e-6}}, "learner.schedule.min_learning_rate"),
        ({"kl_penalty": {"type": "reward", "importance_weighted": True}}, "learner.kl_penalty.importance_weighted"),
        ({"entropy_bonus": {"type": "adaptive", "target": 0.2, "decay": 0.9}}, "learner.entropy_bonus.decay"),
    ],
)
def test_a_setting_of_another_type_cannot_be_written(learner: dict[str, Any], key: str) -> None:
    """The message names the key, the chosen type and the types that have the key."""
    with pytest.raises(ProfileError) as caught:
        decoded(learner=learner)
    assert str(caught.value).startswith(f"profile: {key} is not a setting of learner.")
    assert "it belongs to" in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"async": False, "learner": {"max_staleness": 2}}, "learner.max_staleness"),
        ({"policy": {"method": "full"}, "learner": {"lora_plus": 4.0}}, "learner.lora_plus"),
        ({"actors": [TAP], "learner": {"objective": {"advantage": "environment"}}}, "learner.objective.advantage"),
        (
            {
                "actors": [ENVIRONMENT],
                "learner": {
                    "objective": {"advantage": "environment", "overlong_penalty": {"type": "linear", "buffer": 8}}
                },
            },
            "learner.objective.overlong_penalty",
        ),
        (
            {"actors": [ENVIRONMENT], "learner": {"objective": {"advantage": "environment"}, "kl_penalty": "reward"}},
            "learner.kl_penalty",
        ),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
        ({"sampling": {"min_p": 0.1}}, "sampling.min_p"),
        ({"sampling": {"top_k": 257}}, "sampling.top_k"),
    ],
)
def test_rules_with_other_sections_are_kept(sections: dict[str, Any], key: str) -> None:
    """What the learner needs from sampling, policy and run."""
    assert fault(**sections) == key


@pytest.mark.parametrize(
    "sections",
    [
        {"sampling": {"top_k": 256, "top_p": 0.9, "min_p": 0.1, "logit_bias": [[1, 2.0]]}},
        {
            "learner": {
                "update_epochs": 2,
                "objective": {**BATCH_START, "clip_low": 0.1, "importance_correction": TRUNCATE},
            }
        },
        {"learner": {"num_minibatches": 2, "objective": {"ratio_reference": "batch_start_interpolated"}}},
        {"learner": {"objective": {"type": "custom", "function": "a.b:c", **BATCH_START, "clip_low": 0.1}}},
        {
            "learner": {
                "kl_penalty": {
                    "type": "loss",
                    "importance_weighted": True,
                    "control": {"type": "adaptive", "target": 0.1},
                }
            },
            "collapse_detection": {"kl_high": 1.0},
        },
        {"learner": {"entropy_bonus": {"type": "fixed", "coef": 0.2, "decay": 0.9}}},
        {"actors": [ENVIRONMENT], "learner": {"objective": {"advantage": "environment", "outlier_low": 0.5}}},
        {"atropos": MOCK, "learner": {"objective": {"advantage": "environment"}, "distillation_weight": 0.1}},
        {"atropos": MOCK, "learner": {"kl_penalty": {"type": "loss", "reference": "environment"}}},
        {"learner": {"num_minibatches": 20}, "replay": {"type": "buffer", "capacity": 8, "groups": 4}},
        {"replay": {"type": "buffer", "sampling": {"type": "weighted", "priority": "recency", "exponent": 2.0}}},
        {"collapse_detection": {"type": "rollback", "rollback_rate": 0.5, "max_rollbacks": 1}},
        {"steps": 3, "learner": {"schedule": {"warmup_steps": 5}}},
    ],
    ids=str,
)
def test_valid_combinations_are_allowed(sections: dict[str, Any]) -> None:
    """The rules refuse no valid combination."""
    assert fault(**sections) is None
