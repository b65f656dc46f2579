"""Blocks of Qwen3 with one kernel for the sum after attention and the norm before the MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3, qwen3_moe

from attachments.metal.add_norm import add_norm, eps_of
from clotho.inference.kv_cache import LayerKVCache


class _AddsAndNorms:
    """Computes decode steps of a `LayerKVCache` itself; sequences and other caches are left to mlx-lm."""

    eps: mx.array

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Compute a block. Arguments are mlx-lm's."""
        block: Any = self
        norm = block.post_attention_layernorm
        if x.shape[1] > 1 or not isinstance(cache, LayerKVCache) or x.dtype != norm.weight.dtype:
            y: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]  # of mlx-lm's class
            return y
        attended = block.self_attn(block.input_layernorm(x), mask, cache)
        h, normed = add_norm(norm, self.eps, x, attended)
        out: mx.array = h + block.mlp(normed)
        return out


class FusedBlock(_AddsAndNorms, qwen3.TransformerBlock):
    """A block of Qwen3."""


class FusedMoeBlock(_AddsAndNorms, qwen3_moe.Qwen3MoeDecoderLayer):
    """A block of Qwen3 with experts."""


BLOCKS: dict[type, type] = {qwen3.TransformerBlock: FusedBlock, qwen3_moe.Qwen3MoeDecoderLayer: FusedMoeBlock}


def fusible_blocks(model: nn.Module) -> list[Any]:
    """Return the blocks whose sum and norm the kernel computes."""
    blocks: list[Any] = [module for module in model.modules() if type(module) in BLOCKS]
    norms = [block.post_attention_layernorm for block in blocks]
    return [
        block
        for block, norm in zip(blocks, norms, strict=True)
        if type(norm) is nn.RMSNorm and not norm.trainable_parameters()
    ]


def install_blocks(blocks: Sequence[Any]) -> None:
    """Replace the class of blocks; modules stay the same objects."""
    for block in blocks:
        block.__class__ = BLOCKS[type(block)]
        object.__setattr__(block, "eps", eps_of(block.post_attention_layernorm))  # no parameter of the model
        mx.eval(block.eps)
