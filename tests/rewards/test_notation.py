# ruff: noqa: RUF001
from __future__ import annotations

from time import perf_counter

import pytest

from clotho.rewards.notation import LONGEST, plain


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
def test_notations_become_plain_arithmetic(text: str, expression: str) -> None:
    """Unicode signs, LaTeX, currency and the phrases around a result."""
    assert plain(text) == expression


@pytest.mark.parametrize("text", ["1" * (LONGEST + 1), "\ufdfa" * 500])
def test_texts_that_are_or_become_too_long_are_refused(text: str) -> None:
    """One character may stand for many."""
    assert plain(text) is None


@pytest.mark.parametrize("unit", ["{", "\\frac{", "\\boxed{", "^{", "\\frac{1}{1", "$", "=", "a is ", "\\text{}"])
def test_hostile_texts_cost_little(unit: str) -> None:
    """No pattern backtracks beyond the length of an answer."""
    start = perf_counter()
    plain((unit * LONGEST)[:LONGEST])
    plain(("{" * 100 + unit * LONGEST)[:LONGEST])
    assert perf_counter() - start < 0.5
