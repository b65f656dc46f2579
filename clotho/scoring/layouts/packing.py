"""What a layout decides for a micro-batch: its sequences, what the blocks read, and where tokens are scored.

Rounded lengths: few different shapes, so that buffers and compiled kernels are used again.
"""

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


TOKEN_BUCKET = 64
"""The completion tokens of a micro-batch are padded to a multiple of this."""


def bucket(length: int) -> int:
    """Round a length up to one of at most 16 sizes per octave: a multiple of 8, at least; padding below 1/8."""
    granularity = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // granularity) * granularity
