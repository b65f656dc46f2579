"""The learner's view of a completion: its tokens, how they were sampled, and their weights in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocols.sampling import Completion


def sampled_mask_T(completion: Completion) -> NDArray[np.bool_]:
    """Return True at tokens that the policy sampled, (T,)."""
    return np.asarray(completion.sampled or (True,) * len(completion.tokens), dtype=bool)


class TeacherRows(NamedTuple):
    """A teacher's distribution at each token: K tokens, int32, padded with -1, and their probabilities, float32.

    The probabilities of a row add up to 1, or to 0 if the teacher gives none; those of padding are 0.
    """

    token_T_K: NDArray[np.int32]
    share_T_K: NDArray[np.float32]


class TrainingSequence(NamedTuple):
    """One completion for a micro-batch. T counts its tokens; at least one is sampled. Arrays have shape (T,).

    group: index of its group in the batch; completions of a group have the same prompt.
    rollout_logp_T: log-probability under the sampler. version_T: policy version that sampled the token.
    loss_mask_T: 1 for tokens that are trained on, else 0. loss_weight_T: weight of the token in the loss of
    the update: the loss is the sum of loss weight times token loss over all sequences.
    supports: per token, the tokens that could have been sampled, as little-endian uint32 numbers in ascending order;
    empty if the support is the whole vocabulary.
    sampled_mask_T: True at tokens that the policy sampled; None if the policy sampled every token. Other tokens are
    context, and their other values are ignored.
    temperature: sampling temperature; 0 means the temperature of the run. reference_T: log-probabilities under the
    reference policy, if the group contains them. teacher: a teacher's distribution at each token. teacher_logp_T:
    log-probabilities of the tokens under a teacher. route_I_E: E bytes of the route of each of the I inputs; None if
    the sampler has recorded none.
    """

    group: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rollout_logp_T: NDArray[np.float32]
    version_T: NDArray[np.int32]
    advantage_T: NDArray[np.float32]
    loss_mask_T: NDArray[np.float32]
    loss_weight_T: NDArray[np.float32]
    supports: tuple[bytes, ...] = ()
    sampled_mask_T: NDArray[np.bool_] | None = None
    temperature: float = 0.0
    reference_T: NDArray[np.float32] | None = None
    teacher: TeacherRows | None = None
    teacher_logp_T: NDArray[np.float32] | None = None
    route_I_E: NDArray[np.uint8] | None = None

    @property
    def inputs(self) -> int:
        """Number of tokens that the model reads. The last token is predicted and not read."""
        return len(self.prompt) + len(self.tokens) - 1


class TokenTable(NamedTuple):
    """The sampled completion tokens of a micro-batch as one flat row of length N.

    N is padded to a multiple of `TOKEN_BUCKET`. Tokens that the policy did not sample occur in the inputs only.

    position_N: index, in the flattened hidden states of the layout, of the state that predicts the token.
    target_N: the token. sequence_N: index of its completion in the micro-batch. Other fields: see `TrainingSequence`.
    support_N_K: tokens that could have been sampled, padded with -1; None if the support is the whole vocabulary.
    temperature_N: 0 means the temperature of the run; None if every token has it. reference_N: None if the groups
    contain no reference log-probabilities. teacher_logp_N: None if they contain none of a teacher.
    teacher: rows of shape (N, K); None without a teacher. Padding in N repeats the first token with weights 0.
    """

    position_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    sequence_N: NDArray[np.int32]
    rollout_logp_N: NDArray[np.float32]
    version_N: NDArray[np.int32]
    advantage_N: NDArray[np.float32]
    loss_mask_N: NDArray[np.float32]
    loss_weight_N: NDArray[np.float32]
    support_N_K: NDArray[np.int32] | None
    temperature_N: NDArray[np.float32] | None = None
    reference_N: NDArray[np.float32] | None = None
    teacher: TeacherRows | None = None
    teacher_logp_N: NDArray[np.float32] | None = None

    @property
    def teacher_mask_N(self) -> NDArray[np.float32]:
        """1 at tokens with a teacher's distribution, else 0."""
        if self.teacher is None:
            return np.zeros_like(self.loss_mask_N)
        return np.asarray((self.teacher.share_T_K > 0).any(axis=-1), dtype=np.float32)


class RouteInputs(NamedTuple):
    """The routes of the tokens of a micro-batch (`Completion.routes`), each once.

    inputs: those of the micro-batch, with the index of its route in place of each token. table_X_E: E bytes of each
    route; the first is that of padding. known_X: whether the sampler has recorded the route; it is never used for
    padding. replays: whether the learner takes these routes; otherwise it only counts how many differ from its own.
    """

    inputs: NamedTuple
    table_X_E: NDArray[np.uint8]
    known_X: NDArray[np.bool_]
    replays: bool


class MicroBatch(NamedTuple):
    """Sequences that go through the model together.

    table: the completion tokens of the sequences. members: indices of the sequences among all sequences, in the order
    of `table.sequence_N`. group_B: (B,) int32, the group of each sequence, numbered from 0 in the micro-batch. inputs:
    inputs of the blocks, in the form of the layout. routes: None if the sampler has recorded none.
    """

    table: TokenTable
    members: tuple[int, ...]
    group_B: NDArray[np.int32]
    inputs: NamedTuple
    routes: RouteInputs | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences (B)."""
        return len(self.members)

    def sum_B(self, value_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum over the trained tokens of each sequence: (B,) float64."""
        trained = int(np.count_nonzero(self.table.loss_mask_N))  # padding is at the end
        sequence_N = self.table.sequence_N[:trained]
        return np.bincount(sequence_N, value_N[:trained], minlength=self.sequences).astype(np.float64)

    def log_weight_B(self, logp_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log importance weights of sequences from log pi of tokens, sum_t log pi_t - log mu_t: (B,), nats."""
        return self.sum_B(logp_N - self.table.rollout_logp_N)


def scored_only(prompt: Sequence[int], tokens: Sequence[int]) -> TrainingSequence:
    """Return a sequence that is scored but not trained on: weights and sampler log-probabilities are 0."""
    zeros_T = np.zeros(len(tokens), dtype=np.float32)
    return TrainingSequence(
        group=0,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        rollout_logp_T=zeros_T,
        version_T=zeros_T.astype(np.int32),
        advantage_T=zeros_T,
        loss_mask_T=zeros_T,
        loss_weight_T=zeros_T,
    )
