"""Episodes of environments as groups: each is played to its end, and its rows are trained on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from itertools import chain, count
from typing import Any

import structlog
from msgspec import Struct, structs

from clotho.lanes.sampling_client import GroupSampler, Refusal
from protocols.errors import GenerationError, RequestError
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling, completion_seeds, derive
from training_run.episodes.conversations import ChatWriter, Conversations
from training_run.episodes.credit import turn_advantages
from training_run.episodes.messages import Ask, Environments, EpisodeEnded, EpisodeLimits, Event, Failed, PolicyTurn
from training_run.episodes.rounds import Rounds
from training_run.episodes.tokens import Ran, common_prefix
from training_run.groups.rollout_source import Complete

log = structlog.get_logger(__name__)


class Counts(Struct, kw_only=True):
    """What episodes have done that ended since the counts were read. seconds: waiting for environments, in all."""

    episodes: int = 0
    failed: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    limited: int = 0
    forked: int = 0
    seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Add the counts of an episode that has ended."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class EnvironmentEpisodes:
    """Makes episodes in which the policy acts in environments. counts: of those in training, since read."""

    def __init__(
        self,
        limits: EpisodeLimits,
        environments: Environments,
        writer: ChatWriter,
        *,
        sampling: Sampling,
        context_length: int,
        in_rounds: bool,
    ) -> None:
        """in_rounds: the argument `always` of `Rounds`."""
        self._limits, self._environments, self._writer = limits, environments, writer
        self._sampling, self._context = sampling, context_length
        self.in_rounds = in_rounds
        self.counts = Counts()

    def measured(self, attachment: str) -> dict[str, Any]:
        """Return the values of the metrics of an attachment since the last call."""
        counts, self.counts = self.counts, Counts()
        number = counts.episodes or 1
        values = {
            "turns": counts.turns / number,
            "tool_calls": counts.tool_calls / number,
            "tool_errors": counts.tool_errors / counts.tool_calls if counts.tool_calls else None,
            "limited": counts.limited / number,
            "failed": counts.failed,
            "forked": counts.forked,
            "seconds": counts.seconds / number,
        }
        return {f"{attachment}/{name}": value for name, value in values.items()}

    def source(self, sampler: GroupSampler, group_size: int) -> EpisodeSource:
        """Return what makes groups of episodes."""
        return EpisodeSource(self, sampler, self._sampling, group_size)

    async def held_out(
        self, problems: Sequence[Problem], sampling: Sampling, seeds: Sequence[tuple[int, ...]], complete: Complete
    ) -> list[list[Completion]]:
        """Return the episodes of each problem. One that failed has no tokens and no reward.

        The last row of an episode stands for it, with the reward of the episode.
        """
        lost = Completion(tokens=(), logprobs=(), versions=(), text="", finish_reason="abort")
        ran = self.each(problems, sampling, seeds, complete, in_rounds=True, counted=False)
        decode = self._writer.tokenizer.decode
        return [
            [
                lost
                if isinstance(one, str)
                else one.rows[-1].completion(len(one.rows[-1].prompt), decode=decode, reward=one.reward)
                for one in group
            ]
            async for group in ran
        ]

    async def each(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        seeds: Sequence[tuple[int, ...]],
        complete: Complete,
        *,
        in_rounds: bool,
        counted: bool,
    ) -> AsyncGenerator[list[Ran | str], None]:
        """Yield the episodes of each problem, in order, one for each of its seeds; a text says why one failed.

        counted: `counts` has them.
        """
        rounds = Rounds(complete, sum(map(len, seeds)), always=in_rounds)
        index = count()
        tasks = [
            [
                asyncio.create_task(self._run(next(index), problem, sampling, seed, rounds, counted=counted))
                for seed in of_problem
            ]
            for problem, of_problem in zip(problems, seeds, strict=True)
        ]
        try:
            for group in tasks:
                yield await asyncio.gather(*group)
        finally:
            for task in chain(*tasks):
                task.cancel()
            await asyncio.gather(*chain(*tasks), return_exceptions=True)
            await rounds.close()

    def group(self, prompt: Prompt, ran: Sequence[Ran | str]) -> RolloutGroup | Discarded:
        """Return the group of the episodes that did not fail: their rows, of which each is a completion."""
        kept = [one for one in ran if isinstance(one, Ran)]
        if not kept:
            reason = next((one for one in ran if isinstance(one, str)), "")
            return Discarded(prompt=prompt, reason="reward_error", detail=f"every episode failed: {reason}")
        shared = common_prefix([row.prompt for one in kept for row in one.rows])
        if not shared:
            text = "the conversations of its episodes do not begin with the same token, so that they share no prompt"
            return Discarded(prompt=prompt, reason="generation_error", detail=text)
        advantages, decode = turn_advantages([one.turn_rewards for one in kept]), self._writer.tokenizer.decode
        return RolloutGroup(
            prompt=structs.replace(prompt, tokens=kept[0].rows[0].prompt[:shared]),
            completions=tuple(
                row.completion(shared, decode=decode, reward=reward, advantages=of_turns)
                for one, of_turns in zip(kept, advantages, strict=True)
                for row, reward in zip(one.rows, one.rewards, strict=True)
            ),
        )

    async def _run(
        self, index: int, problem: Problem, sampling: Sampling, seed: int, rounds: Rounds, *, counted: bool
    ) -> Ran | str:
        counts = Counts(episodes=1)
        environment = self._environments.episode(problem)
        conversations = Conversations(self._writer, problem)
        try:
            event = await timed(environment.begin(), counts)
            while isinstance(event, Ask):
                if reason := conversations.unusable(event):
                    event = Failed(message=reason)
                    break
                counts.tool_errors += event.tool_errors
                answer = await self._turn(index, conversations, event, sampling, seed, rounds, counts)
                event = await timed(environment.go_on(answer), counts)
        except (RequestError, GenerationError) as error:
            event = Failed(message=str(error))
        finally:
            rounds.leave()
            counts.forked = conversations.forked
            if counted:
                self.counts.add(counts)
            await environment.close()
        found = event if isinstance(event, Failed) else self._ended(event, conversations)
        if isinstance(found, Ran):
            return found
        self.counts.failed += counted
        cause = {"exception": found.traceback} if found.traceback else {}
        log.warning("episode_failed", reason=found.message, **cause)
        return found.message

    def _ended(self, event: EpisodeEnded, conversations: Conversations) -> Ran | Failed:
        """Return an episode that the environment has ended, or why it cannot be trained on."""
        rows, turns, given = tuple(conversations.rows), conversations.turns, event.turn_rewards
        if event.rewards:
            rows = tuple(row for row in rows if row.conversation in event.rewards)
        if not rows:
            return Failed(message="it ended before the first message")
        rewards = tuple(event.rewards.get(row.conversation, event.reward) for row in rows)
        if self._limits.credit == "episode":
            return Ran(rows=rows, rewards=rewards, reward=event.reward)
        if 1 <= len(given) <= turns:
            return Ran(
                rows=rows, rewards=rewards, reward=event.reward, turn_rewards=(*given, *[0.0] * (turns - len(given)))
            )
        return Failed(message=f'it gave {len(given)} turn_rewards for {turns} turns; credit = "turn" needs them')

    async def _turn(
        self,
        index: int,
        conversations: Conversations,
        ask: Ask,
        sampling: Sampling,
        seed: int,
        rounds: Rounds,
        counts: Counts,
    ) -> PolicyTurn:
        """Return the next message of the policy; one with `finish = "limit"` if the episode has reached a limit."""
        row, context = conversations.prompt(ask)
        sequence, turn = (*row.sequence, *context), conversations.turns
        left = min(min(self._limits.max_tokens, self._context) - len(sequence), sampling.max_tokens)
        if left < 1 and not turn:
            text = f"its prompt has {len(sequence)} tokens, and leaves no room for a message"
            raise RequestError(text, param="messages")
        if left < 1 or turn >= self._limits.max_turns:
            counts.limited += 1
            return PolicyTurn(content="", finish="limit")
        request = SampleRequest(
            prompt=sequence,
            sampling=structs.replace(sampling, max_tokens=left),
            seeds=(derive(seed, "turn", turn) if turn else seed,),
            record_support=True,  # the learner evaluates the sampling distribution
            record_routes=True,
            reuse_prefix=True,
            background=True,
            special_tokens=True,
        )
        answer = conversations.add(ask, row, context, await rounds.sample(index, request))
        counts.turns += 1
        counts.tool_calls += len(answer.calls)
        return answer


class EpisodeSource:
    """Makes groups of episodes that a sampler samples."""

    def __init__(
        self, episodes: EnvironmentEpisodes, sampler: GroupSampler, sampling: Sampling, group_size: int
    ) -> None:
        self._episodes, self._sampler, self._sampling, self._group_size = episodes, sampler, sampling, group_size

    async def groups(self, prompts: Sequence[Prompt]) -> AsyncGenerator[RolloutGroup | Discarded, None]:
        """Yield the group of each prompt, in their order, when all episodes have ended."""
        seeds = [completion_seeds(prompt.seed, self._group_size) for prompt in prompts]
        problems, waiting = [prompt.problem for prompt in prompts], iter(prompts)
        in_rounds = self._episodes.in_rounds
        found = self._episodes.each(problems, self._sampling, seeds, self._complete, in_rounds=in_rounds, counted=True)
        async with aclosing(found) as groups:
            async for ran in groups:
                yield self._episodes.group(next(waiting), ran)

    async def _complete(self, requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
        async with aclosing(self._sampler.groups(requests)) as outcomes:  # cancellation aborts the requests
            found = {index: outcome async for index, outcome in outcomes}
        return [found[index] for index in range(len(requests))]


async def timed(waiting: Awaitable[Event], counts: Counts) -> Event:
    """Return what an environment does next, and count the seconds until then."""
    began = time.monotonic()
    found = await waiting
    counts.seconds += time.monotonic() - began
    return found
