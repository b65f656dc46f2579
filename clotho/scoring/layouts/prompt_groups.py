"""Which prompts and completions of the shared prefix layout come together in a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clotho.scoring.layouts.packing import Placement, bucket
from clotho.scoring.layouts.shared_prefix import SharedInputs, stretches
from clotho.scoring.sequences import TrainingSequence

KEYS_PER_TOKEN = 8
"""Keys that the completions of a micro-batch attend to, a copy for each completion, per token of the budget.

What is kept of a key is a small part of what is kept of a token; but a long prompt has a key per completion.
"""


class Family(NamedTuple):
    """Sequences with the same prompt, longest first. prompt, completion: longest inputs of both passes, in buckets.

    rows: completions with inputs, which are those of two tokens or more.
    """

    members: tuple[int, ...]
    prompt: int
    completion: int
    rows: int


def place_shared(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Put the sequences, longest first, into micro-batches of at most `budget` tokens in both passes together.

    Their completions attend to at most `KEYS_PER_TOKEN` times as many keys. Sequences with the same prompt stay
    together unless they do not fit: then their prompt is computed once per micro-batch. Families of like completions,
    or of like prompts, whichever pads less, come together.
    """
    families = [part for family in _families(sequences, order) for part in _fitting(sequences, family, budget)]
    plans = [
        _filled(sorted(families, key=lambda family: (-family.completion, -family.prompt)), budget),
        _filled(sorted(families, key=lambda family: (-family.prompt, -family.completion)), budget),
    ]
    for part in min(plans, key=lambda plan: sum(map(_tokens, plan))):
        yield _placed(sequences, part)


def _families(sequences: Sequence[TrainingSequence], order: Sequence[int]) -> list[Family]:
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for member in order:
        by_prompt.setdefault(sequences[member].prompt, []).append(member)
    return [_family(sequences, members) for members in by_prompt.values()]


def _family(sequences: Sequence[TrainingSequence], members: Sequence[int]) -> Family:
    first = sequences[members[0]]
    longer = sum(len(sequences[member].tokens) > 1 for member in members)
    return Family(tuple(members), bucket(len(first.prompt)), bucket(len(first.tokens) - 1) if longer else 0, longer)


def _fitting(sequences: Sequence[TrainingSequence], family: Family, budget: int) -> list[Family]:
    """Cut a family that is too large alone into parts that fit, of one row each at least."""
    if _fits([family], budget):
        return [family]
    by_tokens = (budget - family.prompt) // max(1, family.completion)
    rows = max(1, min(by_tokens, KEYS_PER_TOKEN * budget // (family.prompt + family.completion)))
    longer, short = family.members[: family.rows], family.members[family.rows :]
    parts = [longer[start : start + rows] for start in range(0, len(longer), rows)] or [()]
    return [_family(sequences, part) for part in [*parts[:-1], parts[-1] + short]]


def _filled(families: Sequence[Family], budget: int) -> list[list[Family]]:
    """Cut families into runs that fit the budget."""
    runs: list[list[Family]] = [[]]
    for family in families:
        if runs[-1] and not _fits([*runs[-1], family], budget):
            runs.append([])
        runs[-1].append(family)
    return runs


def _longest(families: Sequence[Family]) -> tuple[int, int]:
    return max(family.prompt for family in families), max(family.completion for family in families)


def _tokens(families: Sequence[Family]) -> int:
    """Count the positions of both passes, padding included."""
    P, C = _longest(families)
    return len(families) * P + sum(family.rows for family in families) * C


def _fits(families: Sequence[Family], budget: int) -> bool:
    keys = sum(family.rows for family in families) * sum(_longest(families))
    return _tokens(families) <= budget and keys <= KEYS_PER_TOKEN * budget


def _placed(sequences: Sequence[TrainingSequence], families: Sequence[Family]) -> Placement:
    P, C = _longest(families)
    members = tuple(member for family in families for member in family.members)
    rows = sum(family.rows for family in families)
    inputs = SharedInputs(
        tokens_F_P=np.zeros((len(families), P), dtype=np.int32),
        length_F=np.zeros(len(families), dtype=np.int32),
        tokens_B_C=np.zeros((rows, C), dtype=np.int32),
        prompt_B=np.repeat(np.arange(len(families), dtype=np.int32), [family.rows for family in families]),
        length_B=np.zeros(rows, dtype=np.int32),
    )
    positions = []
    row = 0
    for f, family in enumerate(families):
        prompt = sequences[family.members[0]].prompt
        inputs.tokens_F_P[f, : len(prompt)] = prompt
        inputs.length_F[f] = len(prompt)
        for member in family.members:
            read = sequences[member].tokens[:-1]
            inputs.tokens_B_C[row : row + 1, : len(read)] = read
            inputs.length_B[row : row + 1] = len(read)
            first = len(families) * P + row * C
            own = np.arange(first, first + len(read), dtype=np.int32)
            positions.append(np.concatenate([[f * P + len(prompt) - 1], own], dtype=np.int32))
            row += bool(read)
    computed = inputs.tokens_F_P.size + sum(stretch.positions for stretch in stretches(inputs.length_B))
    return Placement(members, inputs, positions, computed)
