"""Rules between settings. What one setting may be is in its struct; what settings may be together is here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from clotho.config.addresses import is_loopback
from clotho.config.group_sizes import batch_sequences, group_size, reserved_share, unfillable
from clotho.config.keys import chosen_types, keys
from clotho.config.nearest import nearest
from clotho.config.objectives import (
    ClippedObjective,
    Custom,
    EnvironmentAdvantage,
    LinearOverlongPenalty,
    NoCorrection,
    RatioObjective,
)
from clotho.config.schema import ActorSection, Profile
from clotho.config.sections_data import AdapterMethod
from clotho.config.sections_training import (
    BufferedReplay,
    ConstantSchedule,
    EnvironmentReference,
    NoKLPenalty,
    RewardKLPenalty,
    SnapshotReference,
)
from protocols.sampling import PARAMETERS, in_use, unlearnable


class Complaint(NamedTuple):
    """A key at fault, and a sentence that says why and what to do.

    decided_by: the keys that leave it without effect. If a higher layer set one of them, the key returns to its default
    instead of being refused.
    """

    key: str
    text: str
    decided_by: tuple[str, ...] = ()


class Effect(NamedTuple):
    """A condition without which keys have no effect.

    keys: a name that ends in a dot stands for every other key of that table.
    """

    keys: str
    decided_by: str
    holds: Callable[[Profile], bool]
    because: str


Rule = Callable[[Profile], Iterable[Complaint]]


def first_complaint(profile: Profile) -> Complaint | None:
    """The first rule that a profile breaks; None if it breaks none."""
    return next((complaint for rule in RULES for complaint in rule(profile)), None)


def custom_stage(profile: Profile) -> bool:
    """Whether groups pass through a custom actor, which may add to them what no built-in actor does."""
    return any(actor.stands_on_the_flow for actor in profile.actors)


def _format_is_rewarded(profile: Profile) -> bool:
    if custom_stage(profile):
        return True
    return not profile.atropos.enabled and any(reward.name == "format" for reward in profile.rewards)


def _ratio_moves(profile: Profile) -> bool:
    """Whether the importance ratio can differ from 1: against the sampler, or after a first optimizer step."""
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
        "with atropos.mock = true the groups are made here, without a server or environments",
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
        "only environments (atropos.enabled = true) bring a teacher",
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
        "eval.interval = 0 means no evaluation during training",
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
"""In this order: a condition on which others depend comes first."""


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


def batch_start_ratio(profile: Profile) -> Iterator[Complaint]:
    """An importance correction or an interpolated policy needs the batch-start policy to be a third one."""
    objective = profile.learner.objective
    if not isinstance(objective, RatioObjective):
        return
    if objective.ratio_reference == "sampler" and not isinstance(objective.importance_correction, NoCorrection):
        yield Complaint(
            f"{OBJECTIVE}.importance_correction",
            f"{OBJECTIVE}.importance_correction would count the mismatch with the sampler twice, because {RATIO} = "
            f'"sampler" already measures it; set {RATIO} = "batch_start"',
        )
    if objective.ratio_reference == "batch_start_interpolated" and (
        profile.learner.update_epochs * profile.learner.num_minibatches == 1
    ):
        yield Complaint(
            RATIO,
            f'{RATIO} = "batch_start_interpolated" has no effect with one optimizer step per batch: use "batch_start"',
        )


def bounds_off_or_above_one(profile: Profile) -> Iterator[Complaint]:
    """A bound above the importance ratio of 1 is greater than 1, or 0 for off."""
    objective = profile.learner.objective
    bounds = {"outlier_high": objective.outlier_high}
    if isinstance(objective, ClippedObjective):
        bounds["dual_clip"] = objective.dual_clip
    for name, value in bounds.items():
        if 0 < value <= 1:
            yield Complaint(
                f"{OBJECTIVE}.{name}", f"{OBJECTIVE}.{name} must be 0 (off) or greater than 1, not {value:g}"
            )


def dynamic_sampling(profile: Profile) -> Iterator[Complaint]:
    """Dynamic sampling may replace at least one group of a batch."""
    ratio, size = profile.learner.objective.dynamic_sampling_max_ratio, profile.learner.batch_size
    if ratio > 0 and int(ratio * size) <= size:
        key = f"{OBJECTIVE}.dynamic_sampling_max_ratio"
        yield Complaint(key, f"{key} = {ratio:g} times learner.batch_size, rounded down, must be more than a batch")


def brought_by_groups(profile: Profile) -> Iterator[Complaint]:
    """Advantages and references of environments exist, and nothing else is then computed from rewards."""
    objective, penalty = profile.learner.objective, profile.learner.kl_penalty
    if isinstance(objective.advantage, EnvironmentAdvantage):
        if not profile.atropos.enabled and not custom_stage(profile):
            yield Complaint(
                f"{OBJECTIVE}.advantage",
                f'{OBJECTIVE}.advantage = "environment" needs groups with advantages per token: from environments '
                "(atropos.enabled = true) or from a custom actor",
            )
        for key, used in (
            (f"{OBJECTIVE}.overlong_penalty", isinstance(objective.overlong_penalty, LinearOverlongPenalty)),
            ("learner.kl_penalty", isinstance(penalty, RewardKLPenalty)),
        ):
            if used:
                yield Complaint(key, f'{key} has no effect: {OBJECTIVE}.advantage = "environment" ignores rewards')
    if isinstance(profile.learner.reference, EnvironmentReference) and not profile.atropos.enabled:
        key = "learner.kl_penalty.reference"
        yield Complaint(key, f'{key} = "environment" needs atropos.enabled = true')


def limits(profile: Profile) -> Iterator[Complaint]:
    """A setting that is limited by another one stays within that limit."""
    learner, sampling, replay = profile.learner, profile.sampling, profile.replay
    pairs: list[tuple[str, float, str, float]] = [
        ("parity.warn_nats", profile.parity.warn_nats, "parity.stop_nats", profile.parity.stop_nats),
        (
            "learner.num_minibatches",
            learner.num_minibatches,
            "the number of groups per update",
            learner.batch_size + (replay.groups if isinstance(replay, BufferedReplay) else 0),
        ),
        ("sampling.max_tokens", sampling.max_tokens, "engine.kv_cache_tokens - 1", profile.engine.kv_cache_tokens - 1),
    ]
    if isinstance(replay, BufferedReplay):
        pairs.append(("replay.groups", replay.groups, "replay.capacity", replay.capacity))
    if not isinstance(learner.schedule, ConstantSchedule):
        highest = learner.optimizer.learning_rate
        lowest = learner.schedule.min_learning_rate
        pairs.append(("learner.schedule.min_learning_rate", lowest, "learner.optimizer.learning_rate", highest))
    if isinstance(learner.objective.overlong_penalty, LinearOverlongPenalty):
        key = f"{OBJECTIVE}.overlong_penalty.buffer"
        pairs.append(
            (key, learner.objective.overlong_penalty.buffer, "sampling.max_tokens - 1", sampling.max_tokens - 1)
        )
    decided_by = {"learner.schedule.min_learning_rate": ("learner.optimizer.learning_rate", "learner.optimizer.type")}
    for key, value, limit, highest in pairs:
        if value > highest:
            yield Complaint(key, f"{key} = {value:g} must be at most {limit} = {highest:g}", decided_by.get(key, ()))


def adapter(profile: Profile) -> Iterator[Complaint]:
    """The adapter has one scale and at least one block, and recomputed blocks have no dropout."""
    method = profile.policy.method
    if not isinstance(method, AdapterMethod):
        return
    if method.scale is not None and method.alpha is not None:
        yield Complaint("policy.method.alpha", "policy.method.scale and policy.method.alpha exclude each other")
    if method.num_layers == 0:
        yield Complaint(
            "policy.method.num_layers", "policy.method.num_layers must be -1 (all blocks) or positive, not 0"
        )
    if profile.policy.grad_checkpoint and method.dropout > 0:
        yield Complaint(
            "policy.method.dropout",
            f"policy.method.dropout = {method.dropout:g} and policy.grad_checkpoint exclude each other: a recomputed "
            "block would sample another dropout mask",
        )


def learnable_distribution(profile: Profile) -> Iterator[Complaint]:
    """The learner can evaluate the sampling distribution, and nothing is reported that training does not read."""
    if (found := unlearnable(profile.sampling)) is not None:
        yield Complaint(f"sampling.{found.parameter}", f"sampling.{found.reason}")
    for name in in_use(profile.sampling, affects="report"):
        neutral = PARAMETERS[name].neutral
        yield Complaint(
            f"sampling.{name}", f"sampling.{name} must be {neutral} in training: only API requests report it"
        )


def data(profile: Profile) -> Iterator[Complaint]:
    """Prompt and answer are two columns, and there are problems to evaluate on."""
    data = profile.data
    if data.prompt_key == data.answer_key:
        yield Complaint("data.answer_key", f"data.prompt_key and data.answer_key are both {data.prompt_key!r}")
    if profile.eval.enabled and not data.heldout and data.heldout_fraction == 0:
        yield Complaint(
            "data.heldout_fraction",
            "data.heldout_fraction = 0 leaves no held-out problems: set data.heldout, or eval.enabled = false",
        )
    if not profile.run_dir:
        yield Complaint("run_dir", "run_dir must name a directory")
    for name in re.findall(r"{(.*?)}", profile.run_dir):
        if name != "profile":
            yield Complaint("run_dir", f"run_dir: unknown placeholder {{{name}}}; the only one is {{profile}}")


def rewards(profile: Profile) -> Iterator[Complaint]:
    """Rewards are distinct, have a weight, and one of them marks correct answers."""
    for name, count in Counter(reward.name for reward in profile.rewards).items():
        if count > 1:
            yield Complaint("rewards", f"rewards: {name} is listed {count} times; list it once, with all its types")
    if all(reward.weight == 0 for reward in profile.rewards):
        yield Complaint("rewards", "rewards: every weight is 0, so that no advantage can differ from 0")
    if profile.eval.enabled and not any(reward.correct for reward in profile.rewards):
        yield Complaint(
            "rewards", "rewards: evaluation needs a reward with correct = true; mark one, or set eval.enabled = false"
        )


def server_address(profile: Profile) -> Iterator[Complaint]:
    """A server that other machines can reach has an API key."""
    server = profile.server
    if server.enabled and not server.api_key and not is_loopback(server.host):
        yield Complaint(
            "server.host",
            f"server.host = {server.host!r} is reachable from other machines: set server.api_key, or bind 127.0.0.1",
        )


ACTORS = ("prompter", "generator", "scorer", "learner", "broadcaster", "checkpointer", "evaluator", "monitor")
SERVICES = ("server", "watchdog", "decode engine", "atropos server")
QUEUES = ("prompts", "rollouts", "scored", "reports")
FETCHER = "atropos_fetcher"
FETCHED = (*ACTORS[:3], *QUEUES[:2])
"""Actors and queues that the fetcher replaces if groups come from environments."""


def custom_actors(profile: Profile) -> Iterator[Complaint]:
    """Each custom actor has one place and a name of its own."""
    for name, count in Counter(actor.name for actor in profile.actors).items():
        if count > 1:
            yield Complaint("actors", f"actors: {count} are named {name!r}")
    for place, count in Counter(actor.at for actor in profile.actors if actor.mode == "replace").items():
        if count > 1:
            yield Complaint("actors", f"actors: {count} replace {place}")
    services = {*SERVICES, *(f"environment {environment.name}" for environment in profile.environments)}
    for actor in profile.actors:
        yield from _place(actor, environments=profile.atropos.enabled)
        if actor.name in services or (
            actor.name in (*ACTORS, FETCHER) and (actor.mode, actor.at) != ("replace", actor.name)
        ):
            yield Complaint("actors", f"actors: {actor.name!r} is the name of a built-in actor or service")
        if actor.stands_on_the_flow and actor.restart not in (None, "transient"):
            yield Complaint(
                "actors",
                f"actors: groups pass through {actor.name!r}: restart must be 'transient', not {actor.restart!r}",
            )
        if actor.mode == "replace" and actor.at == "evaluator" and not profile.eval.enabled:
            yield Complaint("actors", f"actors: {actor.name!r} replaces the evaluator, but eval.enabled = false")
        if actor.mode == "replace" and actor.at == "learner" and profile.learner.objective.dynamic_sampling_max_ratio:
            key = f"{OBJECTIVE}.dynamic_sampling_max_ratio"
            yield Complaint(key, f"{key} belongs to the built-in learner, which {actor.name!r} replaces")


def _place(actor: ActorSection, *, environments: bool) -> Iterator[Complaint]:
    if actor.mode == "add":
        if actor.at:
            yield Complaint("actors", f"actors: {actor.name!r} has mode 'add' and takes no `at`, not {actor.at!r}")
        return
    places: tuple[str, ...] = ACTORS if actor.mode == "replace" else QUEUES
    if environments:
        fetcher = (FETCHER,) if actor.mode == "replace" else ()
        places = (*fetcher, *(place for place in places if place not in FETCHED))
    if actor.at in places:
        return
    if environments and actor.at in FETCHED:
        hint = f"; with atropos.enabled = true complete groups come from the {FETCHER}"
    elif not environments and actor.at == FETCHER:
        hint = "; it exists with atropos.enabled = true"
    else:
        hint = f"; did you mean {guess}?" if (guess := nearest(actor.at, places)) else ""
    yield Complaint(
        "actors",
        f"actors: {actor.name!r} ({actor.mode}) must be at one of {', '.join(places)}, not {actor.at!r}{hint}",
    )


OPTION_KEYS = {
    "group_size": "group_size",
    "inference_weight": "weight",
    "min_batch_allocation": "min_batch_allocation",
}
"""Flags of an environment's script that keys of [[environments]] set."""

