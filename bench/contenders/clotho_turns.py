"""Clotho's own time per turn or rollout of an environment, with prepared messages of the policy; tokens of prefill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import chain, cycle, islice

import psutil

import clotho
from attachments.agents.sections import PythonAgent
from attachments.agents.workers import Workers
from attachments.verifiers.player import TasksetPlayer
from attachments.verifiers.sections import TASKSET, VerifiersSection
from attachments.verifiers.tasks import listed
from bench.contenders.process import verifiers_python
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.fingerprint import ROOT
from clotho.inference.engine import DecodeEngine
from clotho.lanes.sampling_client import Refusal
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.engine import EngineSection
from protocols.prompt import Problem
from protocols.sampling import Completion, CompletionDone, SampleEvent, SampleRequest, Sampling
from training_run.episodes.conversations import ChatWriter, Tools
from training_run.episodes.episodes import EnvironmentEpisodes
from training_run.episodes.messages import Ask, Environments, EpisodeEnded, EpisodeLimits, Event, PolicyTurn
from training_run.profile.data import DataSection

PROFILES = ROOT / "profiles"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 23, "b": 45}}\n</tool_call>'
CALLS = (CALL, CALL, CALL, "68")
"""What the policy writes in the turns of an episode."""

GUESSES = ("<answer>0</answer>",) * 3
"""The same in a game that it does not win."""

TURNS = 4
SHORT = Sampling(max_tokens=8, min_tokens=2)


def prepare(case: Case) -> MeasureOnce:
    """The case has the keys `environment`, and `episodes`, of which all run at once.

    environment: `Python`, with `workers`, the number of worker processes; `verifiers`; `engine`, with a real policy.
    """
    measure = {"Python": turns_in_python, "verifiers": rollouts_of_verifiers, "engine": prefill_of_turns}
    return lambda: asyncio.run(measure[case["environment"]](case))


async def turns_in_python(case: Case) -> Metrics:
    """Return the time of all episodes, and the processor time, divided by the number of their turns."""
    template = str(PROFILES / "templates" / "tools-hermes.jinja")
    tokenizer = ChatTokenizer.from_files(PROFILES / "embedded", chat_template=template)
    environment = f"{PROFILES / 'environments' / 'calculator.py'}:Calculator"
    agent = PythonAgent(environment=environment, max_tokens=8192, max_workers=case["workers"])
    workers = Workers(agent)
    try:
        episodes = episodes_of(workers, tokenizer, (await workers.described()).tools)
        problem = Problem(prompt="What is 23 plus 45?", answer="68", type="", extra={"answer": "68"})
        await played(episodes, [problem] * case["workers"], PreparedPolicy(tokenizer, CALLS))  # starts the workers
        seconds, used = await played(episodes, [problem] * case["episodes"], PreparedPolicy(tokenizer, CALLS))
    finally:
        workers.close()
    turns = case["episodes"] * len(CALLS)
    return {"turn_seconds": seconds / turns, "turn_processor_seconds": used / turns}


async def rollouts_of_verifiers(case: Case) -> Metrics:
    """Return the processor time of all rollouts, divided by their number. The process of the taskset counts."""
    section = VerifiersSection(python=verifiers_python(), directory=str(PROFILES / "environments"))
    data = TASKSET.put(DataSection(train="verifiers:guessing_taskset"), section)
    tokenizer = ChatTokenizer.from_files(PROFILES / "embedded")
    problems = list(islice(cycle(listed(data, data.train, seed=0)), case["episodes"]))
    player = TasksetPlayer(data)
    await player.start()
    try:
        episodes = episodes_of(player, tokenizer, ())
        await played(episodes, problems[:1], PreparedPolicy(tokenizer, GUESSES))
        _, used = await played(episodes, problems, PreparedPolicy(tokenizer, GUESSES))
    finally:
        player.close()
    return {"rollout_processor_seconds": used / case["episodes"]}


async def prefill_of_turns(case: Case) -> Metrics:
    """Return the tokens that the engine prefills in an episode of four turns, divided by those before its last message.

    The last token of a prompt is decoded, not prefilled.
    """
    policy = clotho.load(str(PROFILES / "embedded"))
    engine, prompts = DecodeEngine(policy, EngineSection()), list[int]()

    async def complete(requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
        events: list[SampleEvent] = []
        for request in requests:
            prompts.append(len(request.prompt))
            engine.submit(request, events.append)
        while engine.has_work:
            engine.tick()
        return [[event.completion for event in events if isinstance(event, CompletionDone)]]

    (end,) = policy.tokenizer.eos_ids
    ends = Sampling(max_tokens=SHORT.max_tokens, min_tokens=SHORT.min_tokens, logit_bias=((end, 100.0),))
    problem = Problem(prompt="Ann has many coins. How many coins now?", answer="", type="")
    episodes = episodes_of(Speaking(), policy.tokenizer, ())
    await episodes.held_out([problem], ends, [(0,)], complete)
    assert len(prompts) == TURNS
    return {"prefilled_share": engine.stats().prefill_tokens / (prompts[-1] - 1)}


def episodes_of(environments: Environments, tokenizer: ChatTokenizer, tools: Tools) -> EnvironmentEpisodes:
    """Return what plays episodes in rounds."""
    return EnvironmentEpisodes(
        EpisodeLimits(max_turns=16, max_tokens=8192),
        environments,
        ChatWriter(tokenizer, tools=tools, system=""),
        sampling=Sampling(max_tokens=64),
        context_length=8192,
        in_rounds=True,
    )


async def played(
    episodes: EnvironmentEpisodes, problems: Sequence[Problem], policy: PreparedPolicy
) -> tuple[float, float]:
    """Play an episode of each problem; return the duration, and the processor time of this process and its children."""
    began, used = time.perf_counter(), processor_seconds()
    found = await episodes.held_out(problems, Sampling(max_tokens=64), [(0,)] * len(problems), policy.complete)
    assert all(one.tokens for one in chain(*found)), "no episode has failed"
    return time.perf_counter() - began, processor_seconds() - used


def processor_seconds() -> float:
    """Return the processor time of this process and its children so far."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


class PreparedPolicy:
    """Answers the requests of a round with the message of its turn."""

    def __init__(self, tokenizer: ChatTokenizer, messages: Sequence[str]) -> None:
        (end,) = tokenizer.eos_ids
        self._messages = iter([completion((*tokenizer.encode(text), end), text) for text in messages])

    async def complete(self, requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
        """Return the completions of each request."""
        message = next(self._messages)
        return [[message] * len(request.seeds) for request in requests]


class Speaking:
    """Environments that say the same until an episode has `TURNS` messages of the policy."""

    def __init__(self) -> None:
        self._turns = 0

    def episode(self, problem: Problem) -> Speaking:
        """Return an episode."""
        return Speaking()

    async def begin(self) -> Event:
        """Ask for the first message."""
        return Ask(messages=())

    async def go_on(self, turn: PolicyTurn) -> Event:
        """Ask for another message."""
        self._turns += 1
        if self._turns == TURNS:
            return EpisodeEnded(reward=0.0)
        return Ask(messages=({"role": "user", "content": "Ann has more. How many coins now?"},))

    async def close(self) -> None:
        """Nothing is open."""


def completion(tokens: tuple[int, ...], text: str) -> Completion:
    """Return a message of the policy."""
    size = len(tokens)
    return Completion(tokens=tokens, logprobs=(-1.0,) * size, versions=(1,) * size, text=text, finish_reason="stop")


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_turns"], packages=["mlx"])
