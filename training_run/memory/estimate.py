"""Memory estimate of a run: bytes of MLX arrays by purpose, computed before any weight is read."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model
from msgspec.structs import replace

from clotho.backend import backend
from clotho.extension import Door
from clotho.inference.cache_layout import AttentionLeaf, CacheLayout, StateLeaf, flatten
from clotho.inference.prefill import MAX_ENTRIES
from clotho.inference.rows import rounded_columns, spare_columns
from clotho.inference.scheduler import client_rows
from clotho.models import attention
from clotho.models.experts import experts_per_token
from clotho.models.loading import (
    DTYPES,
    HIDDEN_KEYS,
    OFFLINE_PROFILE,
    computing_dtype,
    context_length,
    convert,
    describe_model,
    find_model,
    is_local,
    open_base,
    setting,
    vocabulary_size,
)
from clotho.models.lora import install_adapter, open_all_weights
from clotho.models.parameters import flat
from clotho.settings.bounds import Off
from clotho.settings.engine import EngineSection
from clotho.settings.learner import AverageReference, BaseReference, SnapshotReference
from clotho.settings.model import FullMethod, ModelSection
from clotho.settings.server import AdaptersSection, HttpServer
from clotho.storage.adapters import smaller_ranks
from clotho.training.optimizers import state_bytes
from protocols.errors import ModelError
from protocols.sampling import PARAMETERS, Sampling, in_use
from protocols.summary import MemoryEstimate
from training_run.memory.activations import (
    FLOAT32,
    LATENT,
    SOFT_CAPPED,
    activation_bytes,
    attention_heads,
    block_bytes,
    logits_bytes,
    magnitude_bytes,
)
from training_run.memory.micro_batch import MicroBatchShape, largest_micro_batch, most_groups
from training_run.memory.need import MemoryNeed, memory_need
from training_run.profile.schema import Profile


def learning_bytes(base: nn.Module, profile: Profile, need: MemoryNeed) -> MemoryEstimate:
    """Make the trainable parameters of the policy trainable in `base`, and count bytes; nothing is evaluated.

    Return the arrays that training keeps, one gradient, and the optimizer step, in the coordinates of its state too;
    `base` is without those trained in full.
    """
    weights = sum(array.nbytes for array in flat(base.parameters()).values())
    learner, method = profile.learner, profile.policy.method
    full = isinstance(method, FullMethod)
    if isinstance(method, FullMethod):
        config = open_all_weights(base)
    else:
        config, _ = install_adapter(base, method, seed=profile.seed)
    beside = set() if full else set(config.trained_weights)
    arrays = flat(base.trainable_parameters())
    padded = ((arrays[name].size, of_file / rank) for name, (_, rank, of_file) in smaller_ranks(arrays, config).items())
    trained = sum(array.nbytes for array in arrays.values())
    in_full = trained if full else sum(array.nbytes for name, array in arrays.items() if name in beside)
    float32 = FLOAT32 * sum(array.size for array in arrays.values())
    in_adapter = FLOAT32 * sum(array.size for name, array in arrays.items() if not full and name not in beside)
    optimizer = state_bytes(arrays, learner) + need.adapter_copies * in_adapter
    average = float32 if isinstance(learner.reference, AverageReference) else 0
    snapshot = trained if isinstance(learner.reference, SnapshotReference) else 0
    taken_anew = snapshot if isinstance(learner.reference, SnapshotReference) and learner.reference.interval else 0
    initial = in_full if isinstance(learner.reference, BaseReference) else 0
    critic = trained + 2 * float32 if need.critic else 0
    largest = FLOAT32 * max((array.size for array in arrays.values()), default=0)
    several = learner.update_epochs * min(learner.num_minibatches, most_groups(profile)) > 1
    return MemoryEstimate(
        base=weights - in_full,
        trained=trained,
        gradients=float32,
        optimizer=optimizer + critic,
        reference=average + snapshot + initial,
        rollback=2 * (trained + optimizer + average + taken_anew) if need.rollbacks else 0,
        published=trained if in_full and need.published else 0,
        midway=trained + optimizer if several else 0,
        padded=FLOAT32 * int(sum(size * ratio for size, ratio in padded)),
        update=float32 + trained + optimizer + average + largest + (in_adapter if need.adapter_copies else 0),
    )


PROMPT_TOKENS = 256
"""Length of a prompt in tokens if the caller gives none."""

SUM_COPIES = 3
"""The gradient of a rank, its copy that becomes the sum, and the arrays of the sum."""

DECODE_COPIES = 2
"""Number of float32 arrays of the size of the logits that sampling one token uses."""


MARGIN = 0.25
"""Allowance for temporary arrays, as a share of the largest turn: peaks measured in tests reach 1.21 times the turn."""


def estimate_memory(model: ModelSection, profile: Profile, *, prompt_tokens: int = PROMPT_TOKENS) -> MemoryEstimate:
    """Estimate the peak bytes of MLX arrays of a run of `profile` on `model`.

    No weight is read: shapes and types come from the configuration and from the headers of the files. For a hub model
    that is not in the local cache, the configuration that ships with the project is used, if there is one.
    `total` assumes that every completion reaches `sampling.max_tokens` and that every cache is full, so a run whose
    completions end earlier stays below it; `minimum` counts the cache of one sequence. prompt_tokens: length of the
    longest prompt, if prompts and completions are those of the run.

    `total` is 1 to 1.3 times the peak of an update for the architectures of `tests/small_models.py` with short rows,
    and at most 1.5 times that of other runs in the tests, which fill their caches. Not counted in it: the freed buffers
    that MLX keeps for reuse, because MLX returns them to the system when memory is short, and the memory of the process
    besides arrays.

    Call it before `load_policy`, because both seed the random state of the calling thread. Raises ModelError if the
    model cannot be found, read or trained with these settings. Nothing is downloaded.
    """
    base, config, shipped = _open(model)
    layout = CacheLayout(base)
    limits = profile.server.adapters if isinstance(profile.server, HttpServer) else AdaptersSection()
    adapters = _adapters(base, config, limits) if limits.root else 0
    need = memory_need(profile.engine, profile)
    layout.hold(need.kv_format)
    learning = learning_bytes(base, profile, need)
    length, completion = _longest(profile, need, prompt_tokens, context_length(config))
    micro = largest_micro_batch(profile, prompt=length - completion, completion=completion)
    vocabulary = vocabulary_size(config)
    seqs = profile.engine.max_num_seqs
    clients = client_rows(seqs) if isinstance(profile.server, HttpServer) else 0
    rows = max(1, min(seqs + clients, profile.engine.kv_cache_tokens // length))
    logits = logits_bytes(micro, vocabulary)
    draft_weights, draft_caches = _beside(need.draft_model, rows, length + need.step_tokens - 1)
    teacher_weights, teacher_caches = _beside(need.teacher, 1, length)
    further = sum(array.nbytes for open_model in need.models for array in flat(open_model()[0].parameters()).values())
    estimate = replace(
        learning,
        base=learning.base + draft_weights + teacher_weights + further,
        trained=learning.trained + converted_bytes(base, _itemsize(base, config)),
        caches=_caches(layout, rows, length) + draft_caches + teacher_caches,
        prefixes=_prefixes(layout, profile.engine.prefix_cache_tokens, min(prompt_tokens, length)),
        evaluation=_caches(layout, _evaluated_rows(profile, length), length),
        routes=_routes(layout, profile, length),
        gradients=learning.gradients * (2 if micro.several else 1),
        sums=SUM_COPIES * learning.gradients if need.sums else 0,
        activations=_activations(base, config, layout, micro, profile, logits=logits),
        logits=logits,
        decode=_draw_copies(profile.sampling) * rows * need.step_tokens * vocabulary * FLOAT32,
        adapters=adapters,
        freed=profile.memory.cache_limit_mib * 2**20,
        one_sequence=_caches(layout, 1, length),
        shipped_shape=shipped,
        quantized=any("scales" in module for module in base.modules()),
    )
    return replace(estimate, margin=int(MARGIN * estimate.turn))


def serving_memory(
    model: ModelSection, engine: EngineSection, sampling: Sampling, adapters: AdaptersSection | None = None
) -> MemoryEstimate:
    """Estimate the peak bytes of MLX arrays of a server without a learner; see `estimate_memory`.

    adapters: limits of the adapters that are loaded; None if none can be loaded.
    Clients may request longer completions than `sampling.max_tokens`; `engine.kv_cache_tokens` limits their caches.
    """
    base, config, shipped = _open(model)
    layout = CacheLayout(base)
    length = min(PROMPT_TOKENS + sampling.max_tokens, context_length(config))
    rows = max(1, min(engine.max_num_seqs, engine.kv_cache_tokens // length))
    vocabulary = vocabulary_size(config)
    need = memory_need(engine)
    layout.hold(need.kv_format)
    decode = _draw_copies(sampling) * rows * need.step_tokens * vocabulary * FLOAT32
    draft_weights, draft_caches = _beside(need.draft_model, rows, length + need.step_tokens - 1)
    return MemoryEstimate(
        base=sum(array.nbytes for array in flat(base.parameters()).values()) + draft_weights,
        caches=_caches(layout, rows, length) + draft_caches,
        prefixes=_prefixes(layout, engine.prefix_cache_tokens, min(PROMPT_TOKENS, length)),
        decode=decode,
        adapters=_adapters(base, config, adapters) if adapters is not None else 0,
        margin=int(MARGIN * decode),
        one_sequence=_caches(layout, 1, length),
        shipped_shape=shipped,
    )


def _open(model: ModelSection) -> tuple[nn.Module, dict[str, Any], bool]:
    """Return the unevaluated model, its configuration, and whether the configuration ships with the project."""
    local = local_files(model.path)
    if local is not None:
        return *open_base(local, model, read_weights=False), False
    shape = shipped_shape(model.path)
    if shape is None:
        raise ModelError(
            f"model {model.path} is not a directory and not in the local cache of the hub. An estimate downloads "
            f"nothing: fetch the model first (hf download {model.path}); the profile {OFFLINE_PROFILE} needs no hub"
        )
    return *open_shape(shape, model), True


SHAPES = Path(__file__).parents[2] / "profiles" / "shapes"
"""Contains `OWNER--NAME/config.json` of hub repositories OWNER/NAME, unchanged."""


def shipped_shape(repository: str) -> Path | None:
    """Return the directory with the configuration of a hub repository; None if it does not ship with the project."""
    directory = SHAPES / repository.replace("/", "--")
    return directory if (directory / "config.json").is_file() else None


def open_shape(directory: Path, section: ModelSection) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a configuration, converted according to `section`; return it with the configuration.

    All shapes and types are final, as with `open_base`. The weights are random and must not be evaluated; unevaluated
    weights take no memory.
    """
    model, config = load_model(directory, lazy=True, strict=False)
    model.set_dtype(DTYPES[config["torch_dtype"]])
    if packing := config.get("quantization"):
        nn.quantize(model, group_size=packing["group_size"], bits=packing["bits"])
    convert(model, section, config)
    return model, config


