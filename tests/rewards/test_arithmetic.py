from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from time import perf_counter

import pytest

from clotho.rewards.arithmetic import EvaluationError, evaluate


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
def test_expressions_have_their_exact_value(expression: str, value: Fraction | int) -> None:
    """In rational numbers, with the precedence of mathematics."""
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
def test_what_is_no_affordable_arithmetic_is_refused(expression: str) -> None:
    """Python's own syntax, names, endless powers, huge literals and deep nesting among it."""
    with pytest.raises(EvaluationError):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "*".join(["9" * 99] * 200), "-" * 20_000 + "1", "+".join(["1/97"] * 5000), "1e999" + "*1e999" * 5000,
     "(" * 20_000, "1 " * 20_000, "a" * 20_000, "1 " + "a " * 20_000, "1," * 20_000, "1,111" * 5000, "1" * 20_000],
)  # fmt: skip
def test_hostile_expressions_cost_little(expression: str) -> None:
    """The bound holds even without the limit on the length of an answer, which comes before."""
    start = perf_counter()
    with suppress(EvaluationError):
        evaluate(expression)
    assert perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("expression", "finished"),
    [("42", True), ("-4.5", True), ("50%", True), ("(7)", True), ("1 1/2", True), ("3/4", True), ("-3/4", True),
     ("6/8", False), ("84/2", False), ("8/1", False), ("3/4/5", False), ("15 + 27", False), ("6 * 7", False),
     ("2 ** 3", False), ("7 // 2", False), ("0.5/2", False)],
)  # fmt: skip
def test_a_number_or_reduced_fraction_is_finished(expression: str, finished: bool) -> None:
    """Anything else leaves work to the reader."""
    assert evaluate(expression).finished is finished
