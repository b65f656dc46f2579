"""The parts of a memory estimate for display, the refusal of what cannot fit, and the limits of MLX."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog

from clotho.models.machine import limit_mlx_memory, memory_limit
from protocols.compute import MemoryLimit
from protocols.errors import ProfileError
from protocols.summary import MemoryEstimate, MemoryPart
from training_run.machine import wire_memory
from training_run.profile.schema import MemorySection

log = structlog.get_logger(__name__)

GIB = 2**30

NAMED_PARTS = 2
"""Number of parts that a refusal names."""

HIGHER_LIMIT = 1.05
"""Limit of Metal that a refusal suggests, as a multiple of the memory that the run needs."""

LEFT_FOR_MACOS = 4 * GIB
"""Bytes, or an eighth of the memory if that is more, that a limit leaves to the system: macOS panics without memory."""

RECOMMENDED_SHARE = 2 / 3
"""Fraction of the memory that Metal recommends on the smallest Macs; so much is always beside macOS."""

LENGTHS = "sampling.max_tokens, or the length of the prompts"
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
    ("published", "weights for patches", "cluster = off, or policy.method = lora"),
    (
        "midway",
        "weights between optimizer steps",
        f"learner.num_minibatches = 1 with learner.update_epochs = 1; {ADAPTER}",
    ),
    ("padded", "file of the adapter", f"policy.method.rank, policy.method.num_layers; {ADAPTER}"),
    ("caches", "KV caches", "engine.kv_cache_tokens, engine.max_num_seqs, sampling.max_tokens"),
    ("prefixes", "prefix cache", "engine.prefix_cache_tokens"),
    ("evaluation", "KV caches of evaluations", "engine.max_num_seqs, eval.problems_between, or eval.interval = 0"),
    ("routes", "routes of rollouts", "learner.router_replay = off, learner.batch_size or rollouts.max_batches_ahead"),
    ("adapters", "adapters of clients", "server.adapters.max_bytes, max_loaded or max_rank"),
    ("gradients", "gradients", ADAPTER),
    ("sums", "sums of gradients", ADAPTER),
    ("activations", "activations", "learner.micro_batch_tokens, or policy.grad_checkpoint = true"),
    ("logits", "logits", "learner.micro_batch_tokens, sampling.max_tokens"),
    ("update", "optimizer step", f"{ADAPTER}; learner.optimizer = adafactor, lion or sgd"),
    ("decode", "decode step", "engine.max_num_seqs"),
    ("margin", "temporary arrays", "learner.micro_batch_tokens, or engine.max_num_seqs"),
    ("freed", "freed buffers", "memory.cache_limit_mib"),
)
"""Field of `MemoryEstimate`, its displayed name, and the settings that make it smaller."""

ALWAYS_HELD = ("base", "trained", "optimizer", "reference", "rollback", "published", "midway")
"""Parts that are held at any time, whatever the length of completions."""


def describe(estimate: MemoryEstimate, only: Collection[str] = ()) -> list[MemoryPart]:
    """Return every part that is not empty, in the order of the fields. only: fields; empty: all.

    The parts may add up to more than `estimate.total`, because backward pass, optimizer step and decode step alternate,
    and because freed buffers are not part of it.
    """
    return [
        MemoryPart(component=component, bytes=getattr(estimate, name), change=change)
        for name, component, change in PARTS
        if getattr(estimate, name) and (not only or name in only)
    ]


def limit_memory(estimate: MemoryEstimate, settings: MemorySection) -> None:
    """Refuse what does not fit into the memory limit of this machine (ProfileError), and set the limits of MLX."""
    limit = memory_limit()
    if refusal := too_large(estimate, limit):
        raise refusal
    require_wired_limit(settings.wired_limit_mib, limit)
    if estimate.total > limit.bytes:
        log.warning(
            "memory_insufficient_for_full_caches",
            needed_gib=round(estimate.total / GIB, 1),
            limit=describe_limit(limit),
            smaller_with="engine.kv_cache_tokens, engine.max_num_seqs",
        )
    limit_mlx_memory(limit, held=estimate.minimum, cache=settings.cache_limit_mib * 2**20)
    if settings.wired_limit_mib:
        wire_memory(settings.wired_limit_mib)


def describe_limit(limit: MemoryLimit) -> str:
    """Return the limit and its source, for messages."""
    amount, installed = f"{limit.bytes / GIB:.1f} GiB", f"{limit.installed / GIB:.1f} GiB"
    return {
        "metal": f"Metal recommends at most {amount} of the {installed} of this machine",
        "gpu": f"the GPU has {amount}",
        "cgroup": f"the control group (container) of this process may use {amount} of {installed}",
        "installed": f"this machine has {amount}",
    }[limit.source]


def too_large(estimate: MemoryEstimate, limit: MemoryLimit) -> ProfileError | None:
    """Return the refusal of a run that cannot fit into `limit`; None if it may fit.

    A run that fits with the cache of one sequence may fit: how many tokens its caches hold depends on how long
    completions get. On a Mac, it must also fit beside macOS with full caches, because there Metal ends a process that
    gets no memory. The message names the largest parts, and the settings that make them smaller. On Metal, it also has
    the command that raises the limit, if the installed memory is large enough.
    """
    beside = limit.bytes if limit.source != "metal" else beside_macos(limit.installed)
    available = describe_limit(limit)
    if beside < limit.bytes:
        available += f", and macOS needs {(limit.installed - beside) / GIB:.1f} GiB of these"
    if estimate.minimum > min(limit.bytes, beside):
        return ProfileError(
            f"at least {estimate.minimum / GIB:.1f} GiB of memory are needed and {available}; the largest parts are "
            f"{_largest(_least_parts(estimate))}{_higher_limit(estimate, limit)}"
        )
    if limit.source == "metal" and estimate.total > beside:
        return ProfileError(
            f"up to {estimate.total / GIB:.1f} GiB of memory are needed when the KV caches are full, and beside macOS "
            f"there are {beside / GIB:.1f} of {limit.installed / GIB:.1f} GiB; the largest parts are "
            f"{_largest(describe(estimate))}"
        )
    return None


def beside_macos(installed: int) -> int:
    """Return how many of the `installed` bytes a Mac can leave to a run."""
    return max(installed - max(LEFT_FOR_MACOS, installed // 8), int(installed * RECOMMENDED_SHARE))


def _least_parts(estimate: MemoryEstimate) -> list[MemoryPart]:
    """Return the parts of a run with the cache of one sequence, at the moment that needs most."""
    turns = {
        ("gradients", "activations", "logits"): estimate.gradients + estimate.activations + estimate.logits,
        ("sums",): estimate.sums,
        ("update",): estimate.update,
        ("decode",): estimate.decode,
    }
    needed = {*ALWAYS_HELD, *max(turns, key=lambda names: turns[names])}
    one_sequence = MemoryPart(component="KV cache of one sequence", bytes=estimate.one_sequence, change=LENGTHS)
    return [*describe(estimate, needed), one_sequence]


def _largest(parts: Sequence[MemoryPart]) -> str:
    """Name the largest parts, and what makes them smaller."""
    largest = sorted(parts, key=lambda part: -part.bytes)[:NAMED_PARTS]
    return "; ".join(f"{part.bytes / GIB:.1f} GiB of {part.component} (change {part.change})" for part in largest)


def _higher_limit(estimate: MemoryEstimate, limit: MemoryLimit) -> str:
    """Return how to raise the limit of Metal so that the run fits; empty if too little is left for macOS."""
    raised, beside = int(estimate.minimum * HIGHER_LIMIT), beside_macos(limit.installed)
    if limit.source != "metal" or not limit.bytes < raised <= beside or estimate.total > beside:
        return ""
    return f"; or raise the limit until the next restart: sudo sysctl iogpu.wired_limit_mb={-(-raised // 2**20)}"


def require_wired_limit(limit_mb: int, limit: MemoryLimit) -> None:
    """Raise ProfileError if `memory.wired_limit_mib` has no effect on this machine, or exceeds Metal's limit."""
    if limit_mb and limit.source != "metal":
        raise ProfileError("memory.wired_limit_mib: only Metal keeps memory resident; set it to 0 on this machine")
    if limit_mb * 2**20 > limit.bytes:
        raise ProfileError(
            f"memory.wired_limit_mib = {limit_mb}: {describe_limit(limit)}, which is {limit.bytes // 2**20} MiB; "
            f"lower it, or raise the limit: sudo sysctl iogpu.wired_limit_mb={limit_mb}"
        )
