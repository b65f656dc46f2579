"""The built-in rewards have a linear cost for every text, because they run in the process of the run."""

from __future__ import annotations

import pytest

from clotho.rewards.registry import built_in, group_parameters, load_reward
from tests.rewards.groups import problem

ANSWERS = {
    "digits": "9", "open parentheses": "(", "parentheses": "()", "signs": "-", "towers of powers": "2**",
    "LaTeX powers": "2^{", "open fractions": "\\frac{", "fractions": "\\frac{1}{2}", "boxes": "\\boxed{1}",
    "superscripts": "\u00b9", "thousands": ",111", "percents": "5%", "blanks": " ", "letters": "a", "words": "a is ",
    "units": "m/", "hyphens": "'a-1.", "options": "\nA) ", "sentences": "the correct answer is ", "ligatures": "\ufdfa",
    "combining marks": "a\u0301", "lone surrogates": "\ud800",
}  # fmt: skip
TAGS = ["<think>", "<answer>", "</answer>", "<answer></answer>", "<think><answer></answer>", "</think><answer>"]
PROBLEMS = [problem("42"), problem("B", prompt="Which is larger? A) 1 B) 2"), problem("Paris")]


READERS = [name for name, one in built_in().items() if one.function and group_parameters(one.function) is None]
"""Functions that read a completion; that of an environment reads none."""


@pytest.mark.parametrize("largest", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_a_built_in_reward_reads_a_long_pathological_completion(name: str, largest: int) -> None:
    """It returns a value from 0 to 1, or None. A quadratic function would not return within the time of the suite."""
    reward = load_reward(name)
    completions = [part * (largest // len(part)) for part in TAGS]
    for part in ANSWERS.values():
        for size in (990, 1990, largest):
            answer = part * (size // len(part))
            completions += [f"<think>x</think><answer>{answer}</answer>", f"<think>x</think><answer>{answer}"]
    for completion in completions:
        for one in PROBLEMS:
            value = reward(one, completion)
            assert value is None or 0.0 <= value <= 1.0
