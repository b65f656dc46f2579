"""Blocks of a micro-batch along the routes of the sampler, and how they differ from the learner's own routes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from attachments.router_replay.routes import PassRoutes, can_replay, flipped, install_routes, routed
from clotho.models.experts import Mixtures, recorded_passes
from clotho.models.head import Blocks
from clotho.scoring.sequences import MicroBatch, RouteInputs
from clotho.scoring.teacher_forcing import RouterReplay, Walk


class RoutesOfModel(RouterReplay):
    """The replay of routes in a model of mlx-lm."""

    def __init__(self, model: nn.Module, mixtures: Mixtures) -> None:
        """Let the routers of all loaded models take routes."""
        install_routes()
        self._model, self._mixtures = model, mixtures

    @cached_property
    def is_possible(self) -> bool:
        """Whether the routers take other routes than their own."""
        return can_replay(self._model, self._mixtures)

    def of(self, micro: MicroBatch, given: RouteInputs, walk: Walk) -> MicroBatchRoutes:
        """Return the routes of a micro-batch."""
        return MicroBatchRoutes(self._mixtures, micro, given, walk)


class MicroBatchRoutes:
    """The routes of a micro-batch. Raises ValueError if they are not those of a model with these mixtures."""

    def __init__(self, mixtures: Mixtures, micro: MicroBatch, given: RouteInputs, walk: Walk) -> None:
        """walk: over the blocks in the layout of the micro-batch."""
        if given.table_X_E.shape[1] != mixtures.route_bytes:
            raise ValueError(
                f"a token has a route of {given.table_X_E.shape[1]} bytes, and of {mixtures.route_bytes} in this model"
            )
        self._mixtures, self._micro, self._walk = mixtures, micro, walk
        self._table_X_C = mx.array(given.table_X_E).view(mixtures.dtype)
        self._known_X = mx.array(given.known_X)
        self._passes: list[mx.array] = []  # indices of the routes of each pass, (B, S)

        def index(index_B_S: mx.array, _: object = None) -> mx.array:
            self._passes.append(index_B_S)
            return index_B_S[..., None]

        self._index_N = walk(index, given.inputs)[:, 0][mx.array(micro.table.position_N)]
        self._all_known = bool(given.known_X.all())

    def replaying(self, blocks: Blocks) -> tuple[Blocks, list[mx.array]]:
        """Return the blocks along these routes, and a list that receives what the learner's routers choose."""
        own: list[mx.array] = []
        routes = iter(self._passes)

        def replayed(tokens_B_S: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
            index_B_S = next(routes)
            known_B_S = None if self._all_known else self._known_X[index_B_S]
            with routed(self._mixtures, PassRoutes(self._table_X_C[index_B_S], known_B_S)) as one:
                hidden_B_S_D = blocks(tokens_B_S, cache)
            own.extend(one.own)
            return hidden_B_S_D

        return replayed, own

    def flips(self, own: Sequence[mx.array]) -> mx.array:
        """Return the sums of the metric `flipped_routes`: 1,000 times the number of flips, and layers times tokens.

        A flip is an expert that the learner's router chooses and the sampler's did not. Trained tokens with a route
        count. own: what the routers choose, as `Mixtures.recorded` returns it.
        """
        table = self._micro.table
        passes = recorded_passes(own, len(self._mixtures.counts))
        own_N_C = self._walk(passes, self._micro.inputs)[mx.array(table.position_N)]
        flips_N_L = flipped(own_N_C, self._table_X_C[self._index_N], self._mixtures.per_token)
        weight_N = mx.array(table.loss_mask_N) * self._known_X[self._index_N]
        layers = len(self._mixtures.counts)
        total = mx.sum(mx.sum(flips_N_L, axis=-1) * weight_N)
        return mx.stop_gradient(mx.stack([1000.0 * total, layers * mx.sum(weight_N)]))
