"""Cost of scoring a group in worker processes, in threads, and with a built-in function.

    python -m bench rewards

A group has 8 completions of 1,000 characters. The custom function computes a ratio of lengths, so the numbers are the
cost of the call. Latency: median time of one group, one at a time. Throughput: groups per second with 8 groups at once,
as in a run. Start: time until the function is ready.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import anyio

from bench.tables import markdown
from clotho.settings.data import RewardSection
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion
from training_run.rewards.runner import RewardRunner

CONCURRENCY = 8
CHARACTERS, COMPLETIONS = 1000, 8

SECTIONS = {
    "process": RewardSection(name="bench.rewards:share", run_in="process"),
    "thread": RewardSection(name="bench.rewards:share", run_in="thread"),
    "built-in jaccard": RewardSection(name="jaccard"),
}


def share(problem: Problem, completion: str) -> float:
    """Return the length of the completion relative to `CHARACTERS`."""
    return len(completion) / CHARACTERS


def group() -> RolloutGroup:
    """Return a group whose completions differ in length."""
    completions = tuple(
        Completion(
            tokens=(1,),
            logprobs=(0.0,),
            versions=(0,),
            text=f"<think>x</think><answer>{'word ' * ((CHARACTERS - 40 * i) // 5)}</answer>",
            finish_reason="stop",
        )
        for i in range(COMPLETIONS)
    )
    problem = Problem(prompt="Say words.", answer="word", type="words")
    return RolloutGroup(prompt=Prompt(group_id=0, problem=problem, tokens=(1,), seed=0), completions=completions)


async def measure(section: RewardSection, groups: int) -> tuple[float, float, float]:
    """Return the seconds of the start, the median seconds of one group, and groups per second."""
    began = time.perf_counter()
    rewards = RewardRunner((section,), concurrency=CONCURRENCY, keep_zero_variance=True)
    try:
        await rewards.start()
        ready = time.perf_counter() - began
        scored = group()
        for _ in range(20):
            if not isinstance(await rewards.score(scored), ScoredGroup):
                raise RuntimeError("the group was not scored")
        seconds = []
        for _ in range(groups):
            began = time.perf_counter()
            await rewards.score(scored)
            seconds.append(time.perf_counter() - began)

        async def score_some() -> None:
            for _ in range(groups // CONCURRENCY):
                await rewards.score(scored)

        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(CONCURRENCY):
                tasks.start_soon(score_some)
        rate = groups // CONCURRENCY * CONCURRENCY / (time.perf_counter() - began)
    finally:
        rewards.close()
    return ready, statistics.median(seconds), rate


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench rewards", description=__doc__)
    parser.add_argument("--groups", type=int, default=2000, help="groups per measurement")
    options = parser.parse_args(arguments)
    rows = []
    for name, section in SECTIONS.items():
        ready, latency, rate = anyio.run(measure, section, options.groups)
        rows.append([name, f"{1e3 * ready:.0f}", f"{1e3 * latency:.2f}", f"{rate:.0f}"])
    sys.stdout.write(markdown(["function", "start (ms)", "latency (ms)", "groups/s"], rows) + "\n")
    return 0
