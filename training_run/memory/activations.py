"""Activation memory of the backward pass of one micro-batch, computed from the shapes of the model's layers.

Per padded token, a block keeps these arrays until its own backward pass: the input of every trained linear layer (once
if layers share it); the output of every linear layer; a second copy of outputs that feed an activation, gate, norm or
rotation, because that operation keeps its own result; and a row of attention probabilities per head, unless attention
is computed in blocks of queries (`clotho.models.blocked_attention`), one of which exists at a time. For a gated MLP of
width I, a residual stream of width D, queries of width Q, and keys and values of width K each, that is
4 D + 5 I + 3 Q + 4 K + heads * sequence numbers. On the CPU backend, whose gradients are in closed form, it is 4 D +
3 I + 3 Q + 3 K + heads * sequence in float32. With a 16-bit base, each layer with magnitudes also keeps a float32 copy
of its input. Such layers keep their outputs once more and compute with whole weights.

The formula was measured on transformers on the CPU. It is less accurate, in both directions, for blocks that are mostly
not linear layers (state-space models, convolutions), for mixtures of experts, whose sorted copies of tokens are not
counted, and on a GPU whose attention has a fused backward pass, which keeps no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from clotho.backend import backend
from clotho.models.loading import setting
from clotho.models.lora import LINEAR, widths
from clotho.scoring.head_scores import rows_at_once
from training_run.memory.micro_batch import MicroBatchShape

TO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "wo", "w2", "fc2")
"""Last part of the name of linear layers whose output is added to the residual stream."""

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")
ATTENTION_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")

BACKWARD = 1.5
"""Working memory of the block in its backward pass, as a multiple of what it kept."""

RECOMPUTED = 3.0
"""The same with gradient checkpointing: the recomputed arrays are held too, and part of the next block's."""

BLOCK_COPIES = 8
"""Peak number of arrays of the size of the scores of a block of queries."""

ONE_PIECE = 5
"""Peak number of float32 arrays of the size of the logits, if the output head computes all rows at once."""

PIECES = 10
"""Peak number of arrays of the size of one chunk, if the head computes chunks: MLX allocates buffers in advance."""

MAGNITUDE_COPIES = 3
"""Number of float32 arrays of the size of its weight that a layer with magnitudes computes with."""

OVERLAP = 0.25
"""Share of the smaller of the head's and the last block's backward pass that overlaps with the larger one."""

FLOAT32 = 4


def kept_per_token(block: nn.Module, *, full: bool, itemsize: int, experts: int) -> int:
    """Return the bytes that a block keeps per padded token, without attention probabilities.

    block: with its adapter installed. full: every layer is trained, not only those with an adapter. itemsize: bytes
    per number of the compute type. experts: number of experts per token.
    """
    modules = dict(block.named_modules())
    kept = 0
    inputs: dict[tuple[Any, ...], int] = {}
    for name, module in modules.items():
        if not isinstance(module, LINEAR):
            continue
        outer = name.rpartition(".")[0]
        adapted, has_magnitudes = "lora_a" in modules[outer], "m" in modules[outer]
        parent, _, last = (outer if adapted else name).rpartition(".")
        copies = experts if isinstance(module, (SwitchLinear, QuantizedSwitchLinear)) else 1
        width_in, width_out = widths(module)
        returns = last in TO_RESIDUAL
        once = returns or backend().keeps_once(last, itemsize)
        kept += copies * width_out * itemsize * (1 if once else 2)
        if has_magnitudes and itemsize < FLOAT32:
            kept += copies * width_in * FLOAT32
        elif adapted or full:
            inputs[parent, width_in, returns] = copies * width_in * itemsize
        if has_magnitudes:
            kept += copies * width_out * itemsize
    return kept + sum(inputs.values())


def magnitude_bytes(blocks: Sequence[nn.Module]) -> int:
    """Return the largest number of bytes of weights that a layer with magnitudes computes with at once."""
    sizes = [0]
    for block in blocks:
        modules = dict(block.named_modules())
        for name, module in modules.items():
            if isinstance(module, LINEAR) and "m" in modules[name.rpartition(".")[0]]:
                width_in, width_out = widths(module)
                sizes.append(width_in * width_out * FLOAT32)
    return MAGNITUDE_COPIES * max(sizes)


def experts_per_token(config: dict[str, Any]) -> int:
    """Return the number of experts per token; 1 if the configuration has none."""
    return setting(config, EXPERTS_PER_TOKEN) or 1


def attention_heads(config: dict[str, Any]) -> int:
    """Return the number of query heads; 0 if the configuration has none, as for state-space models."""
    return setting(config, ATTENTION_HEADS) or 0


def activation_bytes(
    kept: Sequence[int],
    micro: MicroBatchShape,
    *,
    residual: int,
    scores: int,
    logits: int,
    checkpointed: bool,
    divides: bool,
) -> int:
    """Return the peak bytes of a backward pass without `logits`: what all blocks keep and the work in one block.

    kept: `kept_per_token` of each block with a gradient. residual: bytes of a block's input per token. scores: bytes
    of a block's attention probabilities per pair of query and key. logits: result of `logits_bytes`. divides: whether
    the model lets attention of long rows be divided.
    """
    pairs = micro.pairs(divides=divides)
    probabilities = pairs.whole * scores
    largest = micro.positions * max(kept) + probabilities
    held = micro.positions * (residual * len(kept) if checkpointed else sum(kept))
    if not checkpointed:
        held += probabilities * len(kept)
    work = (RECOMPUTED if checkpointed else BACKWARD) * largest + BLOCK_COPIES * pairs.divided * scores
    return int(held + max(work, logits) + OVERLAP * min(work, logits)) - logits


def logits_bytes(micro: MicroBatchShape, vocabulary: int) -> int:
    """Return the peak bytes of logits and arrays derived from logits, for a whole micro-batch or for its chunks."""
    rows = rows_at_once(vocabulary)
    copies = ONE_PIECE if micro.scored <= rows else min(PIECES, ONE_PIECE * -(-micro.scored // rows))
    return copies * min(micro.scored, rows) * vocabulary * FLOAT32
