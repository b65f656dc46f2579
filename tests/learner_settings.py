"""Learner settings from the short names that test cases use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec import convert, to_builtins

from clotho.settings.learner import LearnerSection
from clotho.settings.model import AdapterMethod, GradCheckpoint, PolicySection
from clotho.settings.objectives import Advantage
from training_run.profile.keys import CHOICES, KEYS, PROFILE_KEYS

OBJECTIVES = tuple(name for name in CHOICES["learner.objective.type"] if name != "custom")
"""Names of the built-in objectives."""

PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
"""Those that compare completions."""

OF_TOKENS = tuple(name for name in OBJECTIVES if name not in PREFERENCES)
"""Those whose loss can be cut between any two completions."""

OF_SAMPLES = tuple(name for name in OF_TOKENS if name != "sft")
"""Those that learn from what a policy has sampled; `sft` needs advantages per token, and knows no sampler."""

SHORT = {
    "advantage": "objective.advantage.type",
    "advantage_deviation": "objective.advantage.deviation",
    "advantage_epsilon": "objective.advantage.epsilon",
    "correction": "objective.importance_correction.type",
    "correction_low": "objective.importance_correction.low",
    "correction_high": "objective.importance_correction.high",
    "kl_beta": "kl_penalty.coef",
    "kl_in": "kl_penalty.type",
    "kl_estimator": "kl_penalty.estimator",
    "kl_unbiased": "kl_penalty.importance_weighted",
    "kl_target": "kl_penalty.control.target",
    "kl_horizon": "kl_penalty.control.horizon",
    "reference": "kl_penalty.reference.type",
    "reference_interval": "kl_penalty.reference.interval",
    "ref_ema": "kl_penalty.reference.decay",
    "entropy_weight": "entropy_bonus.coef",
    "entropy_decay": "entropy_bonus.decay",
    "entropy_target": "entropy_bonus.target",
    "entropy_step": "entropy_bonus.step",
    "epsilon": "optimizer.epsilon",
    "objective": "objective.type",
    "objective_reference": "objective.reference",
    "optimizer": "optimizer.type",
    "schedule": "schedule.type",
    "step_scale": "step_scale.type",
}
"""Paths below `learner` of the names that are not the last component of one path."""


def learner_settings(**fields: Any) -> LearnerSection:
    """Settings from field names: `clip_low` stands for `objective.clip_low`, and so on.

    A KL penalty with a coefficient of 0 is none; with another one it is in the loss unless `kl_in` says otherwise.
    """
    values = {f"learner.{path_of(name)}": value for name, value in fields.items()}
    if ":" in fields.get("objective", ""):
        values |= {"learner.objective.type": "custom", "learner.objective.function": fields["objective"]}
    if not fields.get("kl_beta"):
        values = {path: value for path, value in values.items() if ".kl_penalty." not in path}
    elif "kl_in" not in fields:
        values["learner.kl_penalty.type"] = "loss"
    if "kl_target" in fields and fields.get("kl_beta"):
        values["learner.kl_penalty.control.type"] = "adaptive"
    if "entropy_target" in fields:
        values["learner.entropy_bonus.type"] = "adaptive"
    elif "entropy_weight" in fields:
        values["learner.entropy_bonus.type"] = "fixed"
    tree = _nested(values)
    assert not values, f"unknown settings: {values}"
    return convert(tree, LearnerSection)


def policy_settings(kind: str = "lora", *, grad_checkpoint: GradCheckpoint = False, **fields: Any) -> PolicySection:
    """Settings of a training method, from its field names; those of an adapter do not count for `full`."""
    tree = {
        "method": {"type": kind, **({} if kind == "full" else to_builtins(fields))},
        "grad_checkpoint": grad_checkpoint,
    }
    return convert(tree, PolicySection)


def adapter_settings(kind: str = "lora", **fields: Any) -> AdapterMethod:
    """Settings of an adapter, from its field names."""
    settings = policy_settings(kind, **fields).method
    assert isinstance(settings, AdapterMethod)
    return settings


def advantage(kind: str, *, deviation: str, epsilon: float) -> Advantage:
    """Settings of an advantage; deviation and epsilon count only for a type that divides by a deviation."""
    divides = kind in ("group", "batch", "batch_centred", "batch_scaled", "optimal_baseline")
    return learner_settings(
        advantage=kind, **({"advantage_deviation": deviation, "advantage_epsilon": epsilon} if divides else {})
    ).objective.advantage


def short_names(settings: LearnerSection) -> SimpleNamespace:
    """The settings under the short names that test cases use, with neutral values for what the types do not have."""
    names: dict[str, Any] = dict.fromkeys(("kl_beta", "entropy_weight", "quadratic_kl", "dual_clip"), 0.0)
    names |= {"correction": "off", "ratio_reference": "sampler", "kl_estimator": "k3", "kl_in": "loss"}
    names |= {"kl_unbiased": False, "correction_low": 0.0, "correction_high": 2.0}
    names |= {"advantage_deviation": "population", "advantage_epsilon": 1e-4}
    paths = {path: name for name, path in SHORT.items()}
    for path, value in _leaves(to_builtins(settings)).items():
        names[paths.get(path, path.rpartition(".")[2])] = value
    if names["kl_in"] == "off":
        names["kl_in"] = "loss"
    return SimpleNamespace(**names)


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def path_of(name: str) -> str:
    """The path below `learner` of a short name."""
    if name in SHORT:
        return SHORT[name]
    paths = [path for path in KEYS if path.startswith("learner.") and path.endswith(f".{name}")]
    assert len(paths) == 1, f"{name} is not one setting: {paths}"
    return paths[0].removeprefix("learner.")


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """The [learner] table of these values by path, with the defaults of the chosen types; removes the used values."""
    chosen, tree = PROFILE_KEYS.chosen_types(values), dict[str, Any]()
    for path, key in KEYS.items():
        variant = next((variant for variant in key.variants if variant.types.items() <= chosen.items()), None)
        if variant is None:
            continue
        value = values.pop(path, variant.default)
        if path.startswith("learner.") and value is not None:
            *tables, name = path.split(".")[1:]
            table = tree
            for part in tables:
                table = table.setdefault(part, {})
            table[name] = value
    return tree
