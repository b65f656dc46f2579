"""Activation memory of the backward pass of one micro-batch, computed from the shapes of the model's layers.

Per padded token, a block keeps these arrays until its own backward pass: the input of every trained linear layer (once
if layers share it); the output of every linear layer; a second copy of outputs that feed an activation, gate, norm or
rotation, because that operation keeps its own result; and a row of attention probabilities per head, unless attention
is computed in blocks of queries (`clotho.models.blocked_attention`), one of which exists at a time. For a gated MLP of
width I, a residual stream of width D, queries of width Q, and keys and values of width K each, that is 4 D + 5 I + 3 Q
+ 4 K + heads * sequence numbers, with norms of queries and keys. On the CPU backend, whose gradients are in closed
form, it is 4 D + 3 I + 3 Q + 3 K + heads * sequence in float32. With a 16-bit base, each layer with magnitudes also
keeps a float32 copy of its input. Such layers keep their outputs once more and compute with whole weights.

A recurrent layer computes a few chunks of all rows again at a time, with arrays that the attachment of the layer
counts.

The constants were fitted to peaks on the CPU, of the architectures in `tests/small_models.py`. On a GPU whose attention
has a fused backward pass, which keeps no probabilities, the estimate is too high.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx_lm.models.switch_layers import SwiGLU

from clotho.backend import backend
from clotho.models.experts import EXPERT_LINEAR
from clotho.models.loading import setting
from clotho.models.lora import LINEAR, widths
from clotho.scoring.token_scores import rows_at_once
from training_run.memory.micro_batch import MicroBatchShape

TO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "wo", "w2", "fc2")
"""Last part of the name of linear layers whose output is added to the residual stream."""

GATES = ("gate_proj", "up_proj", "w1", "w3")
"""Last part of the name of the two linear layers whose outputs a gated MLP multiplies."""

GATE_COPIES = 2
"""Number of arrays of the size of each factor that a product keeps beside its factors, if its gate is not SwiGLU."""

PROBABILITIES_WORK = 2
"""Number of arrays of the size of attention probabilities that a block works with."""

GATE_WORK = 3
"""Number of arrays of the size of each factor that SwiGLU, or the gate of an expert, adds to `BlockBytes.worked`."""

SCAN_COPIES = 2
"""Number of arrays of the size of its convolutions' outputs that a recurrent layer keeps beside its linear layers."""

ATTENTION_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")

BACKWARD = 0.7
"""Working memory of the block in its backward pass, as a multiple of `BlockBytes.worked`."""

RECOMPUTED = 1.3
"""The same with gradient checkpointing, and multiple of what a block with a recurrent layer keeps: part of the next
block's is held too."""

SOFT_CAPPED = 2
"""Number of arrays of scores that a block keeps which computes them itself, with a cap (Gemma 2)."""

LATENT = 1.25
"""The same for attention with latent keys, whose scores of positions are an array of their own."""

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


class BlockBytes(NamedTuple):
    """Bytes of a block per padded token, without attention probabilities.

    kept: for its own backward pass. worked: what its work is proportional to. Copies for norms of what is added to the
    residual stream and for gates other than SwiGLU are kept and do not add to it. Neither do recurrent layers, which
    work at another time.
    """

    kept: int
    worked: int


