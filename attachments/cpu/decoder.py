"""Decoding Llama, Qwen2, Qwen3, Qwen3.5 and Qwen3-Next in NumPy: one token for every row of a batch per step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from attachments.cpu.adapter_segments import Arrangement, LowRanks
from attachments.cpu.attention import DecodeAttention
from attachments.cpu.blas import Floats
from attachments.cpu.blocks import Attention, AttentionCache, Experts, GatedLinear, HostStep, Mixer, StepBuffers
from attachments.cpu.decoder_layers import (
    Projection,
    ProjectionGroup,
    RMSNorm,
    TiedHead,
    WeightMatrix,
    as_numpy,
    cosines_and_sines,
    empty,
)
from attachments.cpu.delta_layer import DeltaLayer, RowState
from attachments.cpu.layers import rope_frequencies
from clotho.inference.rows import RowAdapter
from clotho.models.experts import Mixtures

T = TypeVar("T")


class StepCaches(NamedTuple):
    """What a step reads and writes. layers: caches by block, then that of the routes of a model with experts."""

    attention: DecodeAttention
    layers: list[AttentionCache | RowState]


class DecoderBlock:
    """The layers of one transformer block."""

    def __init__(self, block: Any, name: str) -> None:
        self.before_mixer, self.before_mlp = RMSNorm(block.input_layernorm), RMSNorm(block.post_attention_layernorm)
        self.mixer: Mixer
        if "linear_attn" in block:
            self.mixer = DeltaLayer(block.linear_attn, f"{name}.linear_attn")
        else:
            self.mixer = Attention(block.self_attn, f"{name}.self_attn")
        self.mlp = (Experts if "switch_mlp" in block.mlp else GatedLinear)(block.mlp, f"{name}.mlp")
        self.groups = *self.mixer.groups, *self.mlp.groups
        self.choices = self.mlp.per_token if isinstance(self.mlp, Experts) else 0


def text_part(model: nn.Module) -> tuple[Any, str]:
    """Return the module with embeddings, blocks and head, and what precedes its names."""
    return (model["language_model"], "language_model.") if "language_model" in model else (model, "")


class HostDecoder:
    """Decodes a model that `supported` supports. key_shape: (key heads, size).

    state_shapes: of the arrays that layers with the gated delta rule keep of a row, by layer. depth: number of blocks.
    column_shapes: (heads, size of keys, size of values) of the layers that keep columns. The last ones of a model with
    experts are its routes, in float32. expert_layers: number of layers with experts. route_dtype: of routes elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        text, prefix = text_part(model)
        inner = text.model
        self._blocks = [DecoderBlock(block, f"{prefix}model.layers.{n}") for n, block in enumerate(inner.layers)]
        self._norm = RMSNorm(inner.norm)
        self._embeddings = WeightMatrix(inner.embed_tokens, "weight", transposed=True)
        self._head: ProjectionGroup | TiedHead = TiedHead(self._embeddings, inner.embed_tokens)
        if "lm_head" in text:
            self._head = ProjectionGroup(Projection(text.lm_head, f"{prefix}lm_head"))
        self.depth = len(self._blocks)
        choices = sum(block.choices for block in self._blocks)
        mixtures = Mixtures(model)
        self.expert_layers, self.route_dtype = len(mixtures.counts), np.dtype(f"u{mixtures.dtype.size}")
        self._is_delta = [bool(block.mixer.state_shapes) for block in self._blocks] + [False] * bool(mixtures)
        self.state_shapes = [block.mixer.state_shapes for block in self._blocks if block.mixer.state_shapes]
        attention = next(block.mixer for block in self._blocks if isinstance(block.mixer, Attention))
        self.key_shape: tuple[int, int] = (attention.key_heads, attention.size)
        heads, size = self.key_shape
        self.column_shapes = [(heads, size, size)] * (self.depth - len(self.state_shapes))
        self.column_shapes += [(1, choices, 0)] * bool(mixtures)
        self._repeats = attention.repeats
        rope = next(block.self_attn.rope for block in inner.layers if "self_attn" in block)
        self._frequency_H = as_numpy(rope_frequencies(rope.dims, rope.base)) * np.float32(rope.scale)
        self._buffers: StepBuffers | None = None
        self._arrangement: Arrangement | None = None
        self._arranged_B: Sequence[RowAdapter | None] = ()
        self._matrices: WeakKeyDictionary[RowAdapter, LowRanks] = WeakKeyDictionary()

    def divided(self, layers: Iterable[T]) -> tuple[list[T], list[T]]:
        """Return what belongs to layers of attention, and what belongs to layers with the gated delta rule."""
        found: tuple[list[T], list[T]] = ([], [])
        for is_delta, one in zip(self._is_delta, layers, strict=True):
            found[is_delta].append(one)
        return found

    def joined(self, attention: Iterable[T], delta: Iterable[T]) -> list[T]:
        """Return what belongs to the layers, in their order."""
        kinds = iter(attention), iter(delta)
        return [next(kinds[is_delta]) for is_delta in self._is_delta]

    def query_shape(self, rows: int) -> tuple[int, int, int, int]:
        """Return the shape of the queries of `rows` rows, (K, B, R, D)."""
        heads, size = self.key_shape
        return heads, rows, self._repeats, size

    @contextmanager
    def computing(self, adapter_B: Sequence[RowAdapter | None]) -> Iterator[None]:
        """Decode inside the context: row b uses adapter_B[b]; None for the policy.

        adapter_B is not modified later: the same object stands for the same adapters.
        """
        buffers = self._buffers_for(len(adapter_B))
        if self._arrangement is None or adapter_B is not self._arranged_B:
            key = tuple(0 if adapter is None else adapter.version or -1 for adapter in adapter_B)
            if not any(key):
                self._arrangement = None
            elif self._arrangement is None or self._arrangement.key != key:
                self._arrangement = Arrangement(key, [None if one is None else self._of(one) for one in adapter_B])
            self._arranged_B = adapter_B
        buffers.low_rank.arrangement = self._arrangement
        try:
            yield
        finally:
            buffers.low_rank.arrangement = None

    def _of(self, adapter: RowAdapter) -> LowRanks:
        """Return the matrices of an adapter, by group of layers."""
        found = self._matrices.get(adapter)
        if found is None:
            groups = [group for block in self._blocks for group in block.groups]
            head = [self._head] if isinstance(self._head, ProjectionGroup) else []
            matrices = {group.name: group.of(adapter) for group in (*groups, *head)}
            found = self._matrices[adapter] = {name: one for name, one in matrices.items() if one is not None}
        return found

    def parts(
        self, token_B: NDArray[np.int32], position_B: NDArray[np.int32], caches: StepCaches
    ) -> Generator[None, None, Floats]:
        """Compute the logits, (B, V), in a new array; yields when the adapters are known, and after every block.

        Other steps can be computed where this yields. The keys and values of the tokens are written, and the states of
        rows are updated.
        """
        buffers, self._buffers = self._buffers_for(len(token_B)), None
        arrangement = buffers.low_rank.arrangement
        yield
        buffers.low_rank.arrangement = arrangement
        if arrangement is not None:
            token_B, position_B = arrangement.sorted(token_B), arrangement.sorted(position_B)
        np.take(self._embeddings().array.T, token_B, axis=0, out=buffers.x.array, mode="clip")
        step, choice = HostStep(buffers, caches.attention, cosines_and_sines(position_B, self._frequency_H)), 0
        for block, cache in zip(self._blocks, caches.layers[: self.depth], strict=True):
            with np.errstate(all="ignore"):  # log-probabilities reveal values that are not finite
                block.before_mixer(buffers.x.array, buffers.normed.array)
                block.mixer(step, cache)
                block.before_mlp(buffers.x.array, buffers.normed.array)
                block.mlp(buffers)
            if block.choices:
                expert_B_C = buffers.expert_B_C if arrangement is None else arrangement.by_slot(buffers.expert_B_C)
                routes = caches.layers[-1][0][..., choice : choice + block.choices]
                caches.attention.write(routes, expert_B_C[:, None])
                choice += block.choices
            yield
        with np.errstate(all="ignore"):
            self._norm(buffers.x.array, buffers.normed.array)
            logits_B_V = self._head_logits(buffers)
        buffers.low_rank.arrangement, self._buffers = None, buffers
        return logits_B_V

    def _head_logits(self, buffers: StepBuffers) -> Floats:
        """Compute the logits of `buffers.normed` in the order of the slots."""
        head, arrangement = self._head, buffers.low_rank.arrangement
        sorts_logits = arrangement is not None and arrangement.changes(head.name, by_policy=any(head.own()))
        if arrangement is not None and not sorts_logits:
            buffers.normed.array[:] = arrangement.by_slot(buffers.normed.array)
        logits = empty(len(buffers.x.array), head.outputs)
        head(buffers.normed, (logits,), buffers.low_rank)
        return arrangement.by_slot(logits.array) if arrangement is not None and sorts_logits else logits.array

    def _buffers_for(self, rows: int) -> StepBuffers:
        """Return buffers for `rows` rows; those of the last step if it had the same number."""
        if self._buffers is None or self._buffers.rows != rows:
            self._arrangement = None
            self._buffers = StepBuffers(rows, self._embeddings().array.shape[0])
        return self._buffers
