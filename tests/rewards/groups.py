"""Problems and groups of completions for the reward tests."""

from __future__ import annotations

from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup
from protocols.sampling import Completion


def problem(answer: str = "42", *, prompt: str = "What is 15 + 27?", kind: str = "arithmetic") -> Problem:
    """Return a problem."""
    return Problem(prompt=prompt, answer=answer, type=kind)


def answered(answer: str) -> str:
    """Return a completion in the think/answer format with this answer."""
    return f"<think>hm</think><answer>{answer}</answer>"


def group(*texts: str, of: Problem | None = None, group_id: int = 0) -> RolloutGroup:
    """Return a group whose completions have these texts."""
    completions = tuple(
        Completion(tokens=(1,), logprobs=(-0.5,), versions=(0,), text=text, finish_reason="stop") for text in texts
    )
    prompt = Prompt(group_id=group_id, problem=of or problem(), tokens=(1, 2), seed=group_id)
    return RolloutGroup(prompt=prompt, completions=completions)
