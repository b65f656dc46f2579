# ruff: noqa: RUF001
"""Parsing and evaluation of written arithmetic."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest

from attachments.graders.arithmetic import MAX_CHARACTERS, EvaluationError, evaluate, plain_expression
from tests.cpu_limit import cpu_limit


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("42", 42), ("007", 7), ("4.", 4), (".5", Fraction(1, 2)), ("1.25e2", 125), ("2E-1", Fraction(1, 5)),
        ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("10 - 4 - 3", 3), ("2 / 3 / 4", Fraction(1, 6)), ("7 // 2", 3),
        ("-7 // 2", -4), ("7 % 3", 1), ("7 % (2 + 1)", 1), ("2 ** 3 ** 2", 512), ("-2 ** 2", -4),
        ("2 ** -2", Fraction(1, 4)),
        ("(-2) ** 2", 4), ("--5", 5), ("+-+5", -5), ("3 - -2", 5), ("50%", Fraction(1, 2)), ("50% + 1", Fraction(3, 2)),
        ("(25 + 25)%", Fraction(1, 2)), ("1,234,567", 1234567), ("1,234.5", Fraction(2469, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-2 3/4", Fraction(-11, 4)), ("1\n1/2", Fraction(3, 2)), ("42 apples", 42), ("3.5 m/s", Fraction(7, 2)),
        ("5 m**2", 5), ("90°", 90), ("20 °C", 20), ("0 ** 0", 1), ("0.1 + 0.2", Fraction(3, 10)),
    ],
)  # fmt: skip
def test_evaluate_returns_the_exact_rational_value(expression: str, value: Fraction | int) -> None:
    """Precedence follows mathematical convention."""
    assert evaluate(expression).value == value


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "+", "1 +", "* 2", "()", "(1", "1)", "1 2", "1..2", "2(3)", "(2)(3)", "1,23", "1,2345", "1 = 1", "x",
        "x 1",
        "1 or 2", "1; 2", "1 < 2", "True", "None", "not 1", "lambda: 1", "1 if 1 else 2", "[1]", "{1}", "'1'", "1_000",
        "0x1F", "1j2", "nan(1)", "__import__('os')", "__import__('os').system('true')", "().__class__", "a.b",
        "5 * apples",
        "1/0", "1 // 0", "1 % 0", "0 ** -1", "1 1/0", "9**9**9", "9**9**9**9", "2 ** 5000", "(2 ** 4000) ** 2",
        "2 ** 0.5",
        "(1/3) ** 4000", "1e1000", "1e999999999", "9" * 101, "9" * 10_000, "(" * 10_000, "(" * 40 + "1" + ")" * 40,
        "2 ** " * 50 + "1", "1 " * 1000, "٤٢", "1\x002", "\ud800", "1 one two three four five",
    ],
)  # fmt: skip
def test_text_that_is_not_arithmetic_or_exceeds_a_limit_raises(expression: str) -> None:
    """Python syntax, names, huge powers, huge literals and deep nesting are refused."""
    with pytest.raises(EvaluationError):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "*".join(["9" * 99] * 200), "-" * 20_000 + "1", "+".join(["1/97"] * 5000), "1e999" + "*1e999" * 5000,
     "(" * 20_000, "1 " * 20_000, "a" * 20_000, "1 " + "a " * 20_000, "1," * 20_000, "1,111" * 5000, "1" * 20_000],
)  # fmt: skip
def test_hostile_expressions_terminate(expression: str) -> None:
    """The evaluator limits its cost even without the limit on the length of the text."""
    with cpu_limit(), suppress(EvaluationError):
        evaluate(expression)


@pytest.mark.parametrize(
    ("expression", "finished"),
    [("42", True), ("-4.5", True), ("50%", True), ("(7)", True), ("1 1/2", True), ("3/4", True), ("-3/4", True),
     ("6/8", False), ("84/2", False), ("8/1", False), ("3/4/5", False), ("15 + 27", False), ("6 * 7", False),
     ("2 ** 3", False), ("7 // 2", False), ("0.5/2", False)],
)  # fmt: skip
def test_a_number_or_a_fraction_in_lowest_terms_is_finished(expression: str, finished: bool) -> None:
    """Other expressions are not finished."""
    assert evaluate(expression).finished is finished


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("42", "42"), (" 42. ", "42"), ("**42**", "42"), ("`42`", "42"), (".5", ".5"), ("$42.50", "42.50"),
        ("€ 3", "3"),
        ("15 + 27 = 42", "42"), ("x = 42", "42"), ("a = b = 7", "7"), ("≈ 3.14", "3.14"), ("The answer is 42", "42"),
        ("Answer: 42", "42"), ("There are 42 apples", "42 apples"), ("She pays 5 * 2. #### 10", "10"), ("−5", "-5"),
        ("6 × 7", "6 * 7"), ("8 ÷ 2", "8 / 2"), ("2^3", "2**3"), ("10⁻³", "10**(-3)"), ("5 m²", "5 m**(2)"),
        ("1½", "1 1/2"), ("４２", "42"), ("1\u202f000", "1 000"),
        (r"\boxed{42}", "42"), (r"$\boxed{\frac{1}{2}}$", "((1)/(2))"), (r"\boxed{1} then \boxed{2}", "2"),
        (r"\dfrac{3}{4}", "((3)/(4))"), (r"\frac{\frac{1}{2}}{3}", "((((1)/(2)))/(3))"), (r"2^{10}", "2**(10)"),
        (r"6 \times 7", "6 * 7"), (r"50\%", "50%"), (r"\(42\)", "42"), (r"\left( 1 \right)", "( 1 )"),
        (r"5 \text{ cm}", "5   cm"), (r"1{,}234", "1,234"), (r"90^\circ", "90°"),
        ("15 + 27 =", ""), ("", ""),
    ],
)  # fmt: skip
def test_plain_expression_converts_common_notations(text: str, expression: str) -> None:
    """Covers Unicode signs, LaTeX, currency signs and phrases around a result."""
    assert plain_expression(text) == expression


@pytest.mark.parametrize("text", ["1" * (MAX_CHARACTERS + 1), "\ufdfa" * 500])
def test_plain_expression_returns_none_for_long_texts(text: str) -> None:
    """The limit also applies after Unicode normalization, which can lengthen a text."""
    assert plain_expression(text) is None


@pytest.mark.parametrize("unit", ["{", "\\frac{", "\\boxed{", "^{", "\\frac{1}{1", "$", "=", "a is ", "\\text{}"])
def test_hostile_notation_terminates(unit: str) -> None:
    """No regular expression backtracks catastrophically."""
    with cpu_limit():
        plain_expression((unit * MAX_CHARACTERS)[:MAX_CHARACTERS])
        plain_expression(("{" * 100 + unit * MAX_CHARACTERS)[:MAX_CHARACTERS])
