"""One token for every row of a plain pre-norm transformer: Llama's, Qwen2's and Qwen3's blocks.

The layers of a transformer over buffers on the host. Their parameters are MLX's: they are looked up at every use.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from clotho.cpu.attention import frequencies
from clotho.cpu.blas import Floats, Matrix, matrix, multiply
from clotho.cpu.decode_attention import StepAttention


def seen(array: mx.array) -> Floats:
    """The values of an evaluated float32 array, where they lie."""
    return np.array(array, copy=False)


class Weights:
    """A matrix among a module's parameters, (inputs, outputs). It follows the module when weights are swapped."""

    def __init__(self, module: nn.Module, key: str, *, transposed: bool) -> None:
        """transposed: the module holds it as (outputs, inputs)."""
        self._module: dict[str, Any] = module
        self._key, self._transposed = key, transposed
        self._array: mx.array | None = None
        self._matrix: Matrix | None = None

    def __call__(self) -> Matrix:
        """The matrix as it is now."""
        array = self._module[self._key]
        if array is not self._array or self._matrix is None:
            values = seen(array)
            self._array, self._matrix = array, matrix(values.T if self._transposed else values)
        return self._matrix


class Vector:
    """One-dimensional parameters of modules, one after the other, each repeated; they follow their modules too."""

    def __init__(self, *parts: tuple[nn.Module, str, int]) -> None:
        """parts: module, key, and how often its parameter comes."""
        self._parts: tuple[tuple[dict[str, Any], str, int], ...] = parts
        self._arrays: list[mx.array] = []
        self._values: Floats = np.zeros(0, np.float32)

    def __call__(self) -> Floats:
        """The parameters as they are now, (repeats, size)."""
        arrays = [module[key] for module, key, _ in self._parts]
        if len(arrays) != len(self._arrays) or any(a is not b for a, b in zip(arrays, self._arrays, strict=True)):
            times = [times for _, _, times in self._parts]
            rows = [np.tile(seen(array), (n, 1)) for array, n in zip(arrays, times, strict=True)]
            self._arrays, self._values = arrays, np.concatenate(rows)
        return self._values


class Projection:
    """A linear layer, y = x W + b, with an adapter's low-rank term if it has one, scale (x A) B."""

    def __init__(self, layer: nn.Module) -> None:
        """layer: an `nn.Linear`, or a `LoRALinear` over one."""
        base: Any = layer
        self._scale, self.rank = 0.0, 0
        if isinstance(layer, LoRALinear):
            base = layer.linear
            self._scale, self.rank = float(layer.scale), layer.lora_a.shape[1]
            self._a = Weights(layer, "lora_a", transposed=False)
            self._b = Weights(layer, "lora_b", transposed=False)
        self._weights = Weights(base, "weight", transposed=True)
        self._bias = Vector((base, "bias", 1)) if "bias" in base else None
        self.outputs: int = base.weight.shape[0]

    def __call__(self, x: Matrix, out: Matrix, narrow: Mapping[int, Matrix], *, add: bool = False) -> None:
        """Write y of x into `out`, or add it to what is there. narrow: room for x A, by rank."""
        if self._bias is not None:
            np.add(out.array if add else 0.0, self._bias(), out=out.array)
            add = True
        multiply(x, self._weights(), out, add=add)
        if self.rank:
            multiply(x, self._a(), narrow[self.rank])
            multiply(narrow[self.rank], self._b(), out, scale=self._scale, add=True)


class Norm:
    """x / rms(x) * weight over the last axis."""

    def __init__(self, module: nn.Module) -> None:
        """module: an `nn.RMSNorm`."""
        self._weight, self.eps = Vector((module, "weight", 1)), float(module.eps)

    def __call__(self, x_B_W: Floats, out_B_W: Floats) -> None:
        """Write the norm of x into `out`."""
        np.multiply(x_B_W, inverse_rms(x_B_W, self.eps), out=out_B_W)
        out_B_W *= self._weight()


def inverse_rms(x: Floats, eps: float) -> Floats:
    """1 / sqrt(mean of squares + eps) over the last axis, which stays with size 1."""
    squares: Floats = np.vecdot(x, x)[..., None]
    squares *= np.float32(1.0 / x.shape[-1])
    squares += np.float32(eps)
    np.sqrt(squares, out=squares)
    np.divide(np.float32(1.0), squares, out=squares)
    return squares


def gate(gate: Floats, up: Floats, spare: Floats) -> None:
    """Replace `gate` by silu(gate) * up; `spare` is room of the same shape."""
    np.negative(gate, out=spare)
    np.exp(spare, out=spare)
    spare += 1.0
    np.divide(gate, spare, out=gate)
    gate *= up


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
