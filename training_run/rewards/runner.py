"""The reward functions of a profile, applied to groups of completions and to held-out problems."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import anyio
import structlog
from msgspec import Struct

from clotho.extension import provided
from clotho.rewards.answer import PLACES
from clotho.rewards.registry import (
    ARGUMENTS,
    GroupParameters,
    RewardOptions,
    built_in,
    group_parameters,
    is_async,
    load_reward,
    split_name,
)
from clotho.rewards.values import MAX_REWARD, Completions, Reward, RewardError, Values, too_large
from clotho.settings.objectives import BatchAdvantage, EnvironmentAdvantage, LinearOverlongPenalty
from protocols.errors import ProfileError, did_you_mean
from protocols.evaluation import Grade
from protocols.prompt import Problem
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import Completion
from training_run.profile.data import RewardSection
from training_run.profile.schema import Profile
from training_run.rewards.calls import AsyncCaller, Caller, ModelCaller, ModelReward, WorkerLoop
from training_run.rewards.overlong import OVERLONG, Overlong

if TYPE_CHECKING:
    from clotho.lanes.compute_thread import Compute
    from training_run.rewards.worker_pool import WorkerPool
    from training_run.rewards.worker_process import NewWorker

log = structlog.get_logger(__name__)


DEFAULT_MAX_WORKERS = 8
DEFAULT_MEMORY_MB = 4096


class GroupCaller(Protocol):
    """Calls functions on all completions of a group. names: of the functions, in the profile."""

    names: tuple[str, ...]

    def __call__(self, completions: Completions) -> Awaitable[list[Values]]:
        """Return the value of every function for every completion. Raises RewardError."""


class _Component(Struct, frozen=True, kw_only=True):
    """A reward function of the profile. caller: None for built-in functions in threads, which share one call.

    reward: the function, if it runs in threads. pool: its workers, if it runs in processes.
    """

    section: RewardSection
    caller: GroupCaller | None
    reward: Reward | None = None
    pool: WorkerPool | None = None

    @property
    def name(self) -> str:
        """The name in the profile."""
        return self.section.name

    @property
    def group(self) -> GroupParameters | None:
        """The parameters of a function of a group, if the function is loaded."""
        function = self.pool or self.reward
        return function.group if function else None

    def applies_to(self, problem_type: str) -> bool:
        """Whether the function scores problems of this type."""
        return not self.section.types or problem_type in self.section.types


class RewardRunner:
    """Loads the reward functions of a profile and scores completions with them.

    concurrency: maximum number of concurrent calls.
    """

    def __init__(
        self,
        sections: Sequence[RewardSection],
        *,
        concurrency: int | None = None,
        overlong: Overlong | None = None,
        keep_zero_variance: bool = False,
        max_steps: int = 0,
        workers: Mapping[str, NewWorker] = MappingProxyType({}),
    ) -> None:
        """Load and check every function of `sections`.

        Args:
            sections: the `[[rewards]]` tables of the profile. Without any, rewards are 0 and nothing is graded.
            concurrency: maximum number of concurrent calls; None: as many as the largest `max_workers` can use, and at
                least `DEFAULT_MAX_WORKERS`. Waiting for a call does not count towards a time limit.
            overlong: length penalty, added to every reward as the component `overlong`.
            keep_zero_variance: score groups with equal rewards instead of discarding them, for advantages that are
                normalized over more than the group.
            max_steps: `steps` of the profile, for functions that read `trainer_state`.
            workers: what starts the workers of functions, by their `where`; without one, they start on this machine.

        The time limit of a section covers its function on a whole group. The built-in functions run in one call per
        group, whose time limit is the sum of theirs. Raises ProfileError if a name is unknown, a function that runs in
        threads cannot be loaded, a weight is not finite, the name `overlong` is taken, a function is listed twice for
        the same type of problem, or a setting of worker processes has no effect.
        """
        _check_sections(sections, reserved=() if overlong is None else (OVERLONG,))
        self._overlong = overlong
        self._keep_zero_variance = keep_zero_variance
        self._max_steps, self._workers = max_steps, workers
        self._loops: list[WorkerLoop] = []
        self._failed: set[str] = set()
        self._pools: list[WorkerPool] = []
        self._models: list[ModelReward] = []
        most = max((section.max_workers or 0 for section in sections), default=0)
        self.concurrency = concurrency or max(DEFAULT_MAX_WORKERS, most)
        self._limiter = anyio.Semaphore(self.concurrency)
        self._groups = _Occupancy(self.concurrency)
        self._components = [self._load(section) for section in sections]
        self._built_in: dict[tuple[tuple[str, str | None, float], ...], Caller] = {}

    async def start(self, compute: Compute | None = None) -> None:
        """Start one worker process per function and load models, until all are ready. Raises ProfileError, ModelError.

        compute: for the models; None: no group will be scored. Without this call, the first group starts the
        processes, and a function that cannot be loaded discards its groups.
        """
        await asyncio.gather(*(pool.start() for pool in self._pools))
        if compute is not None:
            for model in self._models:
                await model.begin(compute)

    @property
    def full_seconds(self) -> float:
        """Total of the time in which as many groups were scored as `concurrency` allows."""
        return self._groups.full_seconds

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Score a group: the weighted sum of all functions that apply, plus the length penalty.

        The group is discarded with the reason `reward_error` if a function fails, no function applies to a
        completion, or a value or sum is beyond `MAX_REWARD`. It is discarded with the reason `zero_variance` if all
        rewards are equal (within `ZERO_VARIANCE_THRESHOLD`), `keep_zero_variance` is not set, and the completions have
        no advantages of their own. A group of one completion always has equal rewards.
        """
        problem = group.prompt.problem
        components = self._applicable(problem)
        try:
            with self._groups:
                parts = await self._values(components, _seen(problem, group.completions))
            rewards = self._weighted_sums(problem, parts, len(group.completions))
        except RewardError as error:
            self._log_first(error)
            return Discarded(
                prompt=group.prompt,
                reason="reward_error",
                detail=str(error),
                completions=group.completions,
                failed_rewards=error.rewards,
            )
        correct = tuple(
            _accepted(components, {name: row[i] for name, row in parts.items()}) for i in range(len(rewards))
        )
        if self._overlong is not None:
            penalties = tuple(map(self._overlong, group.completions))
            parts[OVERLONG] = penalties
            rewards = tuple(reward + penalty for reward, penalty in zip(rewards, penalties, strict=True))
        given = tuple(completion.advantages for completion in group.completions)
        scored = ScoredGroup(
            group=group, rewards=rewards, parts=parts, correct=correct, token_advantages=given if any(given) else ()
        )
        return scored if self._keep_zero_variance or scored.token_advantages else scored.unless_equal()

    async def grade(self, problem: Problem, completions: Sequence[Completion]) -> list[Grade]:
        """Grade completions of a held-out problem, which are one group for rewards over groups.

        A completion is correct if every applicable reward with `correct = true` returns 1.0; `correct` is None if none
        applies. A failure is logged: the completions then have no reward, and are incorrect if the function that failed
        has `correct = true`.
        """
        seen = _seen(problem, completions)
        components, parts, failed = self._applicable(problem), dict[str, Values | None](), list[str]()
        for caller in self._callers(components):
            try:
                async with self._limiter:
                    rows = await caller(seen)
            except RewardError as error:
                log.warning("held_out_reward_failed", error=str(error), prompt=problem.prompt)
                failed += error.rewards or caller.names
                parts |= dict.fromkeys(caller.names)
            else:
                parts |= dict(zip(caller.names, rows, strict=True))
        return [self._grade(components, parts, i, completion, failed) for i, completion in enumerate(completions)]

    def _grade(
        self,
        components: Sequence[_Component],
        parts: Mapping[str, Values | None],
        i: int,
        completion: Completion,
        failed: Sequence[str],
    ) -> Grade:
        """Return the grade of completion `i`. parts: None for functions without values, because one of them failed."""
        values = {name: row[i] for name, row in parts.items() if row is not None}
        found = {name: value for name, value in values.items() if value is not None}
        judges = {component.name for component in components if component.section.correct}
        terms = [
            component.section.weight * found[component.name] for component in components if component.name in found
        ]
        if self._overlong is not None:
            found[OVERLONG] = self._overlong(completion)
            terms += [found[OVERLONG]] if terms else []
        reward = None if failed or not terms or too_large(sum(terms)) else sum(terms)
        return Grade(
            correct=False if judges - values.keys() else _accepted(components, found),
            reward=reward,
            parts=found,
            failed=tuple(failed),
        )

    @property
    def from_environments(self) -> tuple[str, ...]:
        """Names of the functions that read the reward of an environment."""
        groups = ((component.name, component.group) for component in self._components)
        return tuple(name for name, group in groups if group is not None and "environment_rewards" in group.names)

    def types_without_correct(self, types: Iterable[str]) -> tuple[str, ...]:
        """Return the types of problem, sorted, for which no reward with `correct = true` is listed."""
        correct = [component for component in self._components if component.section.correct]
        return tuple(sorted(kind for kind in set(types) if not any(part.applies_to(kind) for part in correct)))

    def require_columns(self, problems: Sequence[Problem]) -> None:
        """Check that the dataset has the columns that the functions of groups have as parameters.

        Knows the parameters of functions in worker processes after `start`. Raises ProfileError.
        """
        for component in self._components:
            if component.group is None:
                continue
            applicable = [problem for problem in problems if component.applies_to(problem.type)]
            columns = set[str]().union(*(problem.extra for problem in applicable))
            if applicable and (
                missing := [name for name in component.group.required if name not in columns | ARGUMENTS]
            ):
                raise ProfileError(
                    f"rewards.name {component.name!r} has the parameter {missing[0]!r}, and the dataset has no such "
                    f"column{did_you_mean(missing[0], columns)}; columns: {', '.join(sorted(columns))}"
                )

    def close(self) -> None:
        """End the worker processes and event loops. A thread inside a call does not keep the process alive."""
        for pool in self._pools:
            pool.close()
        for loop in self._loops:
            loop.close()

    def _load(self, section: RewardSection) -> _Component:
        options = RewardOptions(
            answer_in=section.answer_in or "tags",
            settings=section.settings,
            timeout_seconds=section.timeout_seconds,
            max_steps=self._max_steps,
        )
        if runs_in_process(section):
            from training_run.rewards.worker_pool import WorkerPool  # most rewards need no processes
            from training_run.rewards.worker_process import ProcessFunction, new_process

            if section.name not in built_in():
                split_name(section.name)
            memory_bytes = (section.memory_limit_mb or DEFAULT_MEMORY_MB) * 2**20
            function = ProcessFunction(name=section.name, options=options, memory_bytes=memory_bytes)
            pool = WorkerPool(
                function,
                max_workers=section.max_workers or DEFAULT_MAX_WORKERS,
                new_worker=self._workers.get(section.where, new_process),
            )
            self._pools.append(pool)
            return _Component(section=section, caller=pool, pool=pool)
        found = built_in().get(section.name)
        if found is not None and found.computes:
            model: ModelReward = provided(found.load)(options)
            self._models.append(model)
            caller = ModelCaller(section.name, model, timeout_seconds=section.timeout_seconds)
            return _Component(section=section, caller=caller)
        loaded = load_reward(section.name, options)
        is_built_in = section.name in built_in()
        reward = Reward(name=section.name, function=loaded, group=group_parameters(loaded), max_steps=self._max_steps)
        if is_built_in:
            return _Component(section=section, caller=None, reward=reward)
        return _Component(section=section, caller=self._caller(reward, section.timeout_seconds), reward=reward)

    def _caller(self, reward: Reward, timeout_seconds: float) -> GroupCaller:
        """Return what calls a function of the user in threads."""
        if not is_async(reward.function):
            return Caller([reward], timeout_seconds=timeout_seconds, concurrency=self.concurrency)
        self._loops.append(WorkerLoop())
        return AsyncCaller(reward, timeout_seconds=timeout_seconds, loop=self._loops[-1])

    def _log_first(self, error: RewardError) -> None:
        """Log the first failure of each function, with the traceback of its exception."""
        if not self._failed.issuperset(error.rewards):
            self._failed.update(error.rewards)
            cause = {"exception": error.traceback} if error.traceback else {"error": str(error)}
            log.warning("reward_failed", reward=", ".join(error.rewards), **cause)

    def _applicable(self, problem: Problem) -> list[_Component]:
        return [component for component in self._components if component.applies_to(problem.type)]

    async def _values(self, components: Sequence[_Component], completions: Completions) -> dict[str, Values]:
        none: Values = (None,) * len(completions.texts)
        values = {component.name: none for component in self._components}
        for caller in self._callers(components):
            try:
                async with self._limiter:
                    rows = await caller(completions)
            except RewardError as error:
                error.rewards = error.rewards or caller.names
                raise
            values |= dict(zip(caller.names, rows, strict=True))
        return values

    def _callers(self, components: Sequence[_Component]) -> Iterable[GroupCaller]:
        built_in = [component for component in components if component.caller is None]
        sections = [component.section for component in built_in]
        key = tuple((section.name, section.answer_in, section.timeout_seconds) for section in sections)
        if built_in and key not in self._built_in:
            rewards = [component.reward for component in built_in if component.reward is not None]
            seconds = sum(section.timeout_seconds for section in sections)
            self._built_in[key] = Caller(rewards, timeout_seconds=seconds, concurrency=self.concurrency)
        custom = [component.caller for component in components if component.caller is not None]
        return [self._built_in[key], *custom] if built_in else custom

    def _weighted_sums(self, problem: Problem, parts: dict[str, Values], count: int) -> tuple[float, ...]:
        components = self._applicable(problem)
        sums = []
        for i in range(count):
            terms = [
                component.section.weight * value
                for component in components
                if (value := parts[component.name][i]) is not None
            ]
            if not terms and self._components:
                raise RewardError(f"no reward applies to completion {i} of a problem of type {problem.type!r}")
            total = sum(terms)
            if too_large(total):
                raise RewardError(
                    f"the weighted sum of completion {i} is {total!r}; it is at most {MAX_REWARD:g} in absolute size"
                )
            sums.append(total)
        return tuple(sums)


