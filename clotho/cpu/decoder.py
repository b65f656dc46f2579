"""One token for every row of a plain pre-norm transformer: Llama's, Qwen2's and Qwen3's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from clotho.cpu.blas import Floats, Matrix, matrix, multiply
from clotho.cpu.decode_attention import StepAttention
from clotho.cpu.layers_host import Norm, Projection, Vector, Weights, gate, inverse_rms, seen
from clotho.cpu.rotation import frequencies


class Layers(NamedTuple):
    """What rows hold, layer by layer: columns (K, B, C, D), the last one still to be written, and prompts by place."""

    attention: StepAttention
    columns: list[tuple[Floats, Floats]]
    prompts: list[dict[int, tuple[Floats, Floats]]]


class Room(NamedTuple):
    """Buffers of a step of B rows, used by one block after the other.

    joint: queries, keys and values of all heads; parts: each of the three, where they lie in it. narrow: by rank.
    """

    x: Matrix
    normed: Matrix
    joint: Matrix
    parts: list[Matrix]
    attended: Matrix
    gate: Matrix
    up: Matrix
    narrow: dict[int, Matrix]
    spare_B_F: Floats


class Block:
    """One block's layers."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.heads, self.key_heads = attention.n_heads, attention.n_kv_heads
        self.before_attention, self.before_mlp = Norm(block.input_layernorm), Norm(block.post_attention_layernorm)
        self.into_heads = [Projection(attention[name]) for name in ("q_proj", "k_proj", "v_proj")]
        self.out_of_heads = Projection(attention.o_proj)
        self.gate, self.up, self.down = (Projection(mlp[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        self.scale = np.float32(attention.scale)
        self.head_norm: Vector | None = None
        if "q_norm" in attention:
            parts = ((attention.q_norm, "weight", self.heads), (attention.k_norm, "weight", self.key_heads))
            self.head_norm, self.eps = Vector(*parts), float(attention.q_norm.eps)

    @property
    def ranks(self) -> set[int]:
        """Of the adapters of its layers; 0 where there is none."""
        layers = (*self.into_heads, self.out_of_heads, self.gate, self.up, self.down)
        return {one.rank for one in layers}


class HostDecoder:
    """A model of which `fits` says that it is made of such blocks. key_shape: (key heads, size). depth: blocks."""

    def __init__(self, model: nn.Module) -> None:
        inner: Any = model.model
        self._blocks = [Block(block) for block in inner.layers]
        self._norm = Norm(inner.norm)
        self._embeddings = Weights(inner.embed_tokens, "weight", transposed=True)
        self._head = Projection(model.lm_head) if "lm_head" in model else Tied(self._embeddings, inner.embed_tokens)
        attention = inner.layers[0].self_attn
        rope: Any = attention.rope
        self._frequency_H = seen(frequencies(rope.dims, rope.base)) * np.float32(rope.scale)
        self.depth = len(self._blocks)
        self.key_shape: tuple[int, int] = (attention.n_kv_heads, rope.dims)
        self._repeats = attention.n_heads // attention.n_kv_heads
        self._ranks = {self._head.rank, *(rank for block in self._blocks for rank in block.ranks)} - {0}
        self._room: Room | None = None

    def queries(self, rows: int) -> tuple[int, int, int, int]:
        """(K, B, R, D) for so many rows."""
        heads, size = self.key_shape
        return heads, rows, self._repeats, size

    def logits(self, token_B: NDArray[np.int32], position_B: NDArray[np.int32], layers: Layers) -> Floats:
        """Compute (B, V), written nowhere else; the newest keys and values go into the last of the columns."""
        room = self._made_room(len(token_B))
        np.take(self._embeddings().array.T, token_B, axis=0, out=room.x.array, mode="clip")
        angle_B_1_H = (position_B.astype(np.float32)[:, None] * self._frequency_H)[:, None]
        turn = np.cos(angle_B_1_H), np.sin(angle_B_1_H)
        with np.errstate(all="ignore"):  # what is not finite shows in the log-probabilities
            for block, columns, prompts in zip(self._blocks, layers.columns, layers.prompts, strict=True):
                self._attend(block, room, turn, layers.attention, columns, prompts)
                block.before_mlp(room.x.array, room.normed.array)
                block.gate(room.normed, room.gate, room.narrow)
                block.up(room.normed, room.up, room.narrow)
                gate(room.gate.array, room.up.array, room.spare_B_F)
                block.down(room.gate, room.x, room.narrow, add=True)
            self._norm(room.x.array, room.normed.array)
            logits = _empty(len(token_B), self._head.outputs)
            self._head(room.normed, logits, room.narrow)
        return logits.array

    def _attend(
        self,
        block: Block,
        room: Room,
        turn: tuple[Floats, Floats],
        attention: StepAttention,
        columns: tuple[Floats, Floats],
        prompts: dict[int, tuple[Floats, Floats]],
    ) -> None:
        """Add to the rows what a block's attention gives."""
        B, (K, D), R = len(room.x.array), self.key_shape, self._repeats
        block.before_attention(room.x.array, room.normed.array)
        for projection, part in zip(block.into_heads, room.parts, strict=True):
            projection(room.normed, part, room.narrow)
        heads_B_N_D = room.joint.array.reshape(B, -1, D)
        turned_B_N_D = heads_B_N_D[:, : block.heads + K]
        if block.head_norm is not None:
            turned_B_N_D *= inverse_rms(turned_B_N_D, block.eps)
            turned_B_N_D *= block.head_norm()
        rotate(turned_B_N_D, *turn)
        queries_B_K_R_D = heads_B_N_D[:, : block.heads].reshape(B, K, R, D)
        np.multiply(queries_B_K_R_D.transpose(1, 0, 2, 3), block.scale, out=attention.query_K_B_R_D)
        keys, values = columns
        keys[:, :, -1] = heads_B_N_D[:, block.heads : block.heads + K].transpose(1, 0, 2)
        values[:, :, -1] = heads_B_N_D[:, block.heads + K :].transpose(1, 0, 2)
        summed_K_B_R_D, weight_K_B_R_1 = attention.attend(keys, values, prompts)
        attended_B_K_R_D = room.attended.array.reshape(B, K, R, D)
        np.divide(summed_K_B_R_D, weight_K_B_R_1, out=attended_B_K_R_D.transpose(1, 0, 2, 3))
        block.out_of_heads(room.attended, room.x, room.narrow, add=True)

    def _made_room(self, rows: int) -> Room:
        """Buffers for so many rows; those of the last step, if it had as many."""
        if self._room is None or len(self._room.x.array) != rows:
            block = self._blocks[0]
            width, inner = self._embeddings().array.shape[0], block.gate.outputs
            starts = np.cumsum([0, *(one.outputs for one in block.into_heads)]).tolist()
            joint = _empty(rows, starts[-1])
            self._room = Room(
                x=_empty(rows, width),
                normed=_empty(rows, width),
                joint=joint,
                parts=[matrix(joint.array[:, start:stop]) for start, stop in pairwise(starts)],
                attended=_empty(rows, block.heads * self.key_shape[1]),
                gate=_empty(rows, inner),
                up=_empty(rows, inner),
                narrow={rank: _empty(rows, rank) for rank in self._ranks},
                spare_B_F=np.empty((rows, inner), np.float32),
            )
        return self._room


class Tied:
    """A head that is the embeddings."""

    rank = 0

    def __init__(self, embeddings: Weights, module: Any) -> None:
        self._embeddings, self.outputs = embeddings, int(module.weight.shape[0])

    def __call__(self, x: Matrix, out: Matrix, narrow: Mapping[int, Matrix]) -> None:
        """Write the logits."""
        multiply(x, self._embeddings(), out)


def rotate(x_B_N_D: Floats, cosine_B_1_H: Floats, sine_B_1_H: Floats) -> None:
    """Rotate heads by halves, in place; H is half of D (RoFormer, arXiv:2104.09864, section 3.2.2)."""
    half = x_B_N_D.shape[-1] // 2
    first, second = x_B_N_D[..., :half], x_B_N_D[..., half:]
    crossed_first, crossed_second = second * sine_B_1_H, first * sine_B_1_H
    x_B_N_D *= np.concatenate([cosine_B_1_H, cosine_B_1_H], axis=-1)
    first -= crossed_first
    second += crossed_second


def _empty(rows: int, columns: int) -> Matrix:
    return matrix(np.empty((rows, columns), np.float32))
