# ruff: noqa: RUF001
from __future__ import annotations

import pytest

from clotho.rewards.math_eval import reward
from tests.rewards.groups import answered, problem


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "42"), ("42", " 42. "), ("42", "42.0"), ("42", "$42"), ("42", "42 apples"), ("42", "15 + 27 = 42"),
        ("42", "x = 42"), ("42", r"\boxed{42}"), ("42", "The answer is 42"), ("42", "**42**"), ("42", "４２"),
        ("42", "(42)"),
        ("-5", "−5"), ("1234567", "1,234,567"), ("1,234", "1234"), ("0.5", "1/2"), ("1/2", "0.5"),
        ("1/2", r"\frac{1}{2}"),
        ("1/2", "½"), ("2.5", "2 1/2"), ("1/3", "0.333333"), ("0.333333", "1/3"), ("3.14159265", "3.1415927"),
        ("50%", "0.5"), ("0.5", "50%"), ("50", "50%"), ("50%", "50"), ("12.5%", "12.5%"), ("2**10", "1024"),
        ("2**10", "2^10"), ("3 × 10^5", "3e5"), ("10 / 4", "2.5"), ("She has 5 * 2 = 10. #### 10", "10"),
        ("42", "42 = 42"),
    ],
)  # fmt: skip
def test_answers_of_equal_value_are_correct(reference: str, answer: str) -> None:
    """The notation does not matter."""
    assert reward(problem(reference), answered(answer)) == 1.0


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "41"), ("42", "-42"), ("42", "420"), ("42", "42 or 43"), ("42", "42, 43"), ("42", "42 43"), ("42", ""),
        ("42", "forty-two"), ("42", "42 = 43"), ("42", "15 + 27 ="), ("42", "42...43"), ("1/3", "0.33"),
        ("1000000", "1000001"), ("1000000", "1000001.0"), ("1000000/3", "1000001/3"), ("50", "0.5"), ("42", "4.2e2"),
        ("42", "__import__('os')"), ("42", "9**9**9"), ("42", "9" * 10_000), ("42", "(" * 500 + "42" + ")" * 500),
        ("42", "6*" * 5000 + "7"), ("42", "\ud800"), ("42", "4\x002"), ("42", "٤٢"), ("42", "1/0"), ("42", "nan"),
        ("42", "inf"), ("42", "1e999999999"), ("42", "<answer>42"), ("5", "5 - 0.0000001j"),
    ],
)  # fmt: skip
def test_other_answers_are_wrong(reference: str, answer: str) -> None:
    """Other values, several values, texts without a value, and expressions beyond the limits."""
    expected = 1.0 if answer.startswith("<answer>") else 0.0
    assert reward(problem(reference), answered(answer)) == expected


@pytest.mark.parametrize("answer", ["15 + 27", "27+15", "15 + 27 + 0", "42 + 0", "(15 + 27)", "42 = 15 + 27", "84/2"])
def test_an_unevaluated_expression_is_wrong(answer: str) -> None:
    """Otherwise, a copy of the question would have the same reward as its result."""
    assert reward(problem("42", prompt="What is 15 + 27?"), answered(answer)) == 0.0


def test_a_fraction_copied_from_the_prompt_is_wrong_if_the_reference_is_a_decimal() -> None:
    """A fraction is correct if the reference is a fraction."""
    assert reward(problem("3.5", prompt="What is 7 ÷ 2?"), answered("7/2")) == 0.0
    assert reward(problem("3.5", prompt="What is 14 / 4?"), answered("7/2")) == 1.0
    assert reward(problem("3/4", prompt="Which is larger, 3/4 or 1/2?"), answered("3/4")) == 1.0


@pytest.mark.parametrize("reference", ["B", "B) 74", "Paris", "", "9**9**9", "1/0", "9" * 10_000, "1 or 2"])
def test_the_reward_does_not_apply_if_the_reference_is_not_a_number(reference: str) -> None:
    """The function returns None."""
    assert reward(problem(reference), answered("42")) is None


@pytest.mark.parametrize("completion", ["42", "<answer>42", "", "<think><answer>42</answer>"])
def test_a_number_outside_an_answer_is_wrong(completion: str) -> None:
    """A truncated completion or an open `<think>` has no answer."""
    assert reward(problem("42"), completion) == 0.0


def test_every_problem_of_a_large_dataset_is_scored() -> None:
    """More problems than the parse cache holds."""
    problems = [problem(str(i)) for i in range(3000)]
    assert sum(reward(one, answered(f"{i} + 1 = {i}")) or 0.0 for i, one in enumerate(problems)) == 3000
