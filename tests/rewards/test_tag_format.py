from __future__ import annotations

import pytest

from clotho.rewards.tag_format import reward
from tests.rewards.groups import problem


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a</think><answer>1</answer>",
        " <think>a</think>\n\n<answer>1</answer>\n",
        "<think>a\nb < c</think><answer>1\n2</answer>",
    ],
)
def test_one_think_and_one_answer_element_have_reward_one(completion: str) -> None:
    """White space around the elements is ignored."""
    assert reward(problem(), completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "", "42", "<answer>1</answer>", "<think>a</think>", "<think>a</think><answer>1",
        "<think>a<answer>1</answer></think>", "<answer>1</answer><think>a</think>", "<think></think><answer>1</answer>",
        "<think> \n</think><answer>1</answer>", "<think>a</think><answer> </answer>",
        "so <think>a</think><answer>1</answer>", "<think>a</think> so <answer>1</answer>",
        "<think>a</think><answer>1</answer>.", "<think>a</think><answer>1</answer><answer>2</answer>",
        "<think>a</think><think>b</think><answer>1</answer>", "</think>a<think><answer>1</answer>",
        "<think>a</think></answer>1<answer>", "<Think>a</Think><answer>1</answer>",
    ],
)  # fmt: skip
def test_other_forms_have_reward_zero(completion: str) -> None:
    """Missing, repeated, empty, nested or misplaced elements, and text outside the elements."""
    assert reward(problem(), completion) == 0.0
