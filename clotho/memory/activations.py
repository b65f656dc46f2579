"""What the backward pass of one micro-batch holds, worked out from the shapes of the model's layers.

Per padded token a block keeps, until its own backward pass: the input of every linear layer that is trained (once
where layers share it), the output of every linear layer, and once more those outputs that do not return to the
residual stream, because what follows them (activation function and gate, norm, rotation) keeps its result as well;
and a row of attention probabilities per head. For a gated MLP of width I in a stream of width D with queries Q and
keys and values K each, that is 4 D + 5 I + 3 Q + 4 K + heads x sequence numbers; and 4 D + 3 I + 3 Q + 3 K + heads x
sequence in float32 on the CPU backend, whose gradients are in closed form (`clotho.cpu`). An adapter is
float32: beside a narrower base each of its layers keeps a float32 copy of its input. DoRA keeps the outputs of its
layers once more, and works on whole weights.

Measured on transformers on the CPU. It is rougher, either way, where much of a block is no linear layer (state
spaces, convolutions), for mixtures of experts, whose sorted copies of tokens are not counted, and on a GPU whose
attention has a fused backward pass, which keeps no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from clotho.cpu import computes_on_host
from clotho.memory.micro_batch import MicroBatchShape
from clotho.models.describe import setting
from clotho.models.lora import LINEAR
from clotho.scoring.head_scores import rows_at_once

TO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "wo", "w2", "fc2")
"""Last names of linear layers whose output is added to the residual stream."""

KEPT_ONCE = ("v_proj", "gate_proj", "up_proj")
"""Last names of linear layers whose output the CPU backend keeps once: what is made of it is not kept, or counted."""

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")
ATTENTION_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")

BACKWARD = 1.5
"""Of the block in its backward pass: what is held beyond what it kept, in multiples of that."""

RECOMPUTED = 3.0
"""The same where blocks keep only their input: what is recomputed is held too, and part of the next block's."""

ONE_PIECE = 5
"""Arrays as large as the logits, in float32, at the fullest moment of a head that runs in one piece."""

PIECES = 10
"""The same, of arrays as large as one piece's, where it runs in many: MLX allocates that far ahead of its work."""

DORA_COPIES = 3
"""Float32 arrays as large as its weight with which a DoRA layer works."""

OVERLAP = 0.25
"""The head's backward pass and the last block's come one after the other; of the smaller, this much falls together."""

FLOAT32 = 4


def kept_per_token(block: nn.Module, *, full: bool, itemsize: int, experts: int) -> int:
    """Bytes that a block with its adapter installed keeps per padded token, attention probabilities apart.

    full: every layer is trained, not only those with an adapter. itemsize: bytes of a number of the computing type.
    experts: that a token goes through.
    """
    modules = dict(block.named_modules())
    kept = 0
    inputs: dict[tuple[Any, ...], int] = {}
    for name, module in modules.items():
        if not isinstance(module, LINEAR):
            continue
        outer = name.rpartition(".")[0]
        adapted = "lora_a" in modules[outer]
        parent, _, last = (outer if adapted else name).rpartition(".")
        copies = experts if isinstance(module, (SwitchLinear, QuantizedSwitchLinear)) else 1
        width_in, width_out = _widths(module)
        returns = last in TO_RESIDUAL
        once = returns or (last in KEPT_ONCE and itemsize == FLOAT32 and computes_on_host())
        kept += copies * width_out * itemsize * (1 if once else 2)
        if adapted and itemsize < FLOAT32:
            kept += copies * width_in * FLOAT32
        elif adapted or full:
            inputs[parent, width_in, returns] = copies * width_in * itemsize
        if adapted and "m" in modules[outer]:
            kept += copies * width_out * itemsize
    return kept + sum(inputs.values())


def dora_bytes(blocks: Sequence[nn.Module]) -> int:
    """Most bytes of weights that DoRA expands, adapts and measures at once."""
    sizes = [0]
    for block in blocks:
        modules = dict(block.named_modules())
        for name, module in modules.items():
            if isinstance(module, LINEAR) and "m" in modules[name.rpartition(".")[0]]:
                width_in, width_out = _widths(module)
                sizes.append(width_in * width_out * FLOAT32)
    return DORA_COPIES * max(sizes)


def experts_per_token(config: dict[str, Any]) -> int:
    """How many experts of a mixture a token goes through; 1 where the configuration names no number."""
    return setting(config, EXPERTS_PER_TOKEN) or 1


def attention_heads(config: dict[str, Any]) -> int:
    """Query heads of a block; 0 where the configuration names no number, as state-space models do."""
    return setting(config, ATTENTION_HEADS) or 0


def activation_bytes(
    kept: Sequence[int], micro: MicroBatchShape, *, residual: int, scores: int, logits: int, checkpointed: bool
) -> int:
    """Most bytes held in a backward pass beside `logits` (of `logits_bytes`): what all blocks keep, the work in one.

    kept: `kept_per_token` of each block that is differentiated through; residual: bytes of the input of a block, per
    token; scores: bytes of the attention probabilities of a block, per pair of query and key.
    """
    probabilities = micro.pairs * scores
    largest = micro.positions * max(kept) + probabilities
    held = micro.positions * (residual * len(kept) if checkpointed else sum(kept))
    if not checkpointed:
        held += probabilities * len(kept)
    work = (RECOMPUTED if checkpointed else BACKWARD) * largest
    return int(held + max(work, logits) + OVERLAP * min(work, logits)) - logits


def logits_bytes(micro: MicroBatchShape, vocabulary: int) -> int:
    """Most bytes of logits, and of what is made of them, at once: of a whole micro-batch, or of pieces of it."""
    rows = rows_at_once(vocabulary)
    copies = ONE_PIECE if micro.scored <= rows else min(PIECES, ONE_PIECE * -(-micro.scored // rows))
    return copies * min(micro.scored, rows) * vocabulary * FLOAT32


def _widths(module: nn.Module) -> tuple[int, int]:
    """Features in and out of a linear layer, packed or not, one expert's in a mixture."""
    if "scales" in module:
        return module.scales.shape[-1] * module.group_size, module.weight.shape[-2]
    return module.weight.shape[-1], module.weight.shape[-2]
