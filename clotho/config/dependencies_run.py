"""Settings that need others: of the policy, of data and evaluation, of how a run goes, of its alarms and its replay."""

from __future__ import annotations

from clotho.config.dependency import Dependence, own_stage, section_keys
from clotho.config.schema import Profile


def _form_is_rewarded(profile: Profile) -> bool:
    """Whether completions may bring a part named `format`: of the profile's rewards, or of an own actor on the flow."""
    return own_stage(profile) or any(reward.name == "format" for reward in profile.rewards)


RUN_DEPENDENCES = (
    Dependence(
        keys=section_keys("policy", "kind", "grad_checkpoint"),
        switches=("policy.kind",),
        works=lambda p: p.policy.kind != "full",
        because='it belongs to adapters, and policy.kind = "full" has none',
    ),
    Dependence(
        keys=("policy.scaling",),
        switches=("policy.alpha", "policy.scale"),
        works=lambda p: p.policy.alpha is not None,
        because="it says what policy.alpha means, which is not given",
    ),
    Dependence(
        keys=("rollouts.max_batches_ahead", "learner.max_staleness"),
        switches=("async",),
        works=lambda p: p.asynchronous,
        because="with async = false nothing runs ahead, and nothing is stale",
    ),
    Dependence(
        keys=("data.heldout_fraction",),
        switches=("data.heldout",),
        works=lambda p: not p.data.heldout,
        because="data.heldout gives the held-out problems",
    ),
    Dependence(
        keys=("parity.warn_nats", "parity.stop_nats"),
        switches=("parity.tokens",),
        works=lambda p: p.parity.tokens > 0,
        because="parity.tokens = 0 means that nothing is compared",
    ),
    Dependence(
        keys=("checkpoint.keep_last",),
        switches=("checkpoint.interval",),
        works=lambda p: p.checkpoint.interval > 0,
        because="checkpoint.interval = 0 leaves one checkpoint, at the end",
    ),
    Dependence(
        keys=("eval.interval", "eval.problems", "eval.problems_between"),
        switches=("eval.enabled",),
        works=lambda p: p.eval.enabled,
        because="eval.enabled = false means that nothing is measured",
    ),
    Dependence(
        keys=("eval.interval",),
        switches=("steps",),
        works=lambda p: p.eval.interval < p.steps,
        because="it must be less than steps: the end is measured anyway",
        fault="is too large",
    ),
    Dependence(
        keys=("eval.problems_between",),
        switches=("eval.interval",),
        works=lambda p: p.eval.interval > 0,
        because="eval.interval = 0 means that nothing is measured in between",
    ),
    Dependence(
        keys=section_keys("server", "enabled"),
        switches=("server.enabled",),
        works=lambda p: p.server.enabled,
        because="server.enabled = false means that nothing is served",
    ),
    Dependence(
        keys=section_keys("replay", "capacity"),
        switches=("replay.capacity",),
        works=lambda p: p.replay.capacity > 0,
        because="replay.capacity = 0 means that nothing is kept",
    ),
    Dependence(
        keys=("replay.groups",),
        switches=("replay.capacity",),
        works=lambda p: p.replay.capacity == 0 or p.replay.groups <= p.replay.capacity,
        because="it must be at most replay.capacity",
        fault="is too large",
    ),
    Dependence(
        keys=("replay.priority",),
        switches=("replay.sampling",),
        works=lambda p: p.replay.sampling != "uniform",
        because='replay.sampling = "uniform" prefers nothing',
    ),
    Dependence(
        keys=("replay.exponent",),
        switches=("replay.sampling",),
        works=lambda p: p.replay.sampling == "weighted",
        because='only replay.sampling = "weighted" uses it',
    ),
    Dependence(
        keys=section_keys("collapse_detection", "on_collapse"),
        switches=("collapse_detection.on_collapse",),
        works=lambda p: p.collapse_detection.on_collapse != "off",
        because='collapse_detection.on_collapse = "off" looks at nothing',
    ),
    Dependence(
        keys=("collapse_detection.rollback_rate", "collapse_detection.max_rollbacks"),
        switches=("collapse_detection.on_collapse",),
        works=lambda p: p.collapse_detection.on_collapse == "rollback",
        because='only collapse_detection.on_collapse = "rollback" goes back',
    ),
    Dependence(
        keys=("collapse_detection.kl_high",),
        switches=("learner.kl_beta",),
        works=lambda p: p.learner.kl_beta > 0,
        because="learner.kl_beta = 0 means that no divergence is computed",
    ),
    Dependence(
        keys=("collapse_detection.empty_format_high",),
        switches=("rewards", "actors"),
        works=_form_is_rewarded,
        because='there is no reward named "format"',
    ),
)
"""In the order in which keys give up."""
