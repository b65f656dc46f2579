"""Prefill on the host: the KV caches and states of prompts, computed with the decoder of the rows.

MLX limits the operations that all threads together have queued, so a prompt that MLX prefills waits for the operations
of a learner. This prefill uses no MLX graph: it waits for nothing but the cores.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from copy import deepcopy
from itertools import islice

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.cpu.attention import VerifyAttention
from attachments.cpu.blocks import AttentionCache
from attachments.cpu.decoder import HostDecoder, StepCaches
from attachments.cpu.decoder_layers import as_numpy
from attachments.cpu.delta_layer import RowStates
from attachments.cpu.layers import MASKED_SCORE
from clotho.inference.cache_layout import CacheLayout, pass_context
from clotho.inference.prefill import PrefillBatch
from clotho.inference.rows import DraftedTokens, PromptState
from clotho.inference.scheduler import PrefillJob
from clotho.models.turns import UNDIVIDED, TurnBudget

MAX_SCORES = 2**24
"""Maximum number of scores of a layer in one pass, as 64 MiB."""


class HostPrompts:
    """KV caches and states of prompts that are prefilled together. Each begins in the first column.

    Axes: B prompts, K key heads, C columns, D size, T tokens of a pass.
    """

    def __init__(self, decoder: HostDecoder, rows: int, tokens: int) -> None:
        """tokens: maximum number of tokens of a prompt."""
        self._decoder, self._rows, self._tokens = decoder, rows, tokens
        self._states = RowStates(decoder.state_shapes, rows)
        self._arrays = tuple(
            tuple(mx.array(np.zeros((rows, heads, tokens, size), np.float32)) for size in sizes)
            for heads, *sizes in decoder.column_shapes
        )
        self._layers = [(as_numpy(keys), as_numpy(values)) for keys, values in self._arrays]

    def restore(self, row: int, state: PromptState, tokens: int) -> None:
        """Begin a prompt with the first `tokens` tokens of a state, which has no more if it cannot be truncated."""
        attention, delta = self._decoder.divided(state)
        self._states.put([row], delta)
        for layer, arrays in zip(self._layers, attention, strict=True):
            for held_B_K_C_D, array in zip(layer, arrays, strict=True):
                held_B_K_C_D[row, :, :tokens] = as_numpy(array)[0, :, :tokens]

    def most(self, end: int) -> int:
        """Return how many tokens of every prompt a pass that ends before column `end` computes at most."""
        _, rows, repeats, _ = self._decoder.query_shape(self._rows)
        return max(1, MAX_SCORES // (self._decoder.key_shape[0] * rows * repeats * end))

    def parts(self, token_B_T: NDArray[np.int32], start: int) -> Generator[None, None, None]:
        """Append T tokens to the first `start` of every prompt.

        Yields when the adapters in use are known, one per token, and after every block. Until the end, the prompts have
        only the first tokens, so that the pass can begin again.
        """
        (B, T), decoder = token_B_T.shape, self._decoder
        stop = start + T
        index_T = np.arange(T)
        tokens = DraftedTokens(token_B_T.ravel(), np.repeat(np.arange(B), T), np.tile(index_T, B), np.full(B, T))
        mask_T_C = np.where(np.arange(stop) > start + index_T[:, None], np.float32(MASKED_SCORE), np.float32(0.0))
        attention = VerifyAttention(
            decoder.query_shape(B),
            tokens,
            shared=[],
            columns=stop,
            start_B=np.full(B, start),
            mask_B_T_S=mask_T_C[None],
        )
        views = [
            AttentionCache(keys[:, :, :stop].swapaxes(0, 1), values[:, :, :stop].swapaxes(0, 1), {})
            for keys, values in self._layers
        ]
        states = deepcopy(self._states)
        caches = StepCaches(attention, decoder.joined(views, states.layers))
        position_N = (start + tokens.index_N).astype(np.int32)
        yield from islice(decoder.parts(tokens.token_N, position_N, caches), 1 + decoder.depth)  # without the head
        self._states = states

    def state(self, row: int, tokens: int) -> PromptState:
        """Return the cache of the first `tokens` tokens of a prompt: a copy, unless that is all there is."""
        layers: Sequence[tuple[mx.array, ...]] = self._arrays
        if (self._rows, self._tokens) != (1, tokens):
            layers = [
                tuple(mx.array(np.ascontiguousarray(held[row : row + 1, :, :tokens])) for held in layer)
                for layer in self._layers
            ]
        return tuple(self._decoder.joined(layers, self._states.of(row)))


class HostPrefillBatch(PrefillBatch):
    """Prompts of clients that are prefilled on the host, which waits for no operation of a learner."""

    on_host = True

    def __init__(
        self,
        decoder: HostDecoder,
        layout: CacheLayout,
        jobs: Sequence[PrefillJob],
        turns: TurnBudget | None,
        version: int,
    ) -> None:
        self._decoder, self._count = decoder, 0
        super().__init__(layout, jobs, turns, version, computing=decoder.computing)

    def _restore(self) -> None:
        """Begin with what all jobs have computed."""
        self._caches = HostPrompts(self._decoder, len(self.jobs), self._length)
        for row, job in enumerate(self.jobs):
            if self._done and job.state is not None:
                self._caches.restore(row, job.state, self._done)

    def _most(self, budget: int) -> int:
        """Return how many tokens of each prompt the next chunk has at most."""
        return min(super()._most(budget), self._caches.most(self._length))

    def weights_changed(self, kinds: Collection[int]) -> None:
        """Record a swap of these kinds of weights. A chunk in progress begins again, so that it has those of one."""
        super().weights_changed(kinds)
        if self._parts is not None and any(key[0] in kinds for key in self.keys):
            self._parts = None
            self._done -= self._count

    def _start(self, count: int) -> None:
        parts = self._caches.parts(self._token_B_T[:, self._done : self._done + count], self._done)
        with pass_context(self._computing, [job.active.adapter for job in self.jobs for _ in range(count)]):
            next(parts)
        self._done += count
        self._count, self._parts = count, (self._turns or UNDIVIDED).limited(parts)

    def finish(self) -> None:
        """Set the state of each job."""
        for row, job in enumerate(self.jobs):
            tokens = len(job.tokens) - 1
            job.computed, job.state_tokens, job.state = True, tokens, self._caches.state(row, tokens)
