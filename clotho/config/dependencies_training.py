"""Settings of what is maximised that need others: objective, correction, advantages, what is left out."""

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
    several = settings.update_epochs * settings.mini_batches > 1
    return settings.anchor == "sampler" or several or settings.objective not in USES


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
        switches=learner("anchor"),
        works=lambda p: p.learner.correction == "none" or p.learner.anchor == "proximal",
        because='learner.anchor = "sampler" has the ratio against the sampler already; set learner.anchor = "proximal"',
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
        switches=learner("anchor", "update_epochs", "mini_batches", "objective"),
        works=_ratio_moves,
        because='with learner.anchor = "proximal" and a single optimizer step per batch the ratio is always 1; '
        "see learner.update_epochs and learner.mini_batches",
    ),
    Dependence(
        keys=learner("proximal"),
        switches=learner("anchor", "update_epochs", "mini_batches"),
        works=lambda p: p.learner.anchor == "proximal" and p.learner.update_epochs * p.learner.mini_batches > 1,
        because='only learner.anchor = "proximal" with several optimizer steps per batch has a policy to compute',
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
