"""The parts of a memory estimate for display, and the refusal of a run that cannot fit."""

from __future__ import annotations

from protocols.errors import ProfileError
from protocols.summary import MemoryEstimate, MemoryPart

GIB = 2**30

ADAPTER = "policy.method.rank, policy.method.num_layers, or policy.method = lora"
PARTS = (
    ("base", "base weights", "model.path (a smaller or quantized model), model.dtype, model.dequantize = false"),
    ("trained", "trained weights", ADAPTER),
    ("optimizer", "optimizer state", f"{ADAPTER}; learner.optimizer = adafactor, lion or sgd"),
    (
        "reference",
        "reference weights",
        "learner.kl_penalty = none, learner.kl_penalty.reference = base, or policy.method = lora",
    ),
    ("rollback", "weights for rollbacks", f"collapse_detection = stop; {ADAPTER}"),
    (
        "midway",
        "weights between optimizer steps",
        f"learner.num_minibatches = 1 with learner.update_epochs = 1; {ADAPTER}",
    ),
    ("caches", "KV caches", "engine.kv_cache_tokens, engine.max_num_seqs, sampling.max_tokens"),
    ("prefixes", "prefix cache", "engine.prefix_cache_tokens"),
    ("gradients", "gradients", ADAPTER),
    ("activations", "activations", "learner.micro_batch_tokens, or policy.grad_checkpoint = true"),
    ("logits", "logits", "learner.micro_batch_tokens, sampling.max_tokens"),
    ("update", "optimizer step", f"{ADAPTER}; learner.optimizer = adafactor, lion or sgd"),
    ("decode", "decode step", "engine.max_num_seqs"),
    ("margin", "temporary arrays", "learner.micro_batch_tokens, or engine.max_num_seqs"),
)
"""Field of `MemoryEstimate`, its displayed name, and the settings that make it smaller."""

ALWAYS_HELD = ("base", "trained", "optimizer", "reference", "rollback", "midway")
"""Parts that are held at any time, whatever the length of completions."""


def describe(estimate: MemoryEstimate) -> list[MemoryPart]:
    """Return every part that is not empty, in the order of the fields.

    The parts may add up to more than `estimate.total`, because backward pass, optimizer step and decode step alternate.
    """
    return [
        MemoryPart(component=component, bytes=getattr(estimate, name), change=change)
        for name, component, change in PARTS
        if getattr(estimate, name)
    ]


def too_large(estimate: MemoryEstimate, memory_bytes: int) -> ProfileError | None:
    """Return the refusal of a run that cannot fit into `memory_bytes`; None if it may fit.

    A run that fits with the cache of one sequence may fit: how many tokens its caches hold depends on how long
    completions get. The message names the largest part that every run needs and the settings that make it smaller.
    """
    if estimate.minimum <= memory_bytes:
        return None
    turns = {
        ("gradients", "activations", "logits"): estimate.gradients + estimate.activations + estimate.logits,
        ("update",): estimate.update,
        ("decode",): estimate.decode,
    }
    needed = {*ALWAYS_HELD, *max(turns, key=lambda names: turns[names])}
    name, component, change = max(
        (part for part in PARTS if part[0] in needed), key=lambda part: int(getattr(estimate, part[0]))
    )
    return ProfileError(
        f"the run needs at least {estimate.minimum / GIB:.1f} GiB of memory and this machine has "
        f"{memory_bytes / GIB:.1f}; the largest part, {getattr(estimate, name) / GIB:.1f} GiB, is {component}: "
        f"change {change}"
    )
