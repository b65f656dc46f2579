from __future__ import annotations

import pytest

from clotho.rewards.exact import reward
from protocols.prompt import AnswerIn
from tests.rewards.groups import answered, problem


@pytest.mark.parametrize(
    ("reference", "completion", "value"),
    [
        ("New York", answered("  new\n york "), 1.0), ("New York", answered("New York City"), 0.0),
        ("42", answered("42.0"), 0.0), ("Straße", answered("STRASSE"), 1.0), ("", answered(""), 1.0), ("42", "42", 0.0),
        ("", "no answer", 0.0),
    ],
)  # fmt: skip
def test_exact_ignores_only_case_and_white_space(reference: str, completion: str, value: float) -> None:
    """All other characters must match, and the text must be inside `<answer>`."""
    assert reward(problem(reference), completion) == value


@pytest.mark.parametrize(
    ("answer_in", "completion", "value"),
    [
        ("text", "<think>The capital.</think>\n\nNew York\n", 1.0),
        ("text", "The answer is New York.", 0.0),
        ("boxed", r"The city is $\boxed{New York}$.", 1.0),
        ("boxed", r"First \boxed{Boston}, but then \boxed{new york}.", 1.0),
        ("boxed", r"\boxed{New York", 0.0),
        ("hashes", "It is in the state of New York.\n#### New York", 1.0),
        ("tags", "<answer>Boston</answer> Wait. <answer>New York</answer>", 1.0),
        ("tags", "<think>It is <answer>New York</answer>", 0.0),
    ],
)
def test_realistic_completions(answer_in: AnswerIn, completion: str, value: float) -> None:
    """The answer is found where the profile says."""
    assert reward(problem("New York"), completion, answer_in=answer_in) == value
