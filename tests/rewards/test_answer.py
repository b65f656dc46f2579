# ruff: noqa: RUF001
"""Where the answer of a completion is found."""

from __future__ import annotations

from typing import get_args

import pytest

from clotho.rewards.answer import PLACES, answer_text, with_answer
from protocols.prompt import AnswerIn


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>a</think><answer> 42 </answer>", "42"), ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"), ("<answer></answer>", ""), ("<answer>two\nlines</answer>", "two\nlines"),
        ("42", None), ("", None), ("<answer>42", None), ("<answer>1</answer><answer>42", None),
        ("</answer>42<answer>", None), ("<ANSWER>42</ANSWER>", None), ("<think>perhaps <answer>42</answer>", None),
        ("<think>a</think> again <think>b <answer>42</answer></think>", None), ("a</think><answer>42</answer>", "42"),
    ],
)  # fmt: skip
def test_answer_text_returns_the_last_complete_answer_outside_think(completion: str, answer: str | None) -> None:
    """A truncated answer, or an answer inside an open `<think>`, does not count."""
    assert answer_text(completion) == answer


SOLUTION = (
    "<think>\nThe first try gives \\boxed{41} and #### 41.\n</think>\n\nAdding both parts: $15 + 27 = 42$.\n\n"
    "**Answer:** \\boxed{\\frac{84}{2}}\n\n#### 42 apples\nThere are 43 digits."
)
"""A completion of a reasoning model, with an answer in several places."""


@pytest.mark.parametrize(
    ("answer_in", "answer"),
    [("tags", None), ("boxed", r"\frac{84}{2}"), ("hashes", "42 apples"), ("last_number", "43")],
)
def test_each_place_has_its_answer(answer_in: AnswerIn, answer: str | None) -> None:
    """The text of a thought is not searched."""
    assert answer_text(SOLUTION, answer_in) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $x = \boxed{\dfrac{1}{2}}$.", r"\dfrac{1}{2}"), (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\text{A \} B}}", r"\text{A \} B}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ \boxed{42} }", r"\boxed{42}"), (r"\boxed {42}", "42"), (r"\fbox{42}", "42"), (r"{ \boxed{42}", "42"),
        (r"} \boxed{42}", "42"), (r"\boxed{42} and \boxed{4", "42"), (r"\boxed{4", None), (r"\boxed{\frac{1}{2}", None),
        (r"\\boxed{42}", None), ("boxed{42}", None), ("", None), (r"<think>\boxed{42}</think> I do not know.", None),
        (r"<think>\boxed{42}", None), (r"first \boxed{42} <think> then", None),
    ],
)  # fmt: skip
def test_a_box_ends_at_its_own_brace(text: str, answer: str | None) -> None:
    """Nested and escaped braces belong to the content; a box that the token limit cut off does not count."""
    assert answer_text(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 18", "18"), ("#### 1,234\n", "1,234"),
        ("#### Step 1\n3 + 4\n#### 7", "7"), ("#### 7\n#### ", None), ("### 7", None), ("#### ", None),
        ("####7 dollars per day\nDone.", "7 dollars per day"),
    ],
)  # fmt: skip
def test_the_hash_marks_of_gsm8k_precede_the_answer(text: str, answer: str | None) -> None:
    """The rest of the last marked line."""
    assert answer_text(text, "hashes") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is **42**.", "42"), ("47 + 85 = 132.", "132"), ("It costs $1,320.50!", "1,320.50"),
        ("1{,}320 people", "1{,}320"), ("10-5", "5"), ("It is -5 °C", "-5"), ("It is −5 °C", "−5"),
        ("a chance of 12.5%", "12.5%"), (r"a chance of 50\%", r"50\%"), (r"so $p = \frac{1}{2}$", r"\frac{1}{2}"),
        ("half, or 1/2 of it", "1/2"), ("from 131 to 132", "132"), ("x132", None), ("version v1.2", None),
        ("forty-two", None), ("", None), ("<think>42</think>", None), ("<think>It is 42", None),
    ],
)  # fmt: skip
def test_the_last_number_has_its_sign_and_its_unit_of_hundredths(text: str, answer: str | None) -> None:
    """Commas between thousands belong to a number; a subtraction is no sign; words contain no numbers."""
    assert answer_text(text, "last_number") == answer


def test_the_whole_text_is_the_answer() -> None:
    """Without thoughts and surrounding white space."""
    assert answer_text("<think>a</think>\n Paris\n", "text") == "Paris"
    assert answer_text("thought of the template</think> Paris", "text") == "Paris"
    assert answer_text(" \n", "text") is None


@pytest.mark.parametrize("answer_in", get_args(AnswerIn))
def test_a_written_answer_is_found_again(answer_in: AnswerIn) -> None:
    """Every place is described in words, for checks before a run."""
    assert answer_text(with_answer("42", answer_in), answer_in) == "42"
    assert PLACES[answer_in]
