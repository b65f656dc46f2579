"""The problems: five kinds, three levels each, with the answer and the careful work that leads to it.

Pure Python, deterministic from the `random.Random` that is passed in. Every number in a prompt, in the work and in an
answer is a non-negative integer in decimal notation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import pairwise
from random import Random

from profiles.maker.problem import Generator, Problem

LEVELS = (1, 2, 3)
"""The grades of difficulty, easiest first."""

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
"""What the operator signs of the prompts mean."""

NAMES = ("Ann", "Ben", "Eva", "Max", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")


def column_steps(a: int, sign: str, b: int) -> list[str]:
    """Work a + b or a - b (a >= b) in schoolbook columns, units first.

    A carry or loan from the column before is the middle term.
    >>> column_steps(347, "+", 285)   ->  ["7+5=12", "4+8+1=13", "3+2+1=6"]
    >>> column_steps(532, "-", 285)   ->  ["12-5=7", "13-1-8=4", "5-1-2=2"]
    """
    steps, carry = [], 0
    while a or b:
        (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
        carried = f"{sign}1" if carry else ""
        if sign == "+":
            total = x + y + carry
            steps.append(f"{x}+{y}{carried}={total}")
            carry = total // 10
        else:
            lent = x + 10 if x < y + carry else x
            steps.append(f"{lent}{carried}-{y}={lent - carry - y}")
            carry = lent // 10
    return steps


def chain_values(first: int, operations: Iterable[tuple[str, int]]) -> list[int]:
    """List the values of `first` after no, one, two ... of the operations, from left to right."""
    values = [first]
    for sign, number in operations:
        values.append(OPERATORS[sign](values[-1], number))
    return values


def chain_steps(first: int, operations: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Work one step for each operation: 6 * 7 + 5 is `6*7=42`, `42+5=47`."""
    operations = list(operations)
    values = chain_values(first, operations)
    return tuple(f"{a}{sign}{n}={b}" for (a, b), (sign, n) in zip(pairwise(values), operations, strict=True))


def arithmetic(rng: Random, level: int) -> Problem:
    """Ask for one sum or difference: two and one digits, two and two, three and up to three."""
    low, high, other_low, other_high = {1: (10, 99, 1, 9), 2: (10, 99, 10, 99), 3: (100, 999, 10, 999)}[level]
    sign = rng.choice("+-")
    a, b = rng.randint(low, high), rng.randint(other_low, other_high)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    answer = OPERATORS[sign](a, b)
    work = tuple(column_steps(a, sign, b))
    return Problem("arithmetic", level, f"What is {a} {sign} {b}?", str(answer), work)


def multistep(rng: Random, level: int) -> Problem:
    """Ask for several operations in a row: a * b + c, a + b - c, a * b + c - d."""
    while True:
        first = rng.randint(10, 99) if level == 2 else rng.randint(2, 12)
        signs = [rng.choice("+-"), rng.choice("+-")] if level == 2 else ["*", *rng.choices("+-", k=level // 3 + 1)]
        operations = [(sign, rng.randint(2 if sign == "*" else 1, 9)) for sign in signs]
        values = chain_values(first, operations)
        if min(values) >= 0:
            break
    asked = " ".join([str(first), *(f"{sign} {n}" for sign, n in operations)])
    return Problem("multistep", level, f"What is {asked}?", str(values[-1]), chain_steps(first, operations))


def option(rng: Random, level: int) -> tuple[str, int]:
    """Draw one option of a comparison and its value: a number, or at level 3 a small sum or product."""
    if level < 3:
        value = rng.randint(10, 99 if level == 1 else rng.choice((99, 999)))
        return str(value), value
    a, b, sign = rng.randint(2, 9), rng.randint(2, 9), rng.choice("+*")
    return f"{a} {sign} {b}", OPERATORS[sign](a, b)


def comparison(rng: Random, level: int) -> Problem:
    """Ask for the largest or smallest of three or four options; the answer is a letter.

    The work names the best option so far, after the second option, the third ...; at level 3 it first works them out.
    """
    letters = "ABCD" if level == 2 else "ABC"
    while True:
        texts, values = zip(*(option(rng, level) for _ in letters), strict=True)
        if len(set(values)) == len(values):
            break
    word = rng.choice(("largest", "smallest"))
    best = max if word == "largest" else min
    work = [f"{text.replace(' ', '')}={value}" for text, value in zip(texts, values, strict=True) if level == 3]
    leader = 0
    for rival in range(1, len(letters)):
        leader = best((leader, rival), key=values.__getitem__)
        work.append(f"{letters[leader]}{values[leader]}")
    options = " ".join(f"{letter}) {text}" for letter, text in zip(letters, texts, strict=True))
    wrong = tuple(letter for letter in letters if letter != letters[leader])
    return Problem("comparison", level, f"Which is the {word}? {options}", letters[leader], tuple(work), wrong)


def sequence(rng: Random, level: int) -> Problem:
    """Ask what follows four numbers: rising evenly, falling evenly, rising by more each time."""
    growth = rng.randint(1, 3) if level == 3 else 0
    term, step = rng.randint(*{1: (1, 60), 2: (36, 99), 3: (1, 40)}[level]), rng.randint(2, 9)
    operations = [("-" if level == 2 else "+", step + growth * i) for i in range(4)]
    *shown, answer = chain_values(term, operations)
    work = chain_steps(term, operations)[1:]
    return Problem("sequence", level, f"What comes next? {', '.join(map(str, shown))}", str(answer), work)


def word(rng: Random, level: int) -> Problem:
    """Tell a little story of one step, of two steps, or of a product and a step."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    gain, more = rng.random() < 0.5, rng.random() < 0.5
    b, c = rng.randint(2, 9), rng.randint(1, 9)
    first = rng.randint(2, 12) if level == 3 else rng.randint(20, 99)
    if level == 3:
        ending = f"buys {c} more" if more else f"loses {c}"
        story = f"{name} has {first} boxes of {b} {things} and {ending}."
        operations = [("*", b), ("+" if more else "-", c)]
    else:
        story = f"{name} has {first} {things} and {'buys' if gain else 'sells'} {b}."
        operations = [("+" if gain else "-", b)]
    if level == 2:
        story = f"{story[:-1]}, then {'finds' if more else 'loses'} {c}."
        operations.append(("+" if more else "-", c))
    values = chain_values(first, operations)
    if values[-1] < 0:
        return word(rng, level)
    prompt = f"{story} How many {things} now?"
    return Problem("word", level, prompt, str(values[-1]), chain_steps(first, operations))


KINDS: dict[str, Callable[[Random, int], Problem]] = {
    "arithmetic": arithmetic, "multistep": multistep, "comparison": comparison, "sequence": sequence, "word": word,
}  # fmt: skip
"""The generator of each kind of problem, by the name in the data's `type` field."""


def at_level(make: Callable[[Random, int], Problem], level: int) -> Generator:
    """Return the generator of one kind at one level."""
    return lambda rng: make(rng, level)


GENERATORS = [at_level(make, level) for make in KINDS.values() for level in LEVELS]
"""One generator for each kind and level."""


def draw(rng: Random) -> Problem:
    """Draw one problem, every kind and every level equally likely."""
    return KINDS[rng.choice(list(KINDS))](rng, rng.choice(LEVELS))