def block_bytes(block: nn.Module, *, full: bool, itemsize: int, experts: int) -> BlockBytes:
    """Return what a block keeps for its backward pass.

    block: with its adapter installed. full: every layer is trained, not only those with an adapter. itemsize: bytes
    per number of the compute type. experts: number of experts per token.
    """
    modules = dict(block.named_modules())
    norms = [module for name, module in block.items() if "norm" in name]
    copies = sum(norm.weight.size for norm in norms[2:])
    kept = gates = scanned = 0
    recurrent = tuple(f"{name}." for name, module in modules.items() if "A_log" in module)
    inputs: dict[tuple[Any, ...], int] = {}
    for name, module in modules.items():
        if "A_log" in module:
            convolutions = [one for one in module.modules() if isinstance(one, nn.Conv1d)]
            copies += SCAN_COPIES * sum(convolution.weight.shape[0] for convolution in convolutions)
        if not isinstance(module, LINEAR):
            continue
        outer = name.rpartition(".")[0]
        adapted, has_magnitudes = "lora_a" in modules[outer], "m" in modules[outer]
        parent, _, last = (outer if adapted else name).rpartition(".")
        is_expert = isinstance(module, EXPERT_LINEAR)
        times = experts if is_expert else 1
        width_in, width_out = (times * width for width in widths(module))
        outputs = _outputs(last, modules[parent], is_expert=is_expert, itemsize=itemsize)
        if last in GATES and (is_expert or _is_swiglu(modules[parent])):
            gates += GATE_WORK * width_out * itemsize
        elif last in GATES:
            copies += GATE_COPIES * width_out
        kept += outputs * width_out * itemsize
        scanned += outputs * width_out * itemsize if name.startswith(recurrent) else 0
        returns = last in TO_RESIDUAL
        if has_magnitudes and itemsize < FLOAT32:
            kept += width_in * FLOAT32
        elif adapted or full:
            inputs[parent, width_in, returns] = width_in * itemsize
        if has_magnitudes:
            kept += width_out * itemsize
    kept += sum(inputs.values())
    return BlockBytes(kept + copies * itemsize, kept + gates - scanned)


def _outputs(layer: str, parent: nn.Module, *, is_expert: bool, itemsize: int) -> int:
    """Return how many arrays of the size of its output a linear layer leaves to the backward pass."""
    if layer in TO_RESIDUAL:
        return 2 if is_expert else 1  # outputs of experts are sorted by token, then weighted
    if layer in GATES and is_expert and not _is_swiglu(parent):
        return 1 + GATE_COPIES
    if layer in ("q_proj", "k_proj") and not any("norm" in name for name in parent):
        return 1
    return 1 if backend().keeps_once(layer, itemsize) else 2


def _is_swiglu(layer: nn.Module) -> bool:
    """Whether the gate of an MLP, or of experts, is that of Llama, whose gradient has a closed form on the CPU."""
    if "activation" in layer:
        return isinstance(layer.activation, SwiGLU)
    return "swiglu" in vars(sys.modules[type(layer).__module__])


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


def attention_heads(config: dict[str, Any]) -> int:
    """Return the number of query heads; 0 if the configuration has none, as for state-space models."""
    return setting(config, ATTENTION_HEADS) or 0


def activation_bytes(
    blocks: Sequence[BlockBytes],
    scans: Sequence[int],
    micro: MicroBatchShape,
    *,
    residual: int,
    scores: Sequence[int],
    logits: int,
    checkpointed: bool,
    divides: bool,
) -> int:
    """Return the peak bytes of a backward pass without `logits`: what all blocks keep and the work in one block.

    blocks: those with a gradient. scans: bytes that the recurrent layer of each block works with. residual: bytes of a
    block's input per token. scores: bytes of each block's attention probabilities per pair of query and key. logits:
    result of `logits_bytes`. divides: whether the model lets attention of long rows be divided.
    """
    pairs = micro.pairs(divides=divides)
    probabilities = [pairs.whole * one for one in scores]
    kept = [micro.positions * block.kept + own for block, own in zip(blocks, probabilities, strict=True)]
    works = [
        (RECOMPUTED if checkpointed else BACKWARD) * micro.positions * block.worked + PROBABILITIES_WORK * own
        for block, own in zip(blocks, probabilities, strict=True)
    ]
    if checkpointed:
        held = micro.positions * residual * len(blocks)
        work = max(own + one for own, one in zip(kept, works, strict=True))
        scan = max(RECOMPUTED * own + one for own, one in zip(kept, scans, strict=True) if one) if any(scans) else 0
    else:
        held = sum(kept)
        work = max(works)
        scan = max(start + one for start, one in zip(accumulate(kept), scans, strict=True)) - held
    work = max(work, scan) + BLOCK_COPIES * pairs.divided * max(scores)
    return int(held + max(work, logits) + OVERLAP * min(work, logits)) - logits


def logits_bytes(micro: MicroBatchShape, vocabulary: int) -> int:
    """Return the peak bytes of logits and arrays derived from logits, for a whole micro-batch or for its chunks."""
    rows = rows_at_once(vocabulary)
    copies = ONE_PIECE if micro.scored <= rows else min(PIECES, ONE_PIECE * -(-micro.scored // rows))
    return copies * min(micro.scored, rows) * vocabulary * FLOAT32
