"""Teacher-forced log-probabilities and entropies: what the policy thinks of tokens that were already sampled."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from clotho.models.head import split_model
from clotho.models.layer_keys import AttentionLayers
from clotho.scoring.head_scores import HeadScores
from clotho.scoring.layouts.forward import hidden_states, prove_layout
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.layouts.padded import PaddedInputs
from clotho.scoring.sequences import MicroBatch, TokenTable, scored_only
from clotho.scoring.token_scores import SampledTokens, SamplingDistribution, Teacher, TokenScores, score
from protocols.errors import ModelError


class TeacherForcing:
    """Scores the completion tokens of micro-batches, without caches.

    The head runs at the scored positions only. A model whose blocks cannot be told from its head runs whole, on padded
    rows. layout: the one to build micro-batches with. Dropout draws its own masks in each layout.
    """

    layout: str

    def __init__(self, model: nn.Module, vocab_size: int, *, layout: str = "padded") -> None:
        """Split the model, and prove that the layout changes none of its results.

        layout: "padded", "packed" or "shared"; or "auto", which stays where prompts can be shared (each batch is then
        laid out the cheaper way), and is "padded" elsewhere. Raises ModelError where it cannot be "packed" or "shared".
        """
        self._model = model
        self._split = split_model(model, vocab_size)
        self._head = HeadScores(self._split, vocab_size) if self._split else None
        self._layers: AttentionLayers | None = None
        self._proven = "padded"
        self.layout = layout
        if layout != "padded":
            self._prove("shared" if layout == "auto" else layout, vocab_size)

    def _prove(self, layout: str, vocab_size: int) -> None:
        try:
            self._layers = prove_layout(self._model, self._split, vocab_size, layout=layout)
            self._proven = layout
        except ModelError:
            if self.layout != "auto":
                raise
            self.layout = "padded"

    def __call__(
        self, micro: MicroBatch, *, distribution: SamplingDistribution, logp_only: bool = False
    ) -> TokenScores:
        """Score every token of the table under `distribution`, at its own temperature where the table has one.

        (N,) each, in the order of the table. logp_only: a gradient of log-probabilities follows, and no other.
        """
        position_N, draws = mx.array(micro.table.position_N), sampled_tokens_of(micro.table, distribution)
        if self._split is None or self._head is None:
            return score(self._whole(micro)[position_N], draws)
        hidden_N_D = hidden_states(self._split, self._layers, micro.inputs)[position_N]
        return self._head(hidden_N_D, draws, logp_only=logp_only)

    def _whole(self, micro: MicroBatch) -> mx.array:
        """Logits at all positions, (B * S, V)."""
        if not isinstance(micro.inputs, PaddedInputs):
            raise ValueError(f"this model runs whole, on padded rows, not on {type(micro.inputs).__name__}")
        logits_B_S_V: mx.array = self._model(mx.array(micro.inputs.tokens_B_S))
        return logits_B_S_V.reshape(-1, logits_B_S_V.shape[-1])

    def sequence(
        self, prompt: Sequence[int], tokens: Sequence[int], *, distribution: SamplingDistribution
    ) -> TokenScores:
        """Score the tokens after one prompt, at least one each, in the layout in use ("auto": shared): (T,)."""
        (micro,) = build_micro_batches([scored_only(prompt, tokens)], layout=self._proven, budget=1)
        scores = self(micro, distribution=distribution)
        return TokenScores(scores.logp_N[: len(tokens)], scores.entropy_N[: len(tokens)])


def sampled_tokens_of(table: TokenTable, distribution: SamplingDistribution) -> SampledTokens:
    """The tokens of a table as draws from `distribution`; where all were sampled at its temperature, that is one number."""
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
