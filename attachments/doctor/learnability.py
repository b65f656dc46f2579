"""How much RL can learn from problems, estimated from drawn completions, and which kind of training helps otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from protocols.rollout import GroupOutcome
from training_run.evaluation.accuracy import pass_at

LARGEST_K = 8
"""Largest k of pass@k, as far as groups have so many completions."""

FEWEST_GROUPS = 4
"""Problems below which nothing is estimated."""

SOLVED = 0.95
"""pass@1 from which on nearly all groups of 8 are solved by all completions: 0.95^8 is two thirds."""


def learnability(outcomes: Sequence[GroupOutcome], *, batch_size: int) -> str:
    """Return pass@1, pass@k and what helps; empty if too few groups have completions that are judged correct or wrong.

    A group teaches RL something if some of its completions are correct and others are not. pass@k is the share of
    problems that k completions solve at least once; with fewer than one such problem in a batch, RL has nothing to
    reinforce in most updates. With fewer than one group of both kinds, problems are always solved or never.
    outcomes: scored groups. batch_size: number of groups of a batch of the run.
    """
    judged = [[one for one in outcome.correct if one is not None] for outcome in outcomes]
    judged = [row for row in judged if row]
    if len(judged) < FEWEST_GROUPS:
        return ""
    k = min(LARGEST_K, *map(len, judged))
    one, several = (fmean(pass_at(n, correct=sum(row), samples=len(row)) for row in judged) for n in (1, k))
    mixed = fmean(0 < sum(row) < len(row) for row in judged)
    advice = _advice(one, solved=several * batch_size, mixed=mixed * batch_size)
    return f"pass@1 {one:.2f}, pass@{k} {several:.2f} of {len(judged)} problems: {advice}"


def _advice(one: float, *, solved: float, mixed: float) -> str:
    """solved, mixed: groups of a batch with a correct completion, and with a wrong one too."""
    if solved < 1:
        return "warm up first, with demonstrations ([[stages]] of the kind sft) or easier problems"
    if one >= SOLVED:
        return "nearly solved, choose harder problems"
    if mixed < 1:
        return "solved always or never, RL has little to learn from; raise sampling.temperature, or warm up"
    return "RL can help"
