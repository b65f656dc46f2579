"""Rules between settings. The range of a single setting is in its struct."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from clotho.config.addresses import is_loopback
from clotho.config.effects import OBJECTIVE, RATIO, Complaint, custom_stage, without_effect
from clotho.config.group_sizes import batch_sequences, group_size, reserved_share, unfillable
from clotho.config.nearest import nearest
from clotho.config.objectives import (
    ClippedObjective,
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
    RewardKLPenalty,
)
from protocols.sampling import PARAMETERS, in_use, unlearnable

Rule = Callable[[Profile], Iterable[Complaint]]


def first_complaint(profile: Profile) -> Complaint | None:
    """The complaint of the first violated rule; None if the profile is valid."""
    return next((complaint for rule in RULES for complaint in rule(profile)), None)


def batch_start_ratio(profile: Profile) -> Iterator[Complaint]:
    """An importance correction needs a batch-start ratio reference; interpolation needs several optimizer steps."""
    objective = profile.learner.objective
    if not isinstance(objective, RatioObjective):
        return
    if objective.ratio_reference == "sampler" and not isinstance(objective.importance_correction, NoCorrection):
        yield Complaint(
            f"{OBJECTIVE}.importance_correction",
            f"{OBJECTIVE}.importance_correction would correct the mismatch with the sampler a second time, because "
            f'{RATIO} = "sampler" includes it; set {RATIO} = "batch_start"',
        )
    if objective.ratio_reference == "batch_start_interpolated" and (
        profile.learner.update_epochs * profile.learner.num_minibatches == 1
    ):
        yield Complaint(
            RATIO,
            f'{RATIO} = "batch_start_interpolated" has no effect with one optimizer step per batch: use "batch_start"',
        )


def bounds_off_or_above_one(profile: Profile) -> Iterator[Complaint]:
    """An upper bound of the importance ratio is greater than 1, or 0 to turn it off."""
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
    """Dynamic sampling, if it is on, can replace at least one group of a batch."""
    ratio, size = profile.learner.objective.dynamic_sampling_max_ratio, profile.learner.batch_size
    if ratio > 0 and int(ratio * size) <= size:
        key = f"{OBJECTIVE}.dynamic_sampling_max_ratio"
        yield Complaint(key, f"{key} = {ratio:g} must allow at least one group more than learner.batch_size = {size}")


def supplied_by_groups(profile: Profile) -> Iterator[Complaint]:
    """The type `environment` needs groups that contain the values; its advantages exclude penalties in the reward."""
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
    """A setting that another setting limits does not exceed it."""
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
    """An adapter has scale or alpha, not both, and at least one block; recomputed blocks have no dropout."""
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
    """The learner can evaluate the sampling distribution; parameters that only add to API responses are refused."""
    if (found := unlearnable(profile.sampling)) is not None:
        yield Complaint(f"sampling.{found.parameter}", f"sampling.{found.reason}")
    for name in in_use(profile.sampling, affects="report"):
        neutral = PARAMETERS[name].neutral
        yield Complaint(
            f"sampling.{name}", f"sampling.{name} must be {neutral} in training: only API requests report it"
        )


def data(profile: Profile) -> Iterator[Complaint]:
    """Prompt and answer are different columns, evaluation has held-out problems, and run_dir is a directory."""
    data = profile.data
    if data.prompt_key == data.answer_key:
        yield Complaint("data.answer_key", f"data.prompt_key and data.answer_key are both {data.prompt_key!r}")
    if profile.eval.enabled and not data.heldout and data.heldout_fraction == 0:
        yield Complaint(
            "data.heldout_fraction",
            "data.heldout_fraction = 0 means no held-out problems: set data.heldout, or eval.enabled = false",
        )
    if not profile.run_dir:
        yield Complaint("run_dir", "run_dir must name a directory")
    for name in re.findall(r"{(.*?)}", profile.run_dir):
        if name != "profile":
            yield Complaint("run_dir", f"run_dir: unknown placeholder {{{name}}}; the only one is {{profile}}")


def rewards(profile: Profile) -> Iterator[Complaint]:
    """Rewards are distinct, at least one weight is not 0, and evaluation has a reward with correct = true."""
    for name, count in Counter(reward.name for reward in profile.rewards).items():
        if count > 1:
            yield Complaint("rewards", f"rewards: {name} is listed {count} times; list it once, with all its types")
    if all(reward.weight == 0 for reward in profile.rewards):
        yield Complaint("rewards", "rewards: every weight is 0, so every advantage would be 0")
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
"""Actors and queues that the fetcher replaces if environments send the groups."""


def custom_actors(profile: Profile) -> Iterator[Complaint]:
    """Each custom actor has its own name and a valid position."""
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
        if actor.is_in_group_flow and actor.restart not in (None, "transient"):
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
    """Groups come from a running API server, from a started API server with environments, or from the mock."""
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
    supplied_by_groups,
    limits,
    data,
    rewards,
    server_address,
    custom_actors,
    group_source,
    environments,
)
