"""Settings of penalties, optimizer and schedule that need others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from clotho.config.dependency import Dependence, learner, listed
from clotho.config.schema import Profile

OPTIMIZER_KEYS = {
    "beta1": ("adamw", "lion", "muon"),
    "beta2": ("adamw", "lion", "muon"),
    "epsilon": ("adamw", "muon"),
    "momentum": ("muon", "sgd"),
}
"""By key of `[learner]`: the optimizers that read it; muon hands what is no hidden matrix to adamw."""


def _one_of(profile: Profile, *, kinds: tuple[str, ...]) -> bool:
    return profile.learner.optimizer in kinds


def _optimizers() -> Iterator[Dependence]:
    for name, kinds in OPTIMIZER_KEYS.items():
        yield Dependence(
            keys=learner(name),
            switches=learner("optimizer"),
            works=partial(_one_of, kinds=kinds),
            because=f"learner.optimizer must be one that reads it: {listed(kinds)}",
        )


LEARNER_DEPENDENCES = (
    Dependence(
        keys=learner("kl_estimator", "kl_in", "kl_unbiased", "kl_target", "reference"),
        switches=learner("kl_beta"),
        works=lambda p: p.learner.kl_beta > 0,
        because="learner.kl_beta = 0 means no penalty to estimate",
    ),
    Dependence(
        keys=learner("reference"),
        switches=("atropos.enabled",),
        works=lambda p: p.learner.reference != "environment" or p.atropos.enabled,
        because='atropos.enabled = false: only environments bring "environment"',
        fault="has nothing to be computed from",
    ),
    Dependence(
        keys=learner("distillation_weight"),
        switches=("atropos.enabled",),
        works=lambda p: p.atropos.enabled,
        because="atropos.enabled = false: only environments bring a teacher",
    ),
    Dependence(
        keys=learner("kl_unbiased"),
        switches=learner("kl_in"),
        works=lambda p: p.learner.kl_in == "loss",
        because='learner.kl_in = "reward" has no gradient to repair',
    ),
    Dependence(
        keys=learner("kl_horizon"),
        switches=learner("kl_target"),
        works=lambda p: p.learner.kl_target > 0,
        because="learner.kl_target = 0 leaves learner.kl_beta as it is",
    ),
    Dependence(
        keys=learner("reference_interval"),
        switches=learner("reference"),
        works=lambda p: p.learner.reference == "snapshot",
        because='only learner.reference = "snapshot" is taken anew',
    ),
    Dependence(
        keys=learner("ref_ema"),
        switches=learner("reference"),
        works=lambda p: p.learner.reference == "average",
        because='only learner.reference = "average" is a moving average',
    ),
    Dependence(
        keys=learner("entropy_decay"),
        switches=learner("entropy_target"),
        works=lambda p: p.learner.entropy_target == 0,
        because="learner.entropy_target moves the weight; leave out one of the two",
    ),
    Dependence(
        keys=learner("entropy_decay"),
        switches=learner("entropy_weight"),
        works=lambda p: p.learner.entropy_weight > 0,
        because="learner.entropy_weight = 0 means no bonus",
    ),
    Dependence(
        keys=learner("entropy_step"),
        switches=learner("entropy_target"),
        works=lambda p: p.learner.entropy_target > 0,
        because="learner.entropy_target = 0 leaves learner.entropy_weight as it is",
    ),
    *_optimizers(),
    Dependence(
        keys=learner("lora_plus"),
        switches=("policy.kind",),
        works=lambda p: p.policy.kind != "full",
        because='policy.kind = "full" has no matrices A and B',
    ),
    Dependence(
        keys=learner("min_learning_rate"),
        switches=learner("schedule"),
        works=lambda p: p.learner.schedule != "constant",
        because='learner.schedule = "constant" never falls',
    ),
    Dependence(
        keys=learner("min_learning_rate"),
        switches=learner("learning_rate"),
        works=lambda p: p.learner.min_learning_rate <= p.learner.learning_rate,
        because="it must be at most learner.learning_rate",
        fault="is too large",
    ),
    Dependence(
        keys=learner("warmup_steps"),
        switches=("steps",),
        works=lambda p: p.learner.warmup_steps < p.steps,
        because="it must be less than steps",
        fault="is too large",
    ),
)
"""In the order in which keys give up."""
