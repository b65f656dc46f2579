"""LossSettings between settings: what each may be alone is in its struct, what they may be together is here.

LossSettings between settings of what is sampled and learned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from clotho.config.addresses import is_loopback
from clotho.config.dependencies import without_effect
from clotho.config.dependency import Complaint
from clotho.config.nearest import nearest
from clotho.config.presets import OBJECTIVES
from clotho.config.rules_atropos import ATROPOS_RULES
from clotho.config.schema import ActorSection, Profile
from protocols.errors import ProfileError
from protocols.sampling import PARAMETERS, in_use, unlearnable


def known_objective(profile: Profile) -> Iterator[Complaint]:
    """The objective is one that there is, or `module:function`."""
    name = profile.learner.objective
    if ":" not in name and name not in OBJECTIVES:
        guess = nearest(name, OBJECTIVES)
        yield (
            "learner.objective",
            f"learner.objective must be one of {', '.join(OBJECTIVES)}, or module:function, not {name!r}"
            + (f"; did you mean {guess}?" if guess else ""),
        )


def learnable_distribution(profile: Profile) -> Iterator[Complaint]:
    """The learner can evaluate the sampling distribution, and nothing is reported that training does not read."""
    if (found := unlearnable(profile.sampling)) is not None:
        yield f"sampling.{found.parameter}", f"sampling.{found.reason}"
    for name in in_use(profile.sampling, affects="report"):
        neutral = PARAMETERS[name].neutral
        yield f"sampling.{name}", f"sampling.{name} must be {neutral} in training: only API requests report it"


def bounds_around_one(profile: Profile) -> Iterator[Complaint]:
    """Where sampler and learner agree the ratio is 1: no bound of a ratio may cut that off."""
    settings = profile.learner
    if not settings.correction_low <= 1 <= settings.correction_high:
        path = "learner.correction_low" if settings.correction_low > 1 else "learner.correction_high"
        yield (
            path,
            f"learner.correction_low = {settings.correction_low:g} and learner.correction_high = "
            f"{settings.correction_high:g} must have 1 between them, the ratio where sampler and learner agree",
        )
    for name in ("outlier_high", "dual_clip"):
        if 0 < (value := getattr(settings, name)) <= 1:
            yield f"learner.{name}", f"learner.{name} must be 0 (off) or more than 1, not {value:g}"


def enough_for_mini_batches(profile: Profile) -> Iterator[Complaint]:
    """Every mini-batch has a group to learn from."""
    settings, replay = profile.learner, profile.replay
    groups = settings.batch_size + (replay.groups if replay.capacity else 0)
    if settings.num_minibatches > groups:
        yield (
            "learner.num_minibatches",
            f"learner.num_minibatches = {settings.num_minibatches} must be at most the groups of an update, {groups}",
        )


BOXES = ("prompter", "generator", "scorer", "learner", "broadcaster", "checkpointer", "evaluator", "monitor")
SERVICES = ("server", "watchdog", "decode engine", "atropos server")
ARROWS = ("prompts", "rollouts", "scored", "reports")
FETCHER = "atropos_fetcher"
FETCHED = (*BOXES[:3], *ARROWS[:2])
"""Boxes and arrows in whose place the fetcher stands where groups come from environments."""

Rule = Callable[[Profile], Iterable[Complaint]]


def validate(profile: Profile, label: Callable[[str], str] = lambda path: "profile") -> None:
    """Raise ProfileError with the first complaint; `label` says where a key was set."""
    for rule in RULES:
        for path, complaint in rule(profile):
            raise ProfileError(f"{label(path)}: {complaint}")


def one_scale(profile: Profile) -> Iterator[Complaint]:
    """The adapter's scale is given in one way."""
    if profile.policy.scale is not None and profile.policy.alpha is not None:
        yield "policy.alpha", "policy.scale and policy.alpha say the same: give one of the two"


def trainable_layers(profile: Profile) -> Iterator[Complaint]:
    """Something is trained."""
    if profile.policy.num_layers == 0:
        yield "policy.num_layers", "policy.num_layers = 0 trains nothing: -1 is all, n the last n blocks"


def repeatable_dropout(profile: Profile) -> Iterator[Complaint]:
    """A block that is computed again for the gradient would draw another dropout mask than in the forward pass."""
    if profile.policy.grad_checkpoint and profile.policy.dropout > 0:
        yield (
            "policy.dropout",
            f"policy.dropout = {profile.policy.dropout:g} and policy.grad_checkpoint exclude each other: a recomputed "
            "block draws another mask, and the gradient would be wrong; switch one of them off",
        )


def completions_fit_kv_cache(profile: Profile) -> Iterator[Complaint]:
    """A completion of maximum length fits the KV cache."""
    sampling = profile.sampling
    if sampling.max_tokens >= profile.engine.kv_cache_tokens:
        limit = profile.engine.kv_cache_tokens
        yield (
            "sampling.max_tokens",
            f"sampling.max_tokens = {sampling.max_tokens} must be less than engine.kv_cache_tokens = {limit}",
        )


def probe_bounds(profile: Profile) -> Iterator[Complaint]:
    """A difference is reported before it stops the run."""
    parity = profile.parity
    if parity.warn_nats > parity.stop_nats:
        yield (
            "parity.warn_nats",
            f"parity.warn_nats = {parity.warn_nats:g} must be at most parity.stop_nats = {parity.stop_nats:g}",
        )


