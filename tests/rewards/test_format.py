from __future__ import annotations

import pytest

from clotho.rewards.format import reward
from tests.rewards.groups import problem


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a</think><answer>1</answer>",
        " <think>a</think>\n\n<answer>1</answer>\n",
        "<think>a\nb < c</think><answer>1\n2</answer>",
    ],
)
def test_one_thought_and_one_answer_have_the_form(completion: str) -> None:
    """White space around them is free."""
    assert reward(problem(), completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "42",
        "<answer>1</answer>",
        "<think>a</think>",
        "<think>a</think><answer>1",
        "<think>a<answer>1</answer></think>",
        "<answer>1</answer><think>a</think>",
        "<think></think><answer>1</answer>",
        "<think> \n</think><answer>1</answer>",
        "<think>a</think><answer> </answer>",
        "so <think>a</think><answer>1</answer>",
        "<think>a</think> so <answer>1</answer>",
        "<think>a</think><answer>1</answer>.",
        "<think>a</think><answer>1</answer><answer>2</answer>",
        "<think>a</think><think>b</think><answer>1</answer>",
        "</think>a<think><answer>1</answer>",
        "<think>a</think></answer>1<answer>",
        "<Think>a</Think><answer>1</answer>",
    ],
)
def test_anything_else_has_not_the_form(completion: str) -> None:
    """Missing, repeated, empty, nested or misplaced parts, and text outside of them, earn nothing."""
    assert reward(problem(), completion) == 0.0
