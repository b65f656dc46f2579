"""All rewards of a profile: from a group of completions to a scored group, or the reason why not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

import anyio
import structlog
from msgspec import Struct

from clotho.config.schema import RewardSection
from clotho.rewards.calling import Caller, Reward, RewardError, Values
from clotho.rewards.overlong import OVERLONG, Overlong
from clotho.rewards.registry import BUILT_IN, is_async, load_reward
from clotho.rewards.workers import WorkerLoop, WorkerThreads
from protocols.errors import ProfileError
from protocols.prompt import Problem
from protocols.rollout import Discarded, RolloutGroup
from protocols.score import GroupOutcome, ScoredGroup

SIGNAL = 1e-6
"""Rewards of a group that differ by no more teach nothing."""

log = structlog.get_logger(__name__)


class _Part(Struct, frozen=True, kw_only=True):
    section: RewardSection
    reward: Reward
    caller: Caller | None
    """Its own; None for the built-in functions, which share one call for a group."""

    def applies_to(self, kind: str) -> bool:
        return not self.section.types or kind in self.section.types


class RewardRunner:
    """The reward functions of a profile, loaded and checked.

    sections: as in the profile. concurrency: calls under way at once; further ones wait, and waiting does not count
    against a time limit. The limit of a section is for its function on a whole group; the built-in functions run
    in one call per group, limited by the sum of theirs. overlong: added to every reward, as a part of that name.
    keep_equal: groups whose rewards are equal are scored all the same, for advantages that do not compare within the
    group. Raises ProfileError for names that cannot be loaded or are taken, weights that are not finite, and one
    function twice for the same type of problem.
    """

    def __init__(
        self,
        sections: Sequence[RewardSection],
        *,
        concurrency: int = 8,
        overlong: Overlong | None = None,
        keep_equal: bool = False,
    ) -> None:
        _check(sections, taken=() if overlong is None else (OVERLONG,))
        self._overlong = overlong
        self._keep_equal = keep_equal
        self._threads = WorkerThreads()
        self._loops: list[WorkerLoop] = []
        self._limiter = anyio.Semaphore(concurrency)
        self._parts = [self._load(section) for section in sections]
        self._built_in: dict[tuple[tuple[str, float], ...], Caller] = {}

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Reward every completion of a group: the sum of weight times value over the parts that apply, and `overlong`.

        Discarded with `reward_error` where a function failed or none applied, and with `no_signal` where the rewards of
        all completions are equal (within 1e-6), as they are in a group of one, unless `keep_equal`. Raises nothing of a
        reward's own.
        """
        texts = [completion.text for completion in group.completions]
        try:
            parts = await self._values(self._applicable(group.prompt.problem), group.prompt.problem, texts)
            rewards = self._totals(group.prompt.problem, parts, len(texts))
        except RewardError as error:
            return _discarded(group, str(error))
        if self._overlong is not None:
            penalties = tuple(map(self._overlong, group.completions))
            parts[OVERLONG] = penalties
            rewards = tuple(reward + penalty for reward, penalty in zip(rewards, penalties, strict=True))
        if not self._keep_equal and max(rewards) - min(rewards) <= SIGNAL:
            detail = f"all {len(rewards)} rewards are {rewards[0]:g}"
            return Discarded(
                prompt=group.prompt,
                reason="no_signal",
                detail=detail,
                completions=group.completions,
                rewards=rewards,
                parts=parts,
            )
        return ScoredGroup(group=group, rewards=rewards, parts=parts)

    async def is_correct(self, problem: Problem, text: str) -> bool:
        """Say whether a completion is right: every applicable reward marked `correct` gives 1.0, and one applies.

        A reward that fails has not found the completion right; the failure is logged.
        """
        judges = [part for part in self._applicable(problem) if part.section.correct]
        try:
            parts = await self._values(judges, problem, [text])
        except RewardError as error:
            log.warning("reward failed on a held-out problem", error=str(error), prompt=problem.prompt)
            return False
        verdicts = [values[0] for values in parts.values() if values[0] is not None]
        return bool(verdicts) and all(verdict == 1.0 for verdict in verdicts)

    def close(self) -> None:
        """End the threads that wait for work. Those inside a call never keep the process from ending."""
        self._threads.close()
        for loop in self._loops:
            loop.close()

    def _load(self, section: RewardSection) -> _Part:
        reward = Reward(name=section.name, function=load_reward(section.name))
        loop = WorkerLoop() if is_async(reward.function) else None
        if loop is not None:
            self._loops.append(loop)
        own = section.name not in BUILT_IN
        caller = (
            Caller([reward], timeout_seconds=section.timeout_seconds, threads=self._threads, loop=loop) if own else None
        )
        return _Part(section=section, reward=reward, caller=caller)

    def _applicable(self, problem: Problem) -> list[_Part]:
        return [part for part in self._parts if part.applies_to(problem.type)]

    async def _values(self, chosen: Sequence[_Part], problem: Problem, texts: Sequence[str]) -> dict[str, Values]:
        values: dict[str, Values] = {part.reward.name: (None,) * len(texts) for part in self._parts}
        for caller in self._callers(chosen):
            async with self._limiter:
                found = await caller(problem, texts)
            values |= {reward.name: row for reward, row in zip(caller.rewards, found, strict=True)}
        return values

    def _callers(self, chosen: Sequence[_Part]) -> Iterable[Caller]:
        built_in = [part for part in chosen if part.caller is None]
        key = tuple((part.reward.name, part.section.timeout_seconds) for part in built_in)
        if built_in and key not in self._built_in:
            rewards, seconds = [part.reward for part in built_in], sum(limit for _, limit in key)
            self._built_in[key] = Caller(rewards, timeout_seconds=seconds, threads=self._threads)
        own = [part.caller for part in chosen if part.caller is not None]
        return [self._built_in[key], *own] if built_in else own

    def _totals(self, problem: Problem, parts: dict[str, Values], count: int) -> tuple[float, ...]:
        chosen = self._applicable(problem)
        totals = []
        for i in range(count):
            terms = [
                part.section.weight * value for part in chosen if (value := parts[part.reward.name][i]) is not None
            ]
            if not terms:
                raise RewardError(f"no reward applies to completion {i} of a problem of type {problem.type!r}")
            total = sum(terms)
            if not math.isfinite(total):
                raise RewardError(f"the weighted sum of completion {i} is {total}")
            totals.append(total)
        return tuple(totals)


def _discarded(group: RolloutGroup, detail: str) -> Discarded:
    return Discarded(prompt=group.prompt, reason="reward_error", detail=detail, completions=group.completions)


def _check(sections: Sequence[RewardSection], *, taken: Sequence[str]) -> None:
    for section in sections:
        if section.name in taken:
            raise ProfileError(
                f"rewards.name {section.name!r} is the name of the penalty that learner.overlong_buffer adds: "
                "leave out one of the two"
            )
        if not math.isfinite(section.weight):
            raise ProfileError(f"rewards.weight of {section.name!r} is {section.weight}; it must be finite")
    for one, other in combinations(sections, 2):
        overlap = not one.types or not other.types or set(one.types) & set(other.types)
        if one.name == other.name and overlap:
            raise ProfileError(f"rewards.name {one.name!r} stands twice for the same types of problem")
