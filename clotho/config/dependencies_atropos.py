"""Settings of environments, and those that environments take the effect from."""

from __future__ import annotations

from clotho.config.dependency import Dependence, learner, own_stage, section_keys

ATROPOS_DEPENDENCES = (
    Dependence(
        keys=(*section_keys("atropos", "enabled"), "environments"),
        switches=("atropos.enabled",),
        works=lambda p: p.atropos.enabled,
        because="atropos.enabled = false means that no groups come from environments",
    ),
    Dependence(
        keys=("atropos.url", "atropos.python", "atropos.reset", "atropos.missing_logprobs", "environments"),
        switches=("atropos.mock",),
        works=lambda p: not p.atropos.mock,
        because="atropos.mock = true makes the groups here, with neither server nor environments",
    ),
    Dependence(
        keys=("atropos.reset",),
        switches=("atropos.url",),
        works=lambda p: bool(p.atropos.url),
        because="only a server that runs already, at atropos.url, holds something from others",
    ),
    Dependence(
        keys=("environments",),
        switches=("atropos.python",),
        works=lambda p: bool(p.atropos.python),
        because="atropos.python runs them, and names no interpreter",
    ),
    Dependence(
        keys=("queues.prompts", "queues.rollouts"),
        switches=("atropos.enabled",),
        works=lambda p: not p.atropos.enabled,
        because="with atropos.enabled the groups come complete, by way of queues.scored",
    ),
    Dependence(
        keys=learner("dynamic_sampling", "dynamic_limit"),
        switches=("atropos.enabled",),
        works=lambda p: not p.atropos.enabled,
        because="with atropos.enabled nobody here asks: a batch waits for groups that can be learned from anyway",
    ),
    Dependence(
        keys=learner("overlong_buffer", "overlong_penalty"),
        switches=("atropos.enabled",),
        works=lambda p: not p.atropos.enabled,
        because="with atropos.enabled rewards come with the groups",
    ),
    Dependence(
        keys=("collapse_detection.empty_format_high",),
        switches=("atropos.enabled", "actors"),
        works=lambda p: not p.atropos.enabled or own_stage(p),
        because="environments send one score, without a part for the format",
    ),
)
"""In the order in which keys give up."""
