"""Settings of what is maximised that need others: objective, correction, advantages, what is left out.

Settings of penalties, optimizer and schedule that need others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from clotho.config.dependency import Dependence, learner, listed, own_stage
from clotho.config.presets import REQUIRES, SHAPES, USES
from clotho.config.schema import Profile

AT_THE_RATIO = tuple(sorted(SHAPES - {"quadratic_kl"}))
"""What shapes the loss only where the ratio is not 1."""


def reads(objective: str, name: str) -> bool:
    """Whether an objective reads one of `SHAPES`; one of the user's own may read them all."""
    return name in USES.get(objective, SHAPES)


def _ratio_moves(profile: Profile) -> bool:
    settings = profile.learner
    several = settings.update_epochs * settings.num_minibatches > 1
    return settings.ratio_reference == "sampler" or several or settings.objective not in USES


def _read(profile: Profile, *, name: str) -> bool:
    return reads(profile.learner.objective, name)


def _required(profile: Profile, *, name: str) -> bool:
    wanted = REQUIRES.get(profile.learner.objective, {})
    return name not in wanted or getattr(profile.learner, name) == wanted[name]


def _requirements() -> Iterator[Dependence]:
    for name in sorted({name for wanted in REQUIRES.values() for name in wanted}):
        needs = [f'{objective} needs "{wanted[name]}"' for objective, wanted in REQUIRES.items() if name in wanted]
        yield Dependence(
            keys=learner(name),
            switches=learner("objective"),
            works=partial(_required, name=name),
            because=", ".join(needs),
            fault="contradicts learner.objective",
        )


def _readers() -> Iterator[Dependence]:
    for name in sorted(SHAPES):
        readers = [objective for objective in USES if reads(objective, name)]
        yield Dependence(
            keys=learner(name),
            switches=learner("objective"),
            works=partial(_read, name=name),
            because=f"it belongs to {listed(readers)}",
        )


OBJECTIVE_DEPENDENCES = (
    *_requirements(),
    Dependence(
        keys=learner("correction"),
        switches=learner("ratio_reference"),
        works=lambda p: p.learner.correction == "none" or p.learner.ratio_reference == "batch_start",
        because='learner.ratio_reference = "sampler" has the ratio against the sampler already; set learner.ratio_reference = "batch_start"',
        fault="would count the disagreement with the sampler twice",
    ),
    Dependence(
        keys=learner("correction_low", "correction_high"),
        switches=learner("correction"),
        works=lambda p: p.learner.correction != "none",
        because='learner.correction = "none" has no bounds',
    ),
    *_readers(),
    Dependence(
        keys=learner(*AT_THE_RATIO),
        switches=learner("ratio_reference", "update_epochs", "num_minibatches", "objective"),
        works=_ratio_moves,
        because='with learner.ratio_reference = "batch_start" and a single optimizer step per batch the ratio is always 1; '
        "see learner.update_epochs and learner.num_minibatches",
    ),
    Dependence(
        keys=learner("proximal"),
        switches=learner("ratio_reference", "update_epochs", "num_minibatches"),
        works=lambda p: (
            p.learner.ratio_reference == "batch_start" and p.learner.update_epochs * p.learner.num_minibatches > 1
        ),
        because='only learner.ratio_reference = "batch_start" with several optimizer steps per batch has a policy to compute',
    ),
    Dependence(
        keys=learner("advantage"),
        switches=("atropos.enabled", "actors"),
        works=lambda p: p.learner.advantage != "environment" or p.atropos.enabled or own_stage(p),
        because='"environment" needs groups that bring token advantages: of environments (atropos.enabled = true), or '
        "of an actor of your own on the flow (docs/actors.md)",
        fault="has nothing to learn from",
    ),
    Dependence(
        keys=learner("advantage_deviation", "advantage_epsilon"),
        switches=learner("advantage"),
        works=lambda p: p.learner.advantage in ("group", "batch", "batch_centred"),
        because="learner.advantage must be one that divides by a deviation: group, batch and batch_centred",
    ),
    Dependence(
        keys=learner("overlong_buffer", "kl_in"),
        switches=learner("advantage"),
        works=lambda p: p.learner.advantage != "environment",
        because='learner.advantage = "environment" does not look at rewards',
    ),
    Dependence(
        keys=learner("overlong_buffer"),
        switches=("sampling.max_tokens",),
        works=lambda p: p.learner.overlong_buffer < p.sampling.max_tokens,
        because="it must be less than sampling.max_tokens",
        fault="is too large",
    ),
    Dependence(
        keys=learner("overlong_penalty"),
        switches=learner("overlong_buffer"),
        works=lambda p: p.learner.overlong_buffer > 0,
        because="learner.overlong_buffer = 0 means that there is none",
    ),
    Dependence(
        keys=learner("dynamic_limit"),
        switches=learner("dynamic_sampling"),
        works=lambda p: p.learner.dynamic_sampling,
        because="learner.dynamic_sampling = false replaces nothing",
    ),
    Dependence(
        keys=learner("dynamic_limit"),
        switches=learner("batch_size"),
        works=lambda p: (
            not p.learner.dynamic_sampling or int(p.learner.dynamic_limit * p.learner.batch_size) > p.learner.batch_size
        ),
        because="so many times learner.batch_size, rounded down, must be more than a batch",
        fault="is too small",
    ),
)
"""In the order in which keys give up."""


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
