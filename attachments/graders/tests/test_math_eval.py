# ruff: noqa: RUF001
from __future__ import annotations

import pytest

from attachments.graders.math_eval import reward
from protocols.prompt import AnswerIn
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


@pytest.mark.parametrize(
    ("answer_in", "reference", "completion", "value"),
    [
        ("tags", "42", "<think>15 + 27</think>\n<answer>\nThe answer is **42**.\n</answer>", 1.0),
        ("tags", "42", "<answer>41</answer> Let me check again. <answer>42</answer>", 1.0),
        ("tags", "42", "<think>15 + 27 is <answer>42</answer>", 0.0),
        ("tags", "42", "<think>15 + 27</think><answer>42", 0.0),
        ("tags", "1234.5", "<answer>$1,234.50</answer>", 1.0),
        ("tags", "-5", "<answer>−5 °C</answer>", 1.0),
        ("tags", "0.5", "<answer>50%</answer>", 1.0),
        ("tags", "3/4", r"<answer>\(\dfrac{3}{4}\)</answer>", 1.0),
        ("boxed", "1/2", r"Therefore, $$x = \boxed{\frac{1}{2}}.$$", 1.0),
        ("boxed", "2.5", r"The area is \(\boxed{\dfrac{5}{2}\ \text{cm}^2}\).", 1.0),
        ("boxed", "1234", r"\boxed{1{,}234}", 1.0),
        ("boxed", "12.5", r"The rate is $\boxed{12.5\%}$", 1.0),
        ("boxed", "7", r"We first get \boxed{5}. Correcting the sign, \boxed{7}.", 1.0),
        ("boxed", "7", r"We first get \boxed{7}. Correcting the sign, \boxed{5}.", 0.0),
        ("boxed", "-3", r"\boxed{−3}", 1.0),
        ("boxed", "42", r"<think>\boxed{42}</think> I am not sure.", 0.0),
        ("boxed", "42", "The answer is 42.", 0.0),
        ("boxed", "42", r"The answer is \boxed{42", 0.0),
        ("hashes", "18", "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", 1.0),
        ("hashes", "70000", "The profit is 200000 - 130000.\n#### $70,000", 1.0),
        ("hashes", "18", "#### The answer is **18** dollars.", 1.0),
        ("hashes", "18", "She makes 18 dollars.", 0.0),
        ("last_number", "132", "The answer is 132.", 1.0),
        ("last_number", "132", "132 is 47 + 85", 0.0),
        ("last_number", "1320.5", "$1,320.50!", 1.0),
        ("last_number", "-5", "It is −5 degrees.", 1.0),
        ("last_number", "5", "It is -5", 0.0),
        ("last_number", "0.5", "The probability is 50%.", 1.0),
        ("last_number", "0.5", r"The probability is $\frac{1}{2}$.", 1.0),
        ("last_number", "42", "The answer is **42**.", 1.0),
        ("last_number", "42", "<think>15 + 27 = 42", 0.0),
        ("last_number", "9", "9" * 5000, 0.0),
        ("text", "42", "**42**", 1.0),
        ("text", "42", "<think>15 + 27</think>\n\nThe answer is 42.", 1.0),
        ("text", "42", "Adding them gives 42, I think.", 0.0),
    ],
)
def test_realistic_completions(answer_in: AnswerIn, reference: str, completion: str, value: float) -> None:
    """LaTeX, units, thousands, percents, Unicode, several answers and truncated texts, in every place."""
    assert reward(problem(reference), completion, answer_in=answer_in) == value