class _Occupancy:
    """Counts what is in progress, and for how long `limit` were. full_seconds: total until now."""

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0
        self._before, self._since = 0.0, 0.0

    @property
    def full_seconds(self) -> float:
        """The time in which all places were taken."""
        return self._before + (time.monotonic() - self._since if self._count >= self._limit else 0.0)

    def __enter__(self) -> None:
        self._count += 1
        if self._count == self._limit:
            self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._before = self.full_seconds
        self._since = time.monotonic()
        self._count -= 1


def _accepted(components: Sequence[_Component], values: Mapping[str, float | None]) -> bool | None:
    """Whether every reward with `correct = true` accepts a completion; None if none has a value for it."""
    found = [values.get(component.name) for component in components if component.section.correct]
    judged = [value == 1.0 for value in found if value is not None]
    return all(judged) if judged else None


def rewards_of(
    profile: Profile, *, workers: Mapping[str, NewWorker] = MappingProxyType({}), learns_equal: bool = False
) -> RewardRunner:
    """Return the rewards of a profile. workers: as of `RewardRunner`, whose errors it raises.

    learns_equal: groups with equal rewards are scored, whatever the advantage is.
    """
    objective, overlong = profile.learner.objective, None
    if isinstance(penalty := objective.overlong_penalty, LinearOverlongPenalty):
        overlong = Overlong(max_tokens=profile.sampling.max_tokens, buffer=penalty.buffer, penalty=penalty.max_penalty)
    within_group = not isinstance(objective.advantage, BatchAdvantage | EnvironmentAdvantage)
    return RewardRunner(
        profile.rewards,
        concurrency=profile.rollouts.scoring,
        overlong=overlong,
        keep_zero_variance=learns_equal or not within_group,
        max_steps=profile.steps,
        workers=workers,
    )