API_SERVER = "api-server"
ROUNDING = 1e-9


def group_source(profile: Profile) -> Iterator[Complaint]:
    """Groups come from a running server, from a started one with environments, or from the mock."""
    atropos = profile.atropos
    if not atropos.enabled:
        return
    if not atropos.mock and not atropos.url and not atropos.python:
        yield Complaint(
            "atropos.enabled",
            "atropos.enabled = true needs a source of groups: atropos.url of a running API server, atropos.python with "
            "[[environments]] to start both, or atropos.mock = true",
        )
    if not atropos.mock and atropos.python and not profile.environments:
        what = "environments" if atropos.url else "an API server and the environments"
        yield Complaint("atropos.python", f"atropos.python starts {what}: list at least one in [[environments]]")
    if not profile.server.enabled:
        yield Complaint(
            "server.enabled", "server.enabled = false contradicts atropos.enabled: environments sample over HTTP"
        )
    if not profile.asynchronous:
        yield Complaint(
            "async",
            "async = false and atropos.enabled = true exclude each other: environments run ahead of the learner; "
            "learner.max_staleness limits how far",
        )


def environments(profile: Profile) -> Iterator[Complaint]:
    """Environments have distinct names, shares that fit into a batch, and group sizes that fill it."""
    listed = profile.environments
    for name, count in Counter(environment.name.casefold() for environment in listed).items():
        if count > 1:
            yield Complaint("environments", f"environments: {count} are named {name!r}; case does not count")
        if name == API_SERVER:
            yield Complaint("environments", f"environments: {name!r} is the name of the server's log; choose another")
    for environment in listed:
        for option in environment.options:
            if key := OPTION_KEYS.get(option.removeprefix("env.")):
                text = f"environments: {environment.name!r}: set {key} by its key, not as an option"
                yield Complaint("environments", text)
    yield from (Complaint("environments", f"environments: {text}") for text in _shares(profile))


