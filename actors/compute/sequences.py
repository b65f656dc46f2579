"""What the learner knows of one completion: its tokens, how they were drawn, and what each of them weighs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TrainingSequence(NamedTuple):
    """One completion, ready for a micro-batch; T counts its tokens, at least one. Arrays are (T,).

    group: which group of the batch it belongs to; completions of a group have the same prompt.
    behaviour_T: log-probability under the sampler. version_T: of the weights that drew the token.
    weight_T: 1 for tokens that are learnt from, else 0. coefficient_T: the token's share in the loss of the whole
    update, by the aggregation: the loss is the sum of coefficient times token loss over all sequences.
    supports: per token, the tokens that could have been drawn, as little-endian uint32 numbers in ascending order;
    empty where the whole vocabulary could.
    """

    group: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    behaviour_T: NDArray[np.float32]
    version_T: NDArray[np.int32]
    advantage_T: NDArray[np.float32]
    weight_T: NDArray[np.float32]
    coefficient_T: NDArray[np.float32]
    supports: tuple[bytes, ...] = ()

    @property
    def inputs(self) -> int:
        """Tokens that the model reads: the last one is only predicted."""
        return len(self.prompt) + len(self.tokens) - 1


class TokenTable(NamedTuple):
    """The completion tokens of a micro-batch in one flat row of length N, padded to a multiple of `TOKEN_BUCKET`.

    position_N: index, in the flattened hidden states of the layout, of the state that predicts the token.
    target_N: the token. sequence_N: its completion, counted within the micro-batch. The rest: see `TrainingSequence`.
    support_N_K: tokens that could have been drawn, padded with -1 at the end of a
    row; None where the whole vocabulary could. Padding in N repeats the first token with weight and coefficient 0.
    """

    position_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    sequence_N: NDArray[np.int32]
    behaviour_N: NDArray[np.float32]
    version_N: NDArray[np.int32]
    advantage_N: NDArray[np.float32]
    weight_N: NDArray[np.float32]
    coefficient_N: NDArray[np.float32]
    support_N_K: NDArray[np.int32] | None


class MicroBatch(NamedTuple):
    """Sequences that go through the model together.

    table: their completion tokens. members: which of the sequences that were handed in they are, in the order of
    `table.sequence_N`. inputs: what the blocks read, in the layout's own form.
    """

    table: TokenTable
    members: tuple[int, ...]
    inputs: NamedTuple

    @property
    def sequences(self) -> int:
        """How many there are (B)."""
        return len(self.members)
