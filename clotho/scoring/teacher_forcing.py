"""Teacher-forced log-probabilities and entropies of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from clotho.extension import Door
from clotho.models.attention import AttentionLayers, install_cache_attention
from clotho.models.experts import Mixtures, expert_load, recorded_passes
from clotho.models.head import Blocks, split_model
from clotho.scoring.layouts.forward import check_layout, hidden_states
from clotho.scoring.sequences import MicroBatch, RouteInputs, TokenTable
from clotho.scoring.token_scores import HeadScores, SampledTokens, SamplingDistribution, Teacher, TokenScores, score
from protocols.errors import ModelError

Walk = Callable[[Blocks, Any], mx.array]
"""Computes what the blocks return for the inputs of a layout, flat: (positions, D)."""


class ReplayedRoutes(Protocol):
    """The routes of a micro-batch."""

    def replaying(self, blocks: Blocks) -> tuple[Blocks, list[mx.array]]:
        """Return the blocks along these routes, and a list that receives what the learner's routers choose."""

    def flips(self, own: Sequence[mx.array]) -> mx.array:
        """Return the sums of the metric `flipped_routes`. own: what the routers choose, by layer, pass by pass."""


class RouterReplay(Protocol):
    """Replays the routes of the sampler in the passes of one model with experts."""

    @property
    def is_possible(self) -> bool:
        """Whether the routers of the model can take the routes of the sampler."""

    def of(self, micro: MicroBatch, given: RouteInputs, walk: Walk) -> ReplayedRoutes:
        """Return the routes of a micro-batch. walk: in its layout. Raises ValueError for those of another model."""


ROUTER_REPLAY: Door[[nn.Module, Mixtures], RouterReplay | None] = Door("library.router_replay")
"""Returns what replays routes in a model with these experts."""


class TeacherForcing:
    """Scores the completion tokens of micro-batches without KV caches.

    The head computes the scored positions only. If blocks and head of a model cannot be separated, the whole model
    computes padded rows. layout: layout of the micro-batches. Dropout samples different masks in each layout.
    """

    layout: str

    def __init__(
        self, model: nn.Module, vocab_size: int, *, layout: str = "padded", checked: TeacherForcing | None = None
    ) -> None:
        """Split the model, and check that the layout does not change its results.

        layout: "padded", "packed", "shared" or "auto". "auto" takes the cheaper of "padded" and "shared" for each
        batch, and becomes "padded" if the model cannot share prompts. checked: of another copy of the model; its layout
        is taken without a second check. Raises ModelError if the model does not support "packed" or "shared".
        """
        install_cache_attention()
        self._model = model
        self._split = split_model(model, vocab_size)
        self._mixtures = Mixtures(model)
        self._replay = ROUTER_REPLAY.first(model, self._mixtures) if self._mixtures else None
        self._head = HeadScores(self._split, vocab_size) if self._split else None
        self._layers: AttentionLayers | None = None
        self.layout = layout
        if checked is not None:
            self.layout, self._layers = checked.layout, checked._layers
        elif layout != "padded":
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
        return self.with_experts(micro, distribution=distribution, logp_only=logp_only)[0]

    def with_experts(
        self, micro: MicroBatch, *, distribution: SamplingDistribution, logp_only: bool = False
    ) -> tuple[TokenScores, dict[str, mx.array]]:
        """Return the scores, and sums of metrics of the experts; none for a model without experts.

        `expert_load`: how many of the trained tokens each expert computes. `flipped_routes`: how many routes differ
        from those of the sampler, if the micro-batch has these.
        """
        output_N_D, metrics = self._outputs(micro)
        draws = sampled_tokens_of(micro.table, distribution)
        if self._head is None:
            return score(output_N_D, draws), metrics
        return self._head(output_N_D, draws, logp_only=logp_only), metrics

    def _outputs(self, micro: MicroBatch) -> tuple[mx.array, dict[str, mx.array]]:
        """Compute what predicts the tokens: hidden states, or logits if the model cannot be split; and the metrics."""
        blocks: Blocks = self._blocks
        given, own = micro.routes, list[mx.array]()
        routes = self._replay.of(micro, given, self._walk) if given and self._replay else None
        if routes and given and given.replays:
            blocks, own = routes.replaying(blocks)
        with self._mixtures.recorded() as chosen:
            output_P_D = self._walk(blocks, micro.inputs)
        metrics = {"expert_load": self._load(micro, chosen)} if chosen else {}
        if routes is not None:
            metrics["flipped_routes"] = routes.flips(own or chosen)
        return output_P_D[mx.array(micro.table.position_N)], metrics

    def _blocks(self, tokens_B_S: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Compute hidden states; logits, (B, S, V), if the model cannot be split, without caches."""
        if self._split is not None:
            return self._split.blocks(tokens_B_S, cache)
        logits_B_S_V: mx.array = self._model(tokens_B_S)
        return logits_B_S_V

    def _walk(self, blocks: Blocks, inputs: NamedTuple) -> mx.array:
        return hidden_states(blocks, self._layers, inputs)

    def _load(self, micro: MicroBatch, chosen: Sequence[mx.array]) -> mx.array:
        """Return the tokens of each expert; see `expert_load`."""
        choices_P_C = self._walk(recorded_passes(chosen, len(self._mixtures.counts)), micro.inputs)
        choices_N_C = choices_P_C[mx.array(micro.table.position_N)]
        return expert_load(choices_N_C, self._mixtures.counts, mx.array(micro.table.loss_mask_N))

    def hidden(self, micro: MicroBatch) -> mx.array:
        """Return the states that predict the table's tokens, (N, D). Raises ModelError if the model is not split."""
        if self._split is None:
            raise ModelError("the blocks and the head of this model cannot be separated")
        return self._outputs(micro)[0]

    @property
    def can_replay(self) -> bool:
        """Whether the model has experts, and its routers can take the routes of the sampler."""
        return self._replay is not None and self._replay.is_possible

    def logits(self, micro: MicroBatch) -> tuple[mx.array, mx.array | None]:
        """Compute the logits that predict the tokens of the table, (N, V), in the type of the model.

        The second result is the sum of the metric `flipped_routes`; None if the micro-batch has no routes.
        """
        output_N_D, metrics = self._outputs(micro)
        logits_N_V = output_N_D if self._split is None else self._split.head(output_N_D)
        return logits_N_V, metrics.get("flipped_routes")


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
