"""What the learner knows of one completion: its tokens, how they were sampled, and what each of them weighs.

A sequence whose log-probabilities are asked for, and that nothing is learned from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocols.sampling import Completion


def drawn_T(completion: Completion) -> NDArray[np.bool_]:
    """Which of its tokens the policy drew: (T,)."""
    return np.asarray(completion.sampled or (True,) * len(completion.tokens), dtype=bool)


class TeacherRows(NamedTuple):
    """A teacher's alternatives, row by row: tokens, int32, -1 where there are fewer than K; and their shares, float32.

    A row of shares adds up to 1, or to 0 where the teacher said nothing; the share of a -1 is 0.
    """

    token_T_K: NDArray[np.int32]
    share_T_K: NDArray[np.float32]


class TrainingSequence(NamedTuple):
    """One completion, ready for a micro-batch; T counts its tokens, at least one of them sampled. Arrays are (T,).

    group: which group of the batch it belongs to; completions of a group have the same prompt.
    rollout_logp_T: log-probability under the sampler. version_T: of the weights that drew the token.
    weight_T: 1 for tokens that are learned from, else 0. loss_weight_T: the token's share in the loss of the whole
    update, by the aggregation: the loss is the sum of coefficient times token loss over all sequences.
    supports: per token, the tokens that could have been sampled, as little-endian uint32 numbers in ascending order;
    empty where the whole vocabulary could.
    drawn_T: whether the policy drew the token; None: all of them. Others are read, and whatever else is said of them
    counts for nothing.
    temperature: at which the tokens were sampled; 0: the run's. reference_T: log-probabilities under the reference, where
    the group brings them. teacher: what one would have said at each token.
    """

    group: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rollout_logp_T: NDArray[np.float32]
    version_T: NDArray[np.int32]
    advantage_T: NDArray[np.float32]
    weight_T: NDArray[np.float32]
    loss_weight_T: NDArray[np.float32]
    supports: tuple[bytes, ...] = ()
    drawn_T: NDArray[np.bool_] | None = None
    temperature: float = 0.0
    reference_T: NDArray[np.float32] | None = None
    teacher: TeacherRows | None = None

    @property
    def inputs(self) -> int:
        """Tokens that the model reads: the last one is only predicted."""
        return len(self.prompt) + len(self.tokens) - 1


class TokenTable(NamedTuple):
    """The completion tokens of a micro-batch that the policy drew, in one flat row of length N.

    N is padded to a multiple of `TOKEN_BUCKET`. What the policy did not draw is in the inputs alone.

    position_N: index, in the flattened hidden states of the layout, of the state that predicts the token.
    target_N: the token. sequence_N: its completion, counted within the micro-batch. The rest: see `TrainingSequence`.
    support_N_K: tokens that could have been sampled, padded with -1 at the end of a
    row; None where the whole vocabulary could. Padding in N repeats the first token with weight and coefficient 0.
    temperature_N: 0 where it is the run's; None where it is everywhere. reference_N: None where the groups bring none.
    teacher: its rows, (N, K); None where there is none. Padding has no teacher.
    """

    position_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    sequence_N: NDArray[np.int32]
    rollout_logp_N: NDArray[np.float32]
    version_N: NDArray[np.int32]
    advantage_N: NDArray[np.float32]
    weight_N: NDArray[np.float32]
    loss_weight_N: NDArray[np.float32]
    support_N_K: NDArray[np.int32] | None
    temperature_N: NDArray[np.float32] | None = None
    reference_N: NDArray[np.float32] | None = None
    teacher: TeacherRows | None = None

    @property
    def teacher_mask_N(self) -> NDArray[np.float32]:
        """1 for tokens with a teacher's alternatives, else 0."""
        if self.teacher is None:
            return np.zeros_like(self.weight_N)
        return np.asarray((self.teacher.share_T_K > 0).any(axis=-1), dtype=np.float32)


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


def scored_only(prompt: Sequence[int], tokens: Sequence[int]) -> TrainingSequence:
    """Make a sequence of tokens without a record of how they were sampled: weights and all else are 0."""
    zeros_T = np.zeros(len(tokens), dtype=np.float32)
    return TrainingSequence(
        group=0,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        rollout_logp_T=zeros_T,
        version_T=zeros_T.astype(np.int32),
        advantage_T=zeros_T,
        weight_T=zeros_T,
        loss_weight_T=zeros_T,
    )
