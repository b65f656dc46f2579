"""Make the problems of the profile `proof-countdown` again: `python -m profiles.countdown --out DIR --seed 0`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from pathlib import Path
from random import Random

from clotho.rewards.answer import HASHES
from profiles.maker.command import run_command
from profiles.maker.problem import Problem, write_problems

HELD_OUT, TRAINING = 128, 1024
"""Problems in heldout.jsonl and in train.jsonl; no three numbers occur in both, whatever their order and target."""

NUMBERS, COUNT = range(1, 16), 3
HELD_OUT_SETS = 120
"""Sets of numbers from which the held-out problems are drawn."""


def solutions(numbers: Sequence[int], target: int) -> list[str]:
    """Return the sums and differences of all numbers that equal the target; they begin with a number that is added."""
    found = []
    for signs in product((1, -1), repeat=len(numbers)):
        if sum(map(int.__mul__, signs, numbers)) == target:
            added, taken = (
                [str(one) for one, its in zip(numbers, signs, strict=True) if its == sign] for sign in (1, -1)
            )
            found.append("-".join(["+".join(added), *taken]))
    return found


def draw(rng: Random, sets: Sequence[tuple[int, ...]], count: int) -> list[Problem]:
    """Draw distinct problems of these sets of numbers; each has a positive target."""
    found: dict[str, Problem] = {}
    while len(found) < count:
        numbers = rng.sample(chosen := rng.choice(sets), len(chosen))
        target = sum(number * rng.choice((1, -1)) for number in numbers)
        if target <= 0:
            continue
        prompt = f"{', '.join(map(str, numbers))}; target {target}"
        found[prompt] = Problem(
            kind="countdown",
            level=COUNT,
            prompt=prompt,
            answer=solutions(numbers, target)[0],
            work=work(numbers, target),
        )
    return list(found.values())


def work(numbers: Sequence[int], target: int) -> tuple[str, ...]:
    """Return the calculation that finds what has to be subtracted: half of what the sum of all numbers has too much.

    Each step has one operation, and its result is the first operand of the next one. If no number has the value of what
    has to be subtracted, two have; the last step then finds the number that is added.
    """
    total = numbers[0]
    steps = [str(total)]
    for number in numbers[1:]:
        total += number
        steps.append(f"+{number}={total}")
    steps.append(f"-{target}={(excess := total - target)}")
    if excess:
        steps.append(f"/2={excess // 2}")
        if excess // 2 not in numbers:
            steps.append(f"+{target}={excess // 2 + target}")
    return tuple(steps)


def make(out: Path, seed: int) -> None:
    """Write the two files; the same seed writes the same bytes. Each training problem has a demonstration."""
    out.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    sets = rng.sample(every := list(combinations_with_replacement(NUMBERS, COUNT)), len(every))
    write_problems(out / "train.jsonl", draw(rng, sets[HELD_OUT_SETS:], TRAINING), demonstration)
    write_problems(out / "heldout.jsonl", draw(rng, sets[:HELD_OUT_SETS], HELD_OUT))


def demonstration(one: Problem) -> str:
    """Return the steps and the answer."""
    return f"{''.join(one.work)} {HASHES} {one.answer}"


if __name__ == "__main__":
    run_command("python -m profiles.countdown", __doc__, make)
