from __future__ import annotations

import pytest

from attachments.graders.choice_correctness import options, reward
from protocols.prompt import AnswerIn
from tests.rewards.groups import answered, problem

QUESTION = "Which is the largest? A) 12 B) 74 C) 33"


@pytest.mark.parametrize(
    "answer",
    ["B", "b", "(b)", "[B]", "B)", "B.", "B:", "B) 74", "(B) 74.", "**B**", "option B", "Answer: B", "The answer is B",
     "the correct option is (B)", "74", " 74. ", "B) because it is"],
)  # fmt: skip
def test_the_correct_option_is_accepted_in_common_notations(answer: str) -> None:
    """A letter, a letter with punctuation or the option's text, or the text alone."""
    assert reward(problem("B", prompt=QUESTION), answered(answer)) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["A", "C) 33", "12", "", "D", "A or B", "A B", "AB", "BB", "B, B", "not A, B", "A, B, C", "B) 12", "A) 74", "12 74",
     "B" * 5000, "74 is larger than 12"],
)  # fmt: skip
def test_other_options_and_ambiguous_answers_are_wrong(answer: str) -> None:
    """Several options, or one letter with another option's text, choose no option."""
    assert reward(problem("B", prompt=QUESTION), answered(answer)) == 0.0


@pytest.mark.parametrize("reference", ["42", "", "Paris", "A or B", "AE", "A B"])
def test_the_reward_does_not_apply_if_the_reference_is_not_a_letter(reference: str) -> None:
    """The function returns None."""
    assert reward(problem(reference, prompt=QUESTION), answered("B")) is None


@pytest.mark.parametrize("reference", ["B", "b", "(b)", "B) 74", "option B"])
def test_the_reference_accepts_the_same_notations(reference: str) -> None:
    """Datasets use different notations."""
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
    """Parentheses, dots or colons follow the letter, on one line or several."""
    assert options(prompt) == expected


def test_an_option_text_that_starts_with_a_letter_is_not_that_letter() -> None:
    """`a dog` is the text of option C, not option A."""
    question = problem("C", prompt="What barks? A) a cat B) a cow C) a dog")
    assert reward(question, answered("A dog")) == 1.0


def test_a_text_that_two_options_share_chooses_no_option() -> None:
    """Only the letter is unambiguous."""
    question = problem("A", prompt="Which? A) 5 B) 5 C) 6")
    assert reward(question, answered("5")) == 0.0
    assert reward(question, answered("A) 5")) == 1.0


def test_a_completion_without_an_answer_is_wrong() -> None:
    """A letter outside `<answer>` does not count."""
    assert reward(problem("B", prompt=QUESTION), "<think>B</think>B") == 0.0


SEVERAL = "Which numbers are even?\nA) 12\nB) 33\nC) 74\nD) 9"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("A, C", 1.0), ("C, A", 1.0), ("A and C", 1.0), ("(A) and (C)", 1.0), ("A; C", 1.0), ("A & C.", 1.0),
        ("AC", 1.0), ("a, c", 1.0), ("**A, C**", 1.0), ("The answers are A and C.", 1.0), ("Answer: A, C", 1.0),
        ("A) 12, C) 74", 1.0), ("A) 12 and C) 74", 1.0), ("A. 12\nC. 74", 1.0), ("A", 0.5), ("C) 74", 0.5), ("74", 0.5),
        ("A, B", 0.0), ("A, B, C", 0.0), ("A, B, C, D", 0.0), ("ABCD", 0.0), ("B", 0.0), ("A or C", 0.0), ("", 0.0),
        ("all of them", 0.0), ("A) 33, C) 74", 0.0), ("A, A", 0.0), ("AA", 0.0),
    ],
)  # fmt: skip
def test_a_question_with_several_right_letters_gives_partial_credit(answer: str, value: float) -> None:
    """The share of the right letters; one wrong letter costs everything, so that all letters earn nothing."""
    assert reward(problem("A, C", prompt=SEVERAL), answered(answer)) == value


@pytest.mark.parametrize("reference", ["A, C", "C,A", "A and C", "(A), (C)", "AC", "A) 12, C) 74"])
def test_a_reference_with_several_letters_accepts_the_same_notations(reference: str) -> None:
    """Datasets use different notations."""
    assert reward(problem(reference, prompt=SEVERAL), answered("A, C")) == 1.0
    assert reward(problem(reference, prompt=SEVERAL), answered("A")) == 0.5


def test_the_text_of_an_option_is_not_a_list_of_letters() -> None:
    """`A and B` is option C here."""
    question = problem("C", prompt="Which are right?\nA) x\nB) y\nC) A and B")
    assert reward(question, answered("A and B")) == 1.0
    assert reward(question, answered("C")) == 1.0


@pytest.mark.parametrize(
    ("answer_in", "completion", "value"),
    [
        ("tags", "<think>74 is larger.</think>\n<answer>(B)</answer>", 1.0),
        ("tags", "<answer>A</answer> No: <answer>B) 74</answer>", 1.0),
        ("tags", "<think>It is <answer>B</answer>", 0.0), ("boxed", r"The largest is $\boxed{B}$.", 1.0),
        ("boxed", r"The largest is \boxed{\text{B}}.", 1.0), ("boxed", r"\boxed{A}, no, \boxed{(B)}", 1.0),
        ("hashes", "74 is the largest.\n#### B", 1.0), ("text", "Answer: B", 1.0), ("text", "**B**", 1.0),
        ("text", "The correct answer is (B).", 1.0), ("text", "B) 74", 1.0),
        ("text", "<think>A is 12, B is 74.</think>\n\nB", 1.0), ("text", "A or B", 0.0),
        ("last_number", "The largest of them is 74.", 1.0),
    ],
)  # fmt: skip
def test_realistic_completions(answer_in: AnswerIn, completion: str, value: float) -> None:
    """The answer is found where the profile says."""
    assert reward(problem("B", prompt=QUESTION), completion, answer_in=answer_in) == value
