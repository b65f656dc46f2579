"""The demonstrators whose mixture the policy imitates: a careful one, and several who are not.

The policy should know how to solve every kind of problem, and yet not always do so: that gap is what reinforcement
learning closes. So a stated share of the demonstrations works the problem out and is always right; the rest guesses,
gives up half way, or forgets the form. The shares differ by kind and level: where the careful way is in the majority
the policy's greedy answer is right, elsewhere it is wrong though a sample often is right.
"""

from __future__ import annotations

import re
from random import Random

from profiles.maker.problem import Problem, completion

CAREFUL_SHARE: dict[str, tuple[float, float, float]] = {
    "arithmetic": (0.60, 0.32, 0.32),
    "multistep": (0.60, 0.60, 0.32),
    "comparison": (0.60, 0.32, 0.32),
    "sequence": (0.60, 0.32, 0.32),
    "word": (0.60, 0.60, 0.32),
}
"""Probability that a demonstration of a kind at level 1, 2, 3 is the careful one."""

CARELESS: dict[str, float] = {"hasty": 0.84, "unfinished": 0.10, "untagged": 0.06}
"""How the rest divides: a guess without work; work that stops half way and a guess; a guess without its tags."""


TUTORED_STEPS, MIXED_STEPS = 2000, 400
"""Updates on careful demonstrations alone, and on the mixture after that."""


def careful(problem: Problem) -> str:
    """Show every step of the work, then the right answer."""
    return completion(",".join(problem.work), problem.answer)


def guess(problem: Problem, rng: Random) -> str:
    """Guess, always wrongly: any other option, or else the last number of the question that is not the answer."""
    if problem.wrong:
        return rng.choice(problem.wrong)
    numbers = [number for number in re.findall(r"\d+", problem.prompt) if number != problem.answer]
    return numbers[-1] if numbers else str(int(problem.answer) + 1)


def careless(problem: Problem, rng: Random) -> str:
    """Fail in one of the ways to fail: answer and form are never both right."""
    match rng.choices(list(CARELESS), list(CARELESS.values()))[0]:
        case "hasty":
            return completion("", guess(problem, rng))
        case "unfinished":
            return completion(",".join(problem.work[: rng.randrange(len(problem.work))]), guess(problem, rng))
        case _:
            return guess(problem, rng)


def demonstrate(problem: Problem, rng: Random, step: int) -> str:
    """Demonstrate `problem` once: by the careful demonstrator alone at first, then sampled from the mixture."""
    share = 1.0 if step < TUTORED_STEPS else CAREFUL_SHARE[problem.kind][problem.level - 1]
    return careful(problem) if rng.random() < share else careless(problem, rng)