def _seen(problem: Problem, completions: Sequence[Completion]) -> Completions:
    """Return what reward functions receive of completions."""
    given = tuple(completion.reward for completion in completions)
    return Completions(
        problem=problem,
        texts=tuple(completion.text for completion in completions),
        tokens=tuple(completion.tokens for completion in completions),
        version=max((completion.versions[-1] for completion in completions if completion.versions), default=0),
        environment=given if any(reward is not None for reward in given) else (),
    )


def runs_in_process(section: RewardSection) -> bool:
    """Return whether a function runs in worker processes: a function of the user, unless its section says otherwise."""
    if section.where == "cluster":
        return True
    if found := built_in().get(section.name):
        return not found.place and not found.computes
    return section.run_in != "thread"


def _check_sections(sections: Sequence[RewardSection], *, reserved: Sequence[str]) -> None:
    for section in sections:
        if section.name in reserved:
            raise ProfileError(
                f"rewards.name {section.name!r} is also the name of the penalty that "
                "learner.objective.overlong_penalty adds: remove one of the two"
            )
        if not math.isfinite(section.weight):
            raise ProfileError(f"rewards.weight of {section.name!r} is {section.weight}; it must be finite")
        _check_effect(section)
    for one, other in combinations(sections, 2):
        overlap = not one.types or not other.types or set(one.types) & set(other.types)
        if one.name == other.name and overlap:
            raise ProfileError(f"rewards.name {one.name!r} is listed twice for the same types of problem")


