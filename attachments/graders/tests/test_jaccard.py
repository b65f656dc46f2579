from __future__ import annotations

import pytest

from attachments.graders.jaccard import reward
from protocols.prompt import AnswerIn
from tests.rewards.groups import answered, problem


@pytest.mark.parametrize(
    ("reference", "answer", "value"),
    [
        ("the cat sat", "The cat, sat!", 1.0), ("the cat sat", "the dog sat", 0.5),
        ("the cat sat", "cat cat cat", 1 / 3), ("the cat", "a dog", 0.0), ("about 3.5", "about 3 5", 0.25),
        ("below -5", "below 5", 1 / 3), ("below -5", "below (-5)", 1.0), ("don't", "don\u2019t", 0.0), ("", "", 1.0),
        ("?!", "", 1.0), ("", "word", 0.0), ("word", "", 0.0),
    ],
)  # fmt: skip
def test_the_reward_is_intersection_over_union(reference: str, answer: str, value: float) -> None:
    """Words are distinct, in lower case and without surrounding punctuation."""
    assert reward(problem(reference), answered(answer)) == pytest.approx(value)


def test_a_completion_without_an_answer_has_reward_zero() -> None:
    """Even if the reference is empty."""
    assert reward(problem(""), "") == 0.0


@pytest.mark.parametrize("reference", ["42", "-5", "1,234", "1/2", "50%", "42 apples", r"\frac{1}{2}", "B", "A, C"])
def test_the_reward_does_not_apply_to_numbers_and_letters(reference: str) -> None:
    """`math_eval` and `choice_correctness` apply there."""
    question = problem(reference, prompt="Which are right? A) 1 B) 2 C) 3")
    assert reward(question, answered(reference)) is None


@pytest.mark.parametrize(
    ("answer_in", "completion", "value"),
    [
        ("text", "<think>The film is from 1994.</think>\n\n**The Shawshank Redemption**", 1.0),
        ("text", "It is The Shawshank Redemption.", 3 / 5),
        ("text", "<think>The film with Morgan Freeman", 0.0),
        ("boxed", r"$$\boxed{\text{The Shawshank Redemption}}$$", 1.0),
        ("hashes", "It won no Oscar.\n#### the Shawshank redemption.", 1.0),
        ("tags", "<answer>Shawshank</answer>", 1 / 3),
        ("tags", "<answer>“The Shawshank Redemption” (1994)</answer>", 3 / 4),
    ],
)
def test_realistic_completions(answer_in: AnswerIn, completion: str, value: float) -> None:
    """Quotation marks and Markdown do not count as words; other words lower the value."""
    question = problem("The Shawshank Redemption", prompt="Which film is it?")
    assert reward(question, completion, answer_in=answer_in) == pytest.approx(value)
