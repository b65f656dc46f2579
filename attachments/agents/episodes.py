"""Episodes of several turns: each is one growing list of tokens, of which nothing is tokenized twice.

An episode begins with the prompt of its problem. The tokens of the policy are kept as they were sampled; what the
environment adds is rendered by the chat template behind them (`ChatTokenizer.continue_chat`), and is context that is
not trained on. A template may write earlier turns otherwise, for example without their reasoning, which is kept here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import chain, count
from typing import Any

import structlog
from msgspec import Struct, structs

from attachments.agents.credit import turn_advantages
from attachments.agents.messages import Answer, Ask, EpisodeEnded, Failed, PolicyTurn
from attachments.agents.rounds import Rounds
from attachments.agents.sections import PythonAgent
from attachments.agents.workers import Workers
from clotho import extension
from clotho.data.problems import conversation
from clotho.extension import ReadMessage, SampledMessage
from clotho.lanes.sampling_client import GroupSampler, Refusal
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import GenerationError, ProfileError, RequestError
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, FinishReason, SampleRequest, Sampling, completion_seeds, derive, turns_of
from training_run.groups.rollout_source import Complete

PROMPT_TAIL = 16
"""Number of last tokens of a prompt in which a chat template may open or close the reasoning."""

ROLES = ("user", "tool")
"""Roles of the messages of an environment."""

log = structlog.get_logger(__name__)


class Counts(Struct, kw_only=True):
    """What episodes have done that ended since the counts were read. seconds: waiting for environments, in all."""

    episodes: int = 0
    failed: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    limited: int = 0
    seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Add the counts of an episode that has ended."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class EpisodeTokens:
    """The tokens of one episode, which only grow. called: names of the tools that each message of the policy calls."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.turns = 0
        self.finish: FinishReason = "stop"
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._supports: list[bytes] = []
        self._turn: list[int] = []
        self.called: list[tuple[str, ...]] = []

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt and all tokens behind it."""
        return (*self.prompt, *self._tokens)

    def add(self, context: Sequence[int], completion: Completion) -> None:
        """Add tokens of the environment, and what the policy has sampled behind them."""
        version = self._versions[-1] if self._versions else completion.versions[0]
        added, sampled = len(context), len(completion.tokens)
        self._tokens += [*context, *completion.tokens]
        self._logprobs += [*[0.0] * added, *completion.logprobs]
        self._versions += [*[version] * added, *completion.versions]
        self._sampled += [*[False] * added, *[True] * sampled]
        self._supports += [*[b""] * added, *(completion.supports or [b""] * sampled)]
        self._turn += [self.turns] * (added + sampled)
        self.turns, self.finish = self.turns + 1, completion.finish_reason

    def completion(
        self,
        shared: int,
        *,
        decode: Callable[[Sequence[int]], str],
        reward: float | None,
        advantages: Sequence[float] = (),
    ) -> Completion:
        """Return the episode behind the first `shared` tokens of its prompt, which all episodes of its group have.

        advantages: of its turns; empty if they follow from the reward.
        """
        before = self.prompt[shared:]
        tokens, added = (*before, *self._tokens), len(before)
        sampled, text, called = (*[False] * added, *self._sampled), decode(tokens), iter(self.called)
        turns = turns_of(tokens, sampled, text, decode)
        return Completion(
            tokens=tokens,
            logprobs=(*[0.0] * added, *self._logprobs),
            versions=(*self._versions[:1] * added, *self._versions),
            sampled=sampled,
            turns=tuple(structs.replace(turn, tools=next(called)) if turn.sampled else turn for turn in turns),
            supports=(*[b""] * added, *self._supports) if any(self._supports) else (),
            text=text,
            finish_reason=self.finish,
            reward=reward,
            advantages=(*[0.0] * added, *(advantages[turn] for turn in self._turn)) if advantages else (),
        )


class Ran(Struct, frozen=True, kw_only=True):
    """An episode that has ended, with the rewards of the environment. turn_rewards: empty, or one per turn."""

    episode: EpisodeTokens
    reward: float | None
    turn_rewards: tuple[float, ...] = ()


class PythonEpisodes:
    """Makes episodes in which the policy acts in an environment of Python. counts: of those in training, since read."""

    def __init__(
        self,
        settings: PythonAgent,
        workers: Workers,
        tokenizer: ChatTokenizer,
        *,
        tools: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        system: str,
        context_length: int,
        in_rounds: bool,
    ) -> None:
        """tools: of the environment. system: system message of prompts. in_rounds: the argument `always` of `Rounds`.

        Raises ProfileError if the chat template cannot continue a conversation, or its calls cannot be read.
        """
        self._settings, self.workers, self._tokenizer, self._tools = settings, workers, tokenizer, tools
        self._sampling, self._system, self._context = sampling, system, context_length
        self.in_rounds = in_rounds
        self._read = message_reader(tokenizer, tools)
        self.counts = Counts()
        try:
            self._suffix(PolicyTurn(content="a"), [{"role": "user", "content": "b"}])
        except RequestError as error:
            raise ProfileError(f"agent: {error}") from None

    def take_counts(self) -> Counts:
        """Return what episodes have done since the last call."""
        taken, self.counts = self.counts, Counts()
        return taken

    def source(self, sampler: GroupSampler, group_size: int) -> EpisodeSource:
        """Return what makes groups of episodes."""
        return EpisodeSource(self, sampler, self._sampling, group_size)

    async def held_out(
        self, problems: Sequence[Problem], sampling: Sampling, seeds: Sequence[tuple[int, ...]], complete: Complete
    ) -> list[list[Completion]]:
        """Return the episodes of each problem. One that failed has no tokens and no reward."""
        lost = Completion(tokens=(), logprobs=(), versions=(), text="", finish_reason="abort")
        ran = self.each(problems, sampling, seeds, complete, in_rounds=True, counted=False)
        return [
            [lost if isinstance(one, str) else self._completion(one, (), len(one.episode.prompt)) for one in group]
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
        """Return the group of the episodes that did not fail."""
        kept = [one for one in ran if isinstance(one, Ran)]
        if not kept:
            reason = next((one for one in ran if isinstance(one, str)), "")
            return Discarded(prompt=prompt, reason="generation_error", detail=f"every episode failed: {reason}")
        shared = common_prefix([one.episode.prompt for one in kept])
        advantages = turn_advantages([one.turn_rewards for one in kept])
        return RolloutGroup(
            prompt=structs.replace(prompt, tokens=kept[0].episode.prompt[:shared]),
            completions=tuple(self._completion(*one, shared) for one in zip(kept, advantages, strict=True)),
        )

    def _completion(self, ran: Ran, advantages: Sequence[float], shared: int) -> Completion:
        decode = self._tokenizer.decode
        return ran.episode.completion(shared, decode=decode, reward=ran.reward, advantages=advantages)

    async def _run(
        self, index: int, problem: Problem, sampling: Sampling, seed: int, rounds: Rounds, *, counted: bool
    ) -> Ran | str:
        counts = Counts(episodes=1)
        environment = self.workers.episode(problem)
        episode: EpisodeTokens | None = None
        answer, context = PolicyTurn(content=""), tuple[int, ...]()
        try:
            event = await timed(environment.begin(), counts)
            while isinstance(event, Ask):
                if reason := unusable(event, first=episode is None):
                    event = Failed(message=reason)
                    break
                if episode is None:
                    episode = EpisodeTokens(self._prompt(problem, event))
                else:
                    context = self._suffix(answer, event.messages)
                counts.tool_errors += event.tool_errors
                answer = await self._turn(index, episode, context, sampling, seed, rounds, counts)
                event = await timed(environment.go_on(answer), counts)
        except (RequestError, GenerationError) as error:
            event = Failed(message=str(error))
        finally:
            rounds.leave()
            if counted:
                self.counts.add(counts)
            await environment.close()
        if isinstance(event, EpisodeEnded) and episode is not None:
            given, turns = event.turn_rewards, episode.turns
            if self._settings.credit == "episode":
                return Ran(episode=episode, reward=event.reward)
            if min(turns, 1) <= len(given) <= turns:
                return Ran(episode=episode, reward=event.reward, turn_rewards=(*given, *[0.0] * (turns - len(given))))
            event = Failed(
                message=f'it gave {len(given)} turn_rewards for {turns} turns; agent.credit = "turn" needs them'
            )
        failure = event if isinstance(event, Failed) else Failed(message="it ended before the first message")
        self.counts.failed += counted
        cause = {"exception": failure.traceback} if failure.traceback else {}
        log.warning("episode_failed", reason=failure.message, **cause)
        return failure.message

    async def _turn(
        self,
        index: int,
        episode: EpisodeTokens,
        context: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        rounds: Rounds,
        counts: Counts,
    ) -> PolicyTurn:
        """Return the next message of the policy; one with `finish = "limit"` if the episode has reached a limit."""
        sequence = (*episode.sequence, *context)
        left = min(min(self._settings.max_tokens, self._context) - len(sequence), sampling.max_tokens)
        if left < 1 or episode.turns >= self._settings.max_turns:
            counts.limited += 1
            return PolicyTurn(content="", finish="limit")
        request = SampleRequest(
            prompt=sequence,
            sampling=structs.replace(sampling, max_tokens=left),
            seeds=(derive(seed, "turn", episode.turns) if episode.turns else seed,),
            record_support=True,  # the learner evaluates the sampling distribution
            reuse_prefix=True,
            background=True,
            special_tokens=True,
        )
        completion = await rounds.sample(index, request)
        episode.add(context, completion)
        tail = "".join(self._tokenizer.token_text(token) for token in sequence[-PROMPT_TAIL:])
        message = self._read(tail, completion.text)
        episode.called.append(tuple(call.name for call in message.calls))
        counts.turns += 1
        counts.tool_calls += len(message.calls)
        return PolicyTurn(
            content=message.content,
            reasoning=message.reasoning,
            calls=message.calls,
            finish="stop" if completion.finish_reason == "stop" else "length",
        )

    def _prompt(self, problem: Problem, ask: Ask) -> tuple[int, ...]:
        """Return the tokens of the first prompt, with what the environment adds to its last message."""
        *before, last = conversation(problem, self._system)
        content = "\n\n".join([str(last["content"]), *(str(message["content"]) for message in ask.messages)])
        return self._tokenizer.render_chat(
            [*before, {**last, "content": content}], tools=[*problem.tools, *self._tools]
        )

    def _suffix(self, answer: PolicyTurn, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens between an answer and the next one. They do not depend on the arguments of calls."""
        written: dict[str, Any] = {"role": "assistant"}
        if answer.calls:
            written["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": {}}}
                for call in answer.calls
            ]
        return self._tokenizer.continue_chat(written, messages, tools=self._tools)


