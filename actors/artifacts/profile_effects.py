"""Which settings make sense only beside certain others: no option may be given in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from actors.artifacts.profile_layers import Merged
from actors.artifacts.profile_schema import sections, settable
from protocols.profile import Profile


class Dependence(Struct, frozen=True, kw_only=True):
    """`keys` make sense only while `works` holds, which `switch` decides; `because` says to a person why not."""

    keys: tuple[str, ...]
    switch: str
    works: Callable[[Profile], bool]
    because: str
    fault: str = "has no effect"


def _section(name: str, *besides: str) -> tuple[str, ...]:
    found = next(section for section in sections() if section.name == name)
    return tuple(key.path for key in found.keys if key.name not in besides)


DEPENDENCES = (
    Dependence(
        keys=_section("policy", "kind", "grad_checkpoint"),
        switch="policy.kind",
        works=lambda p: p.policy.kind == "lora",
        because='it belongs to adapters, and policy.kind = "full" has none',
    ),
    Dependence(
        keys=("generator.batches_ahead",),
        switch="async",
        works=lambda p: p.asynchronous,
        because="with async = false nothing runs ahead",
    ),
    Dependence(
        keys=("learner.min_learning_rate",),
        switch="learner.schedule",
        works=lambda p: p.learner.schedule != "constant",
        because='learner.schedule = "constant" never falls',
    ),
    Dependence(
        keys=("learner.min_learning_rate",),
        switch="learner.learning_rate",
        works=lambda p: p.learner.min_learning_rate <= p.learner.learning_rate,
        because="it must be at most learner.learning_rate",
        fault="is too large",
    ),
    Dependence(
        keys=("learner.warmup_steps",),
        switch="steps",
        works=lambda p: p.learner.warmup_steps < p.steps,
        because="it must be less than steps",
        fault="is too large",
    ),
    Dependence(
        keys=("learner.clip_low", "learner.clip_high"),
        switch="learner.correction",
        works=lambda p: p.learner.correction == "none",
        because='learner.correction = "truncate" takes the ratio against the learner itself: it is 1, never clipped',
    ),
    Dependence(
        keys=("learner.correction_cap",),
        switch="learner.correction",
        works=lambda p: p.learner.correction == "truncate",
        because='only learner.correction = "truncate" uses it',
    ),
    Dependence(
        keys=("learner.kl_estimator",),
        switch="learner.kl_beta",
        works=lambda p: p.learner.kl_beta > 0,
        because="learner.kl_beta = 0 means no penalty to estimate",
    ),
    Dependence(
        keys=("data.heldout_fraction",),
        switch="data.heldout",
        works=lambda p: not p.data.heldout,
        because="data.heldout gives the held-out problems",
    ),
    Dependence(
        keys=("weights.probe_warn", "weights.probe_stop"),
        switch="weights.probe_tokens",
        works=lambda p: p.weights.probe_tokens > 0,
        because="weights.probe_tokens = 0 means that nothing is compared",
    ),
    Dependence(
        keys=("checkpoint.keep_last",),
        switch="checkpoint.interval",
        works=lambda p: p.checkpoint.interval > 0,
        because="checkpoint.interval = 0 leaves one checkpoint, at the end",
    ),
    Dependence(
        keys=("eval.interval", "eval.problems", "eval.interim_problems"),
        switch="eval.enabled",
        works=lambda p: p.eval.enabled,
        because="eval.enabled = false means that nothing is measured",
    ),
    Dependence(
        keys=("eval.interim_problems",),
        switch="eval.interval",
        works=lambda p: p.eval.interval > 0,
        because="eval.interval = 0 means that nothing is measured in between",
    ),
    Dependence(
        keys=_section("gateway", "enabled"),
        switch="gateway.enabled",
        works=lambda p: p.gateway.enabled,
        because="gateway.enabled = false means that nothing is served",
    ),
)


def resting(profile: Profile, merged: Merged) -> set[str]:
    """Keys that lower layers set and a higher layer's switch deprives of their effect: they fall back to defaults."""
    return {
        path
        for rule in DEPENDENCES
        if not rule.works(profile)
        for path in rule.keys
        if path in merged.origin and merged.origin[path] < merged.origin.get(rule.switch, -1)
    }


def without_effect(profile: Profile) -> Iterator[tuple[str, str]]:
    """No setting differs from its default in vain: (key path, complaint) of each that does."""
    for rule in DEPENDENCES:
        if rule.works(profile):
            continue
        for path in rule.keys:
            if value_of(profile, path) != settable()[path].default:
                yield path, f"{path} {rule.fault}: {rule.because}"


def value_of(profile: Profile, path: str) -> object:
    """The value at a key path outside arrays of tables."""
    section, _, name = path.rpartition(".")
    return getattr(getattr(profile, section) if section else profile, name)
