"""Clotho's own time per turn of an environment in Python: prepared messages of the policy, and tools without work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from attachments.agents.sections import PythonAgent
from attachments.agents.workers import Workers
from bench.contenders.worker import Case, MeasureOnce, Metrics
from bench.fingerprint import ROOT
from clotho.lanes.sampling_client import Refusal
from clotho.models.tokenizer import ChatTokenizer
from protocols.prompt import Problem
from protocols.sampling import Completion, SampleRequest, Sampling
from training_run.episodes.conversations import ChatWriter
from training_run.episodes.episodes import EnvironmentEpisodes
from training_run.episodes.messages import EpisodeLimits

PROFILES = ROOT / "profiles"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 23, "b": 45}}\n</tool_call>'
MESSAGES = (CALL, CALL, CALL, "68")
"""What the policy writes in the turns of an episode."""


def prepare(case: Case) -> MeasureOnce:
    """The case has the keys `episodes`, of which all run at once, and `workers`, the number of worker processes."""
    return lambda: asyncio.run(measure(case))


async def measure(case: Case) -> Metrics:
    """Return the time of all episodes, divided by the number of their turns."""
    template = str(PROFILES / "templates" / "tools-hermes.jinja")
    tokenizer = ChatTokenizer.from_files(PROFILES / "embedded", chat_template=template)
    environment = f"{PROFILES / 'environments' / 'calculator.py'}:Calculator"
    agent = PythonAgent(environment=environment, max_tokens=8192, max_workers=case["workers"])
    workers, sampling = Workers(agent), Sampling(max_tokens=64)
    try:
        episodes = EnvironmentEpisodes(
            EpisodeLimits(max_turns=agent.max_turns, max_tokens=agent.max_tokens),
            workers,
            ChatWriter(tokenizer, tools=await workers.tools(), system=""),
            sampling=sampling,
            context_length=agent.max_tokens,
            in_rounds=True,
        )
        policy = PreparedPolicy(tokenizer)
        problem = Problem(prompt="What is 23 plus 45?", answer="68", type="", extra={"answer": "68"})

        async def seconds(count: int) -> float:
            began = time.perf_counter()
            policy.turn = 0
            await episodes.held_out([problem] * count, sampling, [(0,)] * count, policy.complete)
            return time.perf_counter() - began

        await seconds(case["workers"])  # starts the worker processes
        return {"turn_seconds": await seconds(case["episodes"]) / (case["episodes"] * len(MESSAGES))}
    finally:
        workers.close()


class PreparedPolicy:
    """Answers the requests of a round with the message of its turn."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        (end,) = tokenizer.eos_ids
        self.turn, self._messages = 0, [completion((*tokenizer.encode(text), end), text) for text in MESSAGES]

    async def complete(self, requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
        """Return the completions of each request."""
        message, self.turn = self._messages[self.turn], self.turn + 1
        return [[message] * len(request.seeds) for request in requests]


def completion(tokens: tuple[int, ...], text: str) -> Completion:
    """Return a message of the policy."""
    size = len(tokens)
    return Completion(tokens=tokens, logprobs=(-1.0,) * size, versions=(1,) * size, text=text, finish_reason="stop")
