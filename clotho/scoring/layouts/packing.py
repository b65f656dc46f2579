"""What a layout decides for a micro-batch: its sequences, what the blocks read, and where tokens are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.scoring.sequences import TrainingSequence


class Placement(NamedTuple):
    """The sequences of a micro-batch, laid out.

    members: their indices among all sequences. positions: per member, the flat positions of the hidden states that
    predict its tokens, (T,). tokens: positions that the blocks compute, padding included.
    """

    members: tuple[int, ...]
    inputs: NamedTuple
    positions: list[NDArray[np.int32]]
    tokens: int


Layout = Callable[[Sequence[TrainingSequence], Sequence[int], int], Iterator[Placement]]
"""layout(sequences, order, budget): places the sequences that `order` lists, longest first, within the budget."""
