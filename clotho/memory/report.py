"""An estimate as lines for the screen, and the refusal of a run that cannot fit."""

from __future__ import annotations

from protocols.errors import ProfileError
from protocols.summary import MemoryEstimate, MemoryPart

GIB = 2**30

ADAPTER = "policy.rank, policy.num_layers, or policy.kind = lora"
PARTS = (
    ("base", "base weights", "model.path (a smaller or quantised base), model.dtype, model.dequantize = false"),
    ("trained", "trained weights", ADAPTER),
    ("optimizer", "optimizer state", f"{ADAPTER}; learner.optimizer = adafactor, lion or sgd"),
    ("reference", "reference weights", "learner.kl_beta = 0, learner.reference = base, or policy.kind = lora"),
    ("rollback", "weights to go back to", f"collapse_detection.on_collapse = stop; {ADAPTER}"),
    ("midway", "weights midway in an update", f"learner.num_minibatches = 1 with learner.update_epochs = 1; {ADAPTER}"),
    ("caches", "key-value caches", "engine.kv_cache_tokens, engine.max_num_seqs, sampling.max_tokens"),
    ("prefixes", "prefix cache", "engine.prefix_cache_tokens"),
    ("gradients", "gradients", ADAPTER),
    ("activations", "activations", "learner.micro_batch_tokens, or policy.grad_checkpoint = true"),
    ("logits", "logits", "learner.micro_batch_tokens, sampling.max_tokens"),
    ("update", "optimizer step", f"{ADAPTER}; learner.optimizer = adafactor, lion or sgd"),
    ("decode", "decoding step", "engine.max_num_seqs"),
)
"""Field of `MemoryEstimate`, its name on the screen, and what makes it smaller."""


def describe(estimate: MemoryEstimate) -> list[MemoryPart]:
    """Lines to print: every part that takes anything, in the order of the fields.

    They may add up to more than `estimate.total`: backward pass, optimizer step and decoding step take turns.
    """
    return [
        MemoryPart(component=component, bytes=getattr(estimate, name), change=change)
        for name, component, change in PARTS
        if getattr(estimate, name)
    ]


def too_large(estimate: MemoryEstimate, memory_bytes: int) -> ProfileError | None:
    """Return the refusal of a run that needs more than the machine's `memory_bytes`; None where it fits.

    It names the settings of the largest part that counts in the total. The caller raises it, or shows it.
    """
    if estimate.total <= memory_bytes:
        return None
    counted = set(_counted(estimate))
    name, component, change = max(
        (part for part in PARTS if part[0] in counted), key=lambda part: int(getattr(estimate, part[0]))
    )
    return ProfileError(
        f"the run needs about {estimate.total / GIB:.1f} GiB of memory and this machine has "
        f"{memory_bytes / GIB:.1f}; the largest part, {getattr(estimate, name) / GIB:.1f} GiB, is {component}: "
        f"change {change}"
    )


def _counted(estimate: MemoryEstimate) -> tuple[str, ...]:
    """Fields that are in the total: all that is held, and of what takes turns the largest."""
    held = tuple(name for name, _, _ in PARTS[:8])
    turns = {
        ("gradients", "activations", "logits"): estimate.gradients + estimate.activations + estimate.logits,
        ("update",): estimate.update,
        ("decode",): estimate.decode,
    }
    return held + max(turns, key=lambda names: turns[names])
