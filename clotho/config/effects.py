"""Settings that have no effect without another setting: which one, and why they are refused otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from clotho.config.keys import chosen_types, keys
from clotho.config.objectives import Custom, RatioObjective
from clotho.config.schema import Profile
from clotho.config.sections_data import AdapterMethod
from clotho.config.sections_training import NoKLPenalty, SnapshotReference


class Complaint(NamedTuple):
    """An invalid key, and a sentence with the reason and the remedy.

    decided_by: the keys that leave it without effect. If a higher layer set such a key, the invalid key returns to its
    default and is not refused.
    """

    key: str
    text: str
    decided_by: tuple[str, ...] = ()


class Effect(NamedTuple):
    """A condition without which keys have no effect.

    keys: a name that ends in a dot means all keys of that table except those in `decided_by`.
    """

    keys: str
    decided_by: str
    holds: Callable[[Profile], bool]
    because: str


def custom_stage(profile: Profile) -> bool:
    """Whether groups pass through a custom actor, which may add data that built-in actors do not."""
    return any(actor.is_in_group_flow for actor in profile.actors)


def _format_is_rewarded(profile: Profile) -> bool:
    if custom_stage(profile):
        return True
    return not profile.atropos.enabled and any(reward.name == "format" for reward in profile.rewards)


def _ratio_moves(profile: Profile) -> bool:
    """Whether the importance ratio can differ from 1: relative to the sampler, or after a first optimizer step."""
    objective = profile.learner.objective
    if not isinstance(objective, RatioObjective) or isinstance(objective, Custom):
        return True
    return objective.ratio_reference == "sampler" or profile.learner.update_epochs * profile.learner.num_minibatches > 1


def _reference_interval(profile: Profile) -> int:
    reference = profile.learner.reference
    return reference.interval if isinstance(reference, SnapshotReference) else 0


OBJECTIVE = "learner.objective"
RATIO = f"{OBJECTIVE}.ratio_reference"
STEPS_PER_BATCH = f"{RATIO} learner.update_epochs learner.num_minibatches"

EFFECTS = (
    Effect("atropos. environments", "atropos.enabled", lambda p: p.atropos.enabled, "atropos.enabled = false"),
    Effect(
        "atropos.url atropos.python atropos.reset atropos.missing_logprobs environments",
        "atropos.mock",
        lambda p: not p.atropos.mock,
        "with atropos.mock = true the run itself makes the groups, without an API server or environments",
    ),
    Effect("atropos.reset", "atropos.url", lambda p: bool(p.atropos.url), "atropos.url names no running server"),
    Effect("environments", "atropos.python", lambda p: bool(p.atropos.python), "atropos.python names no interpreter"),
    Effect(
        f"queues.prompts queues.rollouts {OBJECTIVE}.dynamic_sampling_max_ratio {OBJECTIVE}.overlong_penalty.type",
        "atropos.enabled",
        lambda p: not p.atropos.enabled,
        "with atropos.enabled = true groups and their rewards come from environments",
    ),
    Effect(
        "learner.distillation_weight",
        "atropos.enabled",
        lambda p: p.atropos.enabled,
        "only environments (atropos.enabled = true) send a teacher's alternatives",
    ),
    Effect(
        "policy.method.scaling",
        "policy.method.alpha policy.method.scale",
        lambda p: isinstance(p.policy.method, AdapterMethod) and p.policy.method.alpha is not None,
        "it defines policy.method.alpha, which is not set",
    ),
    Effect(
        "learner.lora_plus",
        "policy.method.type",
        lambda p: isinstance(p.policy.method, AdapterMethod),
        'policy.method = "full" trains no adapter',
    ),
    Effect(
        "rollouts.max_batches_ahead learner.max_staleness",
        "async",
        lambda p: p.asynchronous,
        "with async = false no batch is sampled ahead",
    ),
    Effect(
        "data.heldout_fraction",
        "data.heldout",
        lambda p: not p.data.heldout,
        "data.heldout names the held-out problems",
    ),
    Effect(
        "parity.warn_nats parity.stop_nats",
        "parity.tokens",
        lambda p: p.parity.tokens > 0,
        "parity.tokens = 0 disables the parity check",
    ),
    Effect(
        "checkpoint.interval",
        "steps",
        lambda p: p.checkpoint.interval < p.steps,
        "it must be less than steps; a checkpoint is written at the end in any case",
    ),
    Effect(
        "checkpoint.keep_last",
        "checkpoint.interval",
        lambda p: p.checkpoint.interval > 0,
        "checkpoint.interval = 0 writes one checkpoint, at the end",
    ),
    Effect("eval.", "eval.enabled", lambda p: p.eval.enabled, "eval.enabled = false"),
    Effect(
        "eval.interval",
        "steps",
        lambda p: p.eval.interval < p.steps,
        "it must be less than steps; the policy is evaluated at the end in any case",
    ),
    Effect(
        "eval.problems_between",
        "eval.interval",
        lambda p: p.eval.interval > 0,
        "eval.interval = 0 disables evaluation during training",
    ),
    Effect("server.", "server.enabled", lambda p: p.server.enabled, "server.enabled = false"),
    Effect(
        "collapse_detection.",
        "collapse_detection.on_collapse",
        lambda p: p.collapse_detection.on_collapse != "off",
        'collapse_detection.on_collapse = "off"',
    ),
    Effect(
        "collapse_detection.rollback_rate collapse_detection.max_rollbacks",
        "collapse_detection.on_collapse",
        lambda p: p.collapse_detection.on_collapse == "rollback",
        'it needs collapse_detection.on_collapse = "rollback"',
    ),
    Effect(
        "collapse_detection.kl_high",
        "learner.kl_penalty.type",
        lambda p: not isinstance(p.learner.kl_penalty, NoKLPenalty),
        'learner.kl_penalty = "none" means that no divergence is computed',
    ),
    Effect(
        "collapse_detection.empty_format_high",
        "rewards actors atropos.enabled",
        _format_is_rewarded,
        'no reward is named "format"',
    ),
    Effect(
        f"{OBJECTIVE}.clip_low {OBJECTIVE}.clip_high {OBJECTIVE}.dual_clip {OBJECTIVE}.sapo_tau_pos "
        f"{OBJECTIVE}.sapo_tau_neg",
        STEPS_PER_BATCH,
        _ratio_moves,
        f'with {RATIO} = "batch_start" and one optimizer step per batch the importance ratio is always 1; see '
        "learner.update_epochs and learner.num_minibatches",
    ),
    Effect(
        "learner.kl_penalty.reference.interval",
        "steps",
        lambda p: _reference_interval(p) < p.steps,
        "it must be less than steps",
    ),
)
"""Ordered: a condition precedes conditions that depend on it."""


def without_effect(profile: Profile) -> Iterator[Complaint]:
    """Every setting that differs from its default has an effect."""
    values = _values(msgspec.to_builtins(profile))
    chosen = chosen_types(values)
    for effect in EFFECTS:
        decided_by = tuple(effect.decided_by.split())
        if effect.holds(profile):
            continue
        for name in effect.keys.split():
            for path in _paths(name, decided_by):
                variants = keys()[path].variants if path in keys() else ()
                default = next((v.default for v in variants if v.types.items() <= chosen.items()), ())
                if path in values and values[path] not in (default, [] if default == () else default):
                    yield Complaint(path, f"{path} has no effect: {effect.because}", decided_by)


def _paths(name: str, besides: tuple[str, ...]) -> list[str]:
    if not name.endswith("."):
        return [name]
    return [path for path in keys() if path.startswith(name) and path not in besides]


def _values(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in keys():
            found |= _values(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
