from __future__ import annotations

import pytest

from clotho.rewards.choice_correctness import options, reward
from tests.rewards.groups import answered, problem

QUESTION = "Which is the largest? A) 12 B) 74 C) 33"


@pytest.mark.parametrize(
    "answer",
    ["B", "b", "(b)", "[B]", "B)", "B.", "B:", "B) 74", "(B) 74.", "**B**", "option B", "Answer: B", "The answer is B",
     "the correct option is (B)", "74", " 74. ", "B) because it is"],
)  # fmt: skip
def test_the_right_option_may_be_named_in_many_ways(answer: str) -> None:
    """By its letter, with marks or its text beside it, or by its text alone."""
    assert reward(problem("B", prompt=QUESTION), answered(answer)) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["A", "C) 33", "12", "", "D", "A or B", "A B", "AB", "not A, B", "A, B, C", "B) 12", "A) 74", "12 74", "B" * 5000,
     "74 is larger than 12"],
)  # fmt: skip
def test_other_options_and_hedged_answers_are_wrong(answer: str) -> None:
    """Naming several options, or one option's letter beside another's text, chooses nothing."""
    assert reward(problem("B", prompt=QUESTION), answered(answer)) == 0.0


@pytest.mark.parametrize("reference", ["42", "", "Paris", "A or B", "AB"])
def test_a_reference_that_is_no_letter_is_not_applicable(reference: str) -> None:
    """The function then says nothing."""
    assert reward(problem(reference, prompt=QUESTION), answered("B")) is None


@pytest.mark.parametrize("reference", ["B", "b", "(b)", "B) 74", "option B"])
def test_references_name_the_option_in_the_same_ways(reference: str) -> None:
    """Datasets write them differently."""
    assert reward(problem(reference, prompt=QUESTION), answered("B")) == 1.0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (QUESTION, {"A": "12", "B": "74", "C": "33"}),
        ("Pick one:\n(A) a dog\n(B) A cat\n", {"A": "a dog", "B": "a cat"}),
        ("Pick.\nA. 3 + 4\nB: 2 * 2", {"A": "3 + 4", "B": "2 * 2"}),
        ("What is 3 + 4?", {}),
        ("", {}),
    ],
)
def test_options_are_read_from_the_prompt(prompt: str, expected: dict[str, str]) -> None:
    """With parentheses, dots or colons after the letter, in one line or several."""
    assert options(prompt) == expected


def test_an_options_text_that_begins_with_a_letter_is_not_that_letter() -> None:
    """`a dog` is the text of option C, not option A."""
    asked = problem("C", prompt="What barks? A) a cat B) a cow C) a dog")
    assert reward(asked, answered("A dog")) == 1.0


def test_a_text_that_two_options_share_chooses_neither() -> None:
    """The letter is then the only way."""
    asked = problem("A", prompt="Which? A) 5 B) 5 C) 6")
    assert reward(asked, answered("5")) == 0.0
    assert reward(asked, answered("A) 5")) == 1.0


def test_a_completion_without_answer_is_wrong() -> None:
    """The letter in the thought does not count."""
    assert reward(problem("B", prompt=QUESTION), "<think>B</think>B") == 0.0
