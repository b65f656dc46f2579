"""Teacher-forced log-probabilities and entropies of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from clotho.models.attention import AttentionLayers, install_cache_attention
from clotho.models.experts import Mixtures, RecordedPasses, expert_load
from clotho.models.head import split_model
from clotho.scoring.head_scores import HeadScores
from clotho.scoring.layouts.forward import check_layout, hidden_states
from clotho.scoring.layouts.rows import PaddedInputs
from clotho.scoring.sequences import MicroBatch, TokenTable
from clotho.scoring.token_scores import SampledTokens, SamplingDistribution, Teacher, TokenScores, score
from protocols.errors import ModelError


class TeacherForcing:
    """Scores the completion tokens of micro-batches without KV caches.

    The head computes the scored positions only. If blocks and head of a model cannot be separated, the whole model
    computes padded rows. layout: layout of the micro-batches. Dropout samples different masks in each layout.
    """

    layout: str

    def __init__(self, model: nn.Module, vocab_size: int, *, layout: str = "padded") -> None:
        """Split the model, and check that the layout does not change its results.

        layout: "padded", "packed", "shared" or "auto". "auto" takes the cheaper of "padded" and "shared" for each
        batch, and becomes "padded" if the model cannot share prompts. Raises ModelError if the model does not support
        "packed" or "shared".
        """
        install_cache_attention()
        self._model = model
        self._split = split_model(model, vocab_size)
        self._mixtures = Mixtures(model)
        self._head = HeadScores(self._split, vocab_size) if self._split else None
        self._layers: AttentionLayers | None = None
        self.layout = layout
        if layout != "padded":
            self._check("shared" if layout == "auto" else layout, vocab_size)

    def _check(self, layout: str, vocab_size: int) -> None:
        try:
            self._layers = check_layout(self._model, self._split, vocab_size, layout=layout)
        except ModelError:
            if self.layout != "auto":
                raise
            self.layout = "padded"

    def __call__(
        self, micro: MicroBatch, *, distribution: SamplingDistribution, logp_only: bool = False
    ) -> TokenScores:
        """Score every token of the table under `distribution`, at the token's own temperature if the table has one.

        Scores have shape (N,), in the order of the table. logp_only: only log-probabilities will be differentiated.
        """
        return self.with_load(micro, distribution=distribution, logp_only=logp_only)[0]

    def with_load(
        self, micro: MicroBatch, *, distribution: SamplingDistribution, logp_only: bool = False
    ) -> tuple[TokenScores, mx.array | None]:
        """Return the scores, and how many of the trained tokens each expert computes (`expert_load`).

        None for a model without experts.
        """
        draws = sampled_tokens_of(micro.table, distribution)
        with self._mixtures.recorded() as chosen:
            if self._split is None or self._head is None:
                scores = score(self._whole(micro)[mx.array(micro.table.position_N)], draws)
            else:
                scores = self._head(self.hidden(micro), draws, logp_only=logp_only)
        return scores, self._load(micro, chosen) if chosen else None

    def _load(self, micro: MicroBatch, chosen: Sequence[mx.array]) -> mx.array:
        """Return the tokens of each expert; see `expert_load`."""
        passes = RecordedPasses(chosen, len(self._mixtures.counts))
        choices_P_C = hidden_states(passes, self._layers, micro.inputs)
        choices_N_C = choices_P_C[mx.array(micro.table.position_N)]
        return expert_load(choices_N_C, self._mixtures.counts, mx.array(micro.table.loss_mask_N))

    def hidden(self, micro: MicroBatch) -> mx.array:
        """Compute the hidden states that predict the tokens of the table, (N, D), in the type of the model.

        Raises ModelError if blocks and head of the model cannot be separated.
        """
        if self._split is None:
            raise ModelError("the blocks and the head of this model cannot be separated")
        return hidden_states(self._split, self._layers, micro.inputs)[mx.array(micro.table.position_N)]

    def logits(self, micro: MicroBatch) -> mx.array:
        """Compute the logits that predict the tokens of the table, (N, V), in the type of the model."""
        if self._split is None:
            return self._whole(micro)[mx.array(micro.table.position_N)]
        return self._split.head(self.hidden(micro))

    def _whole(self, micro: MicroBatch) -> mx.array:
        """Compute the logits at all positions, (B * S, V)."""
        if not isinstance(micro.inputs, PaddedInputs):
            raise ValueError(f"a model that cannot be split needs padded rows, not {type(micro.inputs).__name__}")
        logits_B_S_V: mx.array = self._model(mx.array(micro.inputs.tokens_B_S))
        return logits_B_S_V.reshape(-1, logits_B_S_V.shape[-1])


def sampled_tokens_of(table: TokenTable, distribution: SamplingDistribution) -> SampledTokens:
    """Return the tokens of a table as samples from `distribution`; equal temperatures become one number."""
    temperature_N = None
    if table.temperature_N is not None:
        own_N = np.where(table.temperature_N > 0, table.temperature_N, np.float32(distribution.temperature))
        temperature_N = None if (own_N == np.float32(distribution.temperature)).all() else mx.array(own_N)
    return SampledTokens(
        target_N=mx.array(table.target_N),
        support_N_K=None if table.support_N_K is None else mx.array(table.support_N_K),
        distribution=distribution,
        temperature_N=temperature_N,
        teacher=None if table.teacher is None else Teacher(*map(mx.array, table.teacher)),
    )