def _check_effect(section: RewardSection) -> None:
    """Refuse settings that have no effect on this function."""
    table, in_process = built_in(), runs_in_process(section)
    found = table.get(section.name)
    place = "process" if in_process else "thread"
    if found and found.computes and section.where != "local":
        raise ProfileError(f"rewards.where of {section.name!r}: it computes in the process of the run; remove the key")
    if section.where == "cluster" and section.run_in == "thread":
        raise ProfileError(
            f'rewards.run_in of {section.name!r}: with where = "cluster" it runs in a process; remove one of the keys'
        )
    if found and section.run_in not in ("auto", place):
        raise ProfileError(
            f"rewards.run_in of {section.name!r}: this built-in function runs in a {place}; remove the key"
        )
    for key in ("max_workers", "memory_limit_mb"):
        if getattr(section, key) is not None and not in_process:
            raise ProfileError(
                f"rewards.{key} of {section.name!r} has no effect: the function runs in threads of the run "
                '(rewards.run_in = "process" would change that for a function of your own)'
            )
    if section.answer_in is not None and not (found and found.reads_answer):
        reading = ", ".join(name for name, one in table.items() if one.reads_answer)
        raise ProfileError(f"rewards.answer_in of {section.name!r} has no effect: only {reading} find an answer")
    if section.settings and not (found and found.has_settings):
        having = ", ".join(name for name, one in table.items() if one.has_settings)
        raise ProfileError(f"rewards.settings of {section.name!r} has no effect: only {having} has settings")


def expected(section: RewardSection) -> str:
    """Return what a reward expects of a completion; empty for a function of the user."""
    found = built_in().get(section.name)
    return found.expects.format(place=PLACES[section.answer_in or "tags"]) if found else ""


def expectations(sections: Iterable[RewardSection]) -> dict[str, str]:
    """Return what the built-in rewards of a profile expect, by name."""
    found: dict[str, list[str]] = {}
    for section in sections:
        if (text := expected(section)) and text not in found.setdefault(section.name, []):
            found[section.name].append(text)
    return {name: "; ".join(texts) for name, texts in found.items()}


def expects_tag(section: RewardSection) -> bool:
    """Return whether a built-in reward is 0 for every completion without `<answer>`."""
    if section.name == "format":
        return True
    found = built_in().get(section.name)
    return found is not None and found.reads_answer and section.answer_in in (None, "tags")