def columns(profile: Profile) -> Iterator[Complaint]:
    """Prompt and answer are two columns, and there is something to measure on."""
    data = profile.data
    for name in ("prompt_key", "answer_key", "type_key"):
        if not getattr(data, name):
            yield f"data.{name}", f"data.{name} must name a column of the file"
    if data.prompt_key == data.answer_key:
        yield "data.answer_key", f"data.prompt_key and data.answer_key are both {data.prompt_key!r}"
    if profile.eval.enabled and not data.heldout and data.heldout_fraction == 0:
        yield (
            "data.heldout_fraction",
            "data.heldout_fraction = 0 leaves nothing to measure on: give data.heldout, or set eval.enabled = false",
        )


def rewards(profile: Profile) -> Iterator[Complaint]:
    """Rewards are distinguishable, move something, and say when an answer is right."""
    for name, count in Counter(reward.name for reward in profile.rewards).items():
        if count > 1:
            yield "rewards", f"rewards: {name} is listed {count} times; list it once, with all its types"
    if all(reward.weight == 0 for reward in profile.rewards):
        yield "rewards", "rewards: every weight is 0, so that nothing can be learned"
    if profile.eval.enabled and not any(reward.correct for reward in profile.rewards):
        yield (
            "rewards",
            "rewards: evaluation counts one with correct = true; mark one, or set eval.enabled = false",
        )


def guarded_address(profile: Profile) -> Iterator[Complaint]:
    """Beyond the own machine, nobody is served without a key."""
    server = profile.server
    if server.enabled and not server.api_key and not is_loopback(server.host):
        yield (
            "server.host",
            f"server.host = {server.host!r} is reachable from other machines: set server.api_key, or bind 127.0.0.1",
        )


def placeholders(profile: Profile) -> Iterator[Complaint]:
    """The run directory has a name, and only known placeholders in it."""
    if not profile.run_dir:
        yield "run_dir", "run_dir must name a directory"
    for name in re.findall(r"{(.*?)}", profile.run_dir):
        if name != "profile":
            yield "run_dir", f"run_dir: unknown placeholder {{{name}}}; there is {{profile}}"


def own_actors(profile: Profile) -> Iterator[Complaint]:
    """Each own actor stands somewhere, once, under a name of its own."""
    for name, count in Counter(actor.name for actor in profile.actors).items():
        if count > 1:
            yield "actors", f"actors: {count} are named {name!r}"
    for box, count in Counter(actor.at for actor in profile.actors if actor.mode == "replace").items():
        if count > 1:
            yield "actors", f"actors: {count} replace {box}"
    names = {*SERVICES, *(f"environment {environment.name}" for environment in profile.environments)}
    for actor in profile.actors:
        yield from _place(actor, environments=profile.atropos.enabled)
        if actor.stands_on_the_flow and actor.restart not in (None, "transient"):
            yield (
                "actors",
                f"actors: {actor.name!r} stands on the flow, where everything waits for it: restart must be "
                f"'transient', not {actor.restart!r}",
            )
        if actor.name in (*BOXES, FETCHER) and not (actor.mode == "replace" and actor.at == actor.name):
            yield "actors", f"actors: {actor.name!r} is the name of a box; choose another"
        if actor.name in names:
            yield "actors", f"actors: {actor.name!r} is the name of a service; choose another"
        if actor.mode == "replace" and actor.at == "evaluator" and not profile.eval.enabled:
            yield "actors", f"actors: {actor.name!r} replaces the evaluator, but eval.enabled = false"
        if actor.mode == "replace" and actor.at == "learner" and profile.learner.dynamic_sampling:
            yield (
                "learner.dynamic_sampling",
                f"learner.dynamic_sampling = true is the default learner's, and actors: {actor.name!r} replaces it",
            )


def _place(actor: ActorSection, *, environments: bool) -> Iterator[Complaint]:
    if actor.mode == "add":
        if actor.at:
            yield "actors", f"actors: {actor.name!r} is added beside the others and needs no `at`, not {actor.at!r}"
        return
    there = BOXES if actor.mode == "replace" else ARROWS
    if environments:
        fetcher = (FETCHER,) if actor.mode == "replace" else ()
        there = (*fetcher, *(place for place in there if place not in FETCHED))
    if actor.at not in there:
        yield (
            "actors",
            f"actors: {actor.name!r} ({actor.mode}) must be at one of {', '.join(there)}, not {actor.at!r}"
            + _why(actor.at, there, environments=environments),
        )


def _why(at: str, there: tuple[str, ...], *, environments: bool) -> str:
    if environments and at in FETCHED:
        return f"; with atropos.enabled = true groups come complete, from the {FETCHER}"
    if not environments and at == FETCHER:
        return "; it is there with atropos.enabled = true"
    guess = nearest(at, there)
    return f"; did you mean {guess}?" if guess else ""


RULES: tuple[Rule, ...] = (
    one_scale,
    trainable_layers,
    repeatable_dropout,
    known_objective,
    learnable_distribution,
    bounds_around_one,
    enough_for_mini_batches,
    completions_fit_kv_cache,
    probe_bounds,
    columns,
    rewards,
    guarded_address,
    placeholders,
    own_actors,
    *ATROPOS_RULES,
    without_effect,
)
