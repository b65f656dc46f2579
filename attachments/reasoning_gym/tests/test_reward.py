"""The reward `reasoning_gym`: scores of the library, in worker processes."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.prompt import Problem
from protocols.rollout import Discarded, ScoredGroup
from tests.rewards.groups import answered, group
from training_run.profile.data import RewardSection
from training_run.rewards.runner import RewardRunner, runs_in_process

needs_library = pytest.mark.needs_extra("reasoning-gym")


def gym_problem(dataset: str, question: str, answer: str, **metadata: Any) -> Problem:
    """A problem of a dataset with its default settings, as `attachments.reasoning_gym.reasoning_gym` makes it."""
    extra = {
        "question": question,
        "answer": answer,
        "metadata": metadata,
        "reasoning_gym": {"dataset": dataset, "level": None, "settings": {}, "literal": ""},
    }
    return Problem(prompt=question, answer=answer, type=dataset, extra=extra)


def test_the_reward_runs_in_worker_processes() -> None:
    """Scorers parse what the model wrote with sympy and other libraries, which may not return."""
    assert runs_in_process(RewardSection(name="reasoning_gym"))


@needs_library
async def test_scores_partial_credit_and_failures() -> None:
    """Partial credit stays in the reward, and only a score of 1 is correct.

    A completion without an answer has reward 0. A problem of another source has no reward. A scorer that raises
    discards the group.
    """
    runner = RewardRunner([RewardSection(name="reasoning_gym", correct=True)])
    sums = gym_problem("chain_sum", "2 + 2 =", "4")
    reverse = gym_problem("spell_backward", "Spell this word backward: sun", "nus")
    raising = gym_problem("prime_factorization", "Find the prime factorization of 6", "2 \u00d7 3")
    try:
        await runner.start()
        scored = await runner.score(group(answered("4"), answered("4.0"), answered("5"), "4", of=sums))
        partial = await runner.score(group(answered("nus"), answered("nux"), of=reverse))
        foreign = await runner.score(group(answered("42"), answered("41")))
        failed = await runner.score(group(answered("2 \u00d7 3"), answered("two, three"), of=raising))
    finally:
        runner.close()
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards[0] == scored.rewards[1] == 1.0
    assert max(scored.rewards[2:]) < 1.0
    assert scored.rewards[3] == 0.0
    assert isinstance(partial, ScoredGroup)
    assert partial.rewards[0] == 1.0 > partial.rewards[1] > 0.0
    assert isinstance(foreign, Discarded)
    assert foreign.reason == "reward_error"
    assert isinstance(failed, Discarded)
    assert failed.reason == "reward_error"
    assert "reasoning_gym raised ValueError" in failed.detail