def _shares(profile: Profile) -> Iterator[str]:
    listed = profile.environments
    total = sum(environment.min_batch_allocation or 0.0 for environment in listed)
    if total > 1.0 + ROUNDING:
        yield f"min_batch_allocation adds up to {total:g}; it must be at most 1"
    batch, shares = batch_sequences(profile), {one.name: reserved_share(one, profile) for one in listed}
    for name, share in shares.items():
        if share is not None and int(batch * share) == 0:
            yield f"the share of {name!r} is less than one group of a batch: raise it"
        if share is None and sum(other or 0.0 for other in shares.values()) >= 1.0 - ROUNDING:
            yield f"min_batch_allocation of the others leaves no share for {name!r}"
    if len(listed) == 1 and listed[0].weight != 1.0 and not profile.atropos.url:
        yield f"weight has no effect: {listed[0].name!r} is the only one"
    if complaint := unfillable(batch, {one.name: group_size(one, profile) for one in listed}):
        yield complaint


RULES: tuple[Rule, ...] = (
    adapter,
    learnable_distribution,
    without_effect,
    batch_start_ratio,
    bounds_off_or_above_one,
    dynamic_sampling,
    brought_by_groups,
    limits,
    data,
    rewards,
    server_address,
    custom_actors,
    group_source,
    environments,
)