def local_files(path: str) -> Path | None:
    """Return directory or GGUF file of the model without using the network; None if not found. Raises ModelError."""
    if is_local(path):
        return find_model(path)
    try:
        found = huggingface_hub.snapshot_download(path, allow_patterns=DEFAULT_ALLOW_PATTERNS, local_files_only=True)
    except HFValidationError as error:
        raise ModelError(f"model {path} is neither a directory nor the name of a hub repository") from error
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _evaluated_rows(profile: Profile, length: int) -> int:
    """Return how many rows an evaluation has beside the rollouts of training; 0 if there is none during training."""
    settings = profile.eval
    if isinstance(settings, Off) or not settings.interval:
        return 0
    rows = min(profile.engine.max_num_seqs, max(1, profile.engine.kv_cache_tokens // length))
    problems = settings.problems_between or settings.problems
    return min(rows, problems * (1 + settings.samples)) if problems else rows


def _draw_copies(sampling: Sampling) -> int:
    return DECODE_COPIES + sum(PARAMETERS[name].logits_copies for name in in_use(sampling))


def _beside(path: str, rows: int, tokens: int) -> tuple[int, int]:
    """Return the bytes of the weights of a further model and of its KV caches; 0 without a path."""
    if not path:
        return 0, 0
    model, _, _ = _open(ModelSection(path=path))
    weights = sum(array.nbytes for array in flat(model.parameters()).values())
    return weights, _caches(CacheLayout(model), rows, tokens)


ADAPTER_BYTES: Door[[nn.Module, AdaptersSection, int], int] = Door("library.adapter_bytes")
"""Returns the largest number of bytes that adapters of an engine with these limits take.

Called with the model as mlx-lm builds it, not evaluated, the limits, and the bytes per number of the compute type.
"""

SCAN_BYTES: Door[[nn.Module, Sequence[int], int, int], int] = Door("library.scan_bytes")
"""Returns the bytes that the backward pass of a block's recurrent layer works with.

Called with the block, the heads and the two sizes of the state of a head, and the rows and tokens that it computes.
"""


def _adapters(base: nn.Module, config: dict[str, Any], limits: AdaptersSection) -> int:
    """Return the bytes of the largest adapters that the limits allow."""
    itemsize = _itemsize(base, config)
    return sum(ADAPTER_BYTES(base, limits, itemsize))


def _caches(layout: CacheLayout, rows: int, tokens: int) -> int:
    """Return the bytes of the KV caches of the running rows, with the columns that are allocated ahead."""
    total = 0
    for leaf in layout.leaves:
        if isinstance(leaf, AttentionLeaf):
            visible = tokens if leaf.window is None else min(tokens, leaf.window)
            columns = visible + spare_columns(visible)
            if leaf.window is None:
                columns = max(columns, rounded_columns(visible))
            total += rows * columns * leaf.held_bytes
        else:
            total += rows * _state_bytes(leaf)
    return total


def _prefixes(layout: CacheLayout, tokens: int, prompt: int) -> int:
    """Return the bytes of a full prefix cache whose entries are prompts of `prompt` tokens."""
    entries = min(MAX_ENTRIES, -(-tokens // max(1, prompt)))
    total = 0
    for leaf in layout.leaves:
        if isinstance(leaf, AttentionLeaf):
            total += min(tokens, entries * (leaf.window or tokens)) * leaf.token_bytes
        else:
            total += entries * _state_bytes(leaf)
    return total


def _routes(layout: CacheLayout, profile: Profile, length: int) -> int:
    """Return the bytes of the routes of all rollouts that exist at once, prompts included."""
    if not layout.mixtures or profile.learner.router_replay == "off":
        return 0
    groups = most_groups(profile) + profile.max_batches_ahead * profile.learner.batch_size
    return groups * profile.sampling.group_size * length * layout.mixtures.route_bytes


def _state_bytes(leaf: StateLeaf) -> int:
    return sum(math.prod(shape) * dtype.size for shape, dtype in zip(leaf.shapes, leaf.dtypes, strict=True))


def _activations(
    model: nn.Module,
    config: dict[str, Any],
    layout: CacheLayout,
    micro: MicroBatchShape,
    profile: Profile,
    *,
    logits: int,
) -> int:
    """Return the bytes that the blocks hold in a backward pass, which ends at the first block with a gradient."""
    itemsize = _itemsize(model, config)
    blocks = list(model.layers)
    first = next((i for i, block in enumerate(blocks) if flat(block.trainable_parameters())), 0)
    full, experts = isinstance(profile.policy.method, FullMethod), experts_per_token(config)
    divides = calls_attention(blocks)
    arrays = LATENT if setting(config, ("kv_lora_rank",)) else 1 if divides else SOFT_CAPPED
    scores = attention_heads(config) * itemsize * arrays
    attends = _attends(layout, len(blocks))
    in_blocks = activation_bytes(
        [block_bytes(block, full=full, itemsize=itemsize, experts=experts) for block in blocks[first:]],
        [_scan_bytes(block, layout, micro) for block in blocks[first:]],
        micro,
        residual=(setting(config, HIDDEN_KEYS) or 0) * itemsize,
        scores=[int(scores * one) for one in attends[first:]],
        logits=logits,
        checkpointed=profile.policy.recomputes(describe_model(model, config).parameters),
        divides=divides,
    )
    return in_blocks + magnitude_bytes(blocks)


def _attends(layout: CacheLayout, blocks: int) -> list[float]:
    """Return 1 for each block with attention, and 0 for others; their mean if not every block has its own cache."""
    caches = layout.nest(layout.leaves)[: -1 if layout.mixtures else None]
    attends = [float(any(isinstance(leaf, AttentionLeaf) for leaf in flatten([cache]))) for cache in caches]
    return attends if len(attends) == blocks else [min(1.0, sum(attends) / blocks)] * blocks


def _scan_bytes(block: nn.Module, layout: CacheLayout, micro: MicroBatchShape) -> int:
    """Return the bytes that the backward pass of the recurrent layer of a block works with; 0 without such a layer."""
    states = {
        shape for leaf in layout.leaves if isinstance(leaf, StateLeaf) for shape in leaf.shapes if len(shape) == 3
    }
    return max(
        (
            found
            for state in states
            for part in micro.passes
            for found in SCAN_BYTES(block, state, part.rows, part.queries)
        ),
        default=0,
    )


def _itemsize(model: nn.Module, config: dict[str, Any]) -> int:
    """Return the bytes per number of the compute type."""
    dtype = DTYPES.get(computing_dtype(model), mx.float32)
    return dtype.size


def _longest(profile: Profile, need: MemoryNeed, prompt_tokens: int, context: int) -> tuple[int, int]:
    """Return the length of the longest training sequence, and the largest number of its tokens that are sampled."""
    if need.sequence_tokens is not None:
        length = min(need.sequence_tokens, context)
        return length, length - 1
    length = min(prompt_tokens + profile.sampling.max_tokens, context)
    return length, min(profile.sampling.max_tokens, length - 1)


def calls_attention(blocks: list[nn.Module]) -> bool:
    """Whether the modules of the blocks call mlx-lm's function; others compute scores themselves (Gemma 2)."""
    files = {type(module).__module__ for block in blocks for module in block.modules()}
    return any(attention.NAME in vars(sys.modules[name]) for name in files)


def converted_bytes(model: nn.Module, itemsize: int) -> int:
    """Return the bytes of A and B' of the served weights, without padding. itemsize: of the compute type."""
    if not backend().folds_adapters(itemsize):
        return 0
    layers = [module for module in model.modules() if isinstance(module, (LoRALinear, LoRASwitchLinear))]
    return itemsize * sum(layer.lora_a.size + layer.lora_b.size for layer in layers)
