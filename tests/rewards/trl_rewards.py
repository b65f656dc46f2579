"""Reward functions in the form of TRL, as users paste them, with the names `tests.rewards.trl_rewards:NAME`."""

from __future__ import annotations

import asyncio
import ctypes
import re
from typing import Any

import numpy as np


def reward_len(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward the number of different letters; reads nothing but the completions."""
    return [float(len(set(completion))) for completion in completions]


def reward_ids(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward the number of tokens."""
    return [float(len(ids)) for ids in completion_ids]


def of_environment(environment_rewards: list[float], **kwargs: Any) -> list[float]:
    """Reward twice what the environment gave."""
    return [2.0 * one for one in environment_rewards]


def format_reward_func(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Check the form of conversational completions."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def reward_func(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    """Compare the content of a box with a column of the dataset."""
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def math_reward_func(
    prompts: list[str], completions: list[str], answer: list[int], task: list[str], **kwargs: Any
) -> list[float | None]:
    """Apply to one task of several."""
    return [
        float(completion == str(eval(prompt))) if kind == "math" else None
        for prompt, completion, kind in zip(prompts, completions, task, strict=True)
    ]


def without_kwargs(completions: list[str], answer: list[int]) -> list[bool]:
    """Name the columns without accepting others. The column has the type that the file has."""
    return [completion == str(wanted + 0) for completion, wanted in zip(completions, answer, strict=True)]


async def async_reward_func(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Wait for all completions at once."""
    await asyncio.gather(*(asyncio.sleep(0) for _ in completions))
    return [float(len(completion)) for completion in completions]


def correctness_reward_func(
    prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any
) -> list[float]:
    """Read messages, also of the prompt."""
    responses = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    return [2.0 if question and response == wanted else 0.0 for response, wanted in zip(responses, answer, strict=True)]


def scheduled(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Depend on the progress of the training."""
    progress = trainer_state.global_step / trainer_state.max_steps
    return [progress * len(completion) for completion in completions]


def ids_and_schedule(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Return the number of tokens plus the progress of the training."""
    return [len(ids) + trainer_state.global_step / trainer_state.max_steps for ids in completion_ids]


def rank_in_group(completions: list[str], **kwargs: Any) -> Any:
    """Rank the completions of the group by length: a reward over the whole group, as an array."""
    lengths = np.array([len(completion) for completion in completions])
    return lengths.argsort().argsort() / max(1, len(completions) - 1)


def best_only(**kwargs: Any) -> tuple[float, ...]:
    """Reward the longest completion."""
    longest = max(map(len, kwargs["completions"]))
    return tuple(float(len(completion) == longest) for completion in kwargs["completions"])


class LengthPenalty:
    """An object with state."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """Return the negative length."""
        return [-self.scale * len(completion) for completion in completions]


penalty = LengthPenalty(0.5)


def too_few(completions: list[str], **kwargs: Any) -> list[float]:
    """Forget one completion."""
    return [1.0 for _ in completions[1:]]


def one_number(completions: list[str], **kwargs: Any) -> float:
    """Return no list."""
    return 1.0


def not_numbers(completions: list[str], **kwargs: Any) -> list[str]:
    """Return texts."""
    return list(completions)


def raises(completions: list[str], **kwargs: Any) -> list[float]:
    """Fail for texts and for messages."""
    raise ValueError("no opinion")


def backtracks(completions: list[str], **kwargs: Any) -> list[float]:
    """Match a regular expression that needs exponential time inside C, with the GIL held."""
    return [float(re.match(r"(a+)+$", "a" * 60 + "b") is None) for _ in completions]


def sleeps_in_c(completions: list[str], **kwargs: Any) -> list[float]:
    """Sleep in native code that keeps the GIL."""
    ctypes.PyDLL(None).sleep(3600)
    return [0.0 for _ in completions]