class EpisodeSource:
    """Makes groups of episodes that a sampler samples."""

    def __init__(self, episodes: PythonEpisodes, sampler: GroupSampler, sampling: Sampling, group_size: int) -> None:
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


async def timed(waiting: Awaitable[Answer], counts: Counts) -> Answer:
    """Return an answer of an environment, and count the seconds until then."""
    began = time.monotonic()
    found = await waiting
    counts.seconds += time.monotonic() - began
    return found


def message_reader(tokenizer: ChatTokenizer, tools: Sequence[Mapping[str, Any]]) -> ReadMessage:
    """Return what reads the messages of the policy. Raises ProfileError if its calls of tools cannot be read."""
    try:
        readers = (one.message_reader(tokenizer.chat_template, tools) for one in extension.extensions())
        found = next((reader for reader in readers if reader is not None), None)
    except ValueError as error:
        raise ProfileError(f"agent: {error}") from None
    if found is None and tools:
        raise ProfileError(f"agent: tools of an environment {extension.needs('tools')}")
    return found or (lambda _, text: SampledMessage(content=text))


def unusable(ask: Ask, *, first: bool) -> str:
    """Return why messages of an environment cannot be written; empty if they can. first: nothing was sampled yet."""
    if not (ask.messages or first):
        return "it asks for another message without a message of its own"
    if any(one.get("role") not in ROLES or not isinstance(one.get("content"), str) for one in ask.messages):
        return "its message needs one of the roles user and tool, and a text as its content"
    return ""


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Return the number of first tokens that all sequences share."""
    shortest = min(map(len, sequences))
    differ = (at for at in range(shortest) if len({sequence[at] for sequence in sequences}) > 1)
    return next(differ, shortest)
