"""Descriptions of runs, checkpoints, adapters and models, from small files and headers.

All files are foreign: they can be damaged, huge, or no regular files. Every failure is an error of one line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from attachments.files.gguf import SUFFIX
from attachments.files.gguf_header import read_header as read_gguf_header
from clotho.extension import Door
from clotho.models.experts import experts_per_token
from clotho.models.loading import PACKAGE, find_model
from clotho.models.model_files import (
    TensorHeader,
    read_config,
    read_model_headers,
    read_object,
    read_tensor_headers,
    require_file,
)
from clotho.settings.model import FullMethod, QuantizeAtLoad
from clotho.storage.adapters import CONFIG
from protocols.checkpoint import RunState
from protocols.errors import ModelError, RunDirectoryError, disk_errors_as, visible
from protocols.evaluation import Estimate
from training_run.adapters.contents import reached_share, recorded_base
from training_run.adapters.formats import (
    MLX,
    PEFT,
    AdapterFormat,
    MlxLmConfig,
    PeftConfig,
    config_type,
    place_of,
    stacked_module,
)
from training_run.directory.best_checkpoint import read_best
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import (
    MANIFEST,
    PROFILE,
    STATE,
    checkpoint_path,
    checkpoint_steps,
    find_damage,
    read_parts,
    read_state,
)
from training_run.directory.checkpoints import METRICS as METRICS_RECORD
from training_run.directory.run_directory import BEST, LINEAGE, read_origin, read_run_id
from training_run.directory.run_paths import find_checkpoint, run_of, split_step
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile
from training_run.stages import planned_steps

Description = dict[str, Any]
"""What a path contains: texts, numbers, lists, and nested descriptions, by key."""

TENSOR_FILES = (MLX.tensors, PEFT.tensors)
WHOLE_HISTORY = 1 << 26
"""Histories up to this size are read completely; of larger ones only the end."""

HISTORY_END = 1 << 22
LISTED = 40
"""Number of modules or steps that a description lists."""

METRICS = (
    "reward/mean", "reward/std", "loss", "kl", "entropy", "grad_norm", "learning_rate", "clip_fraction", "ess",
    "staleness/mean", "completion_length/mean", "truncated_fraction", "tokens_per_second", "peak_memory_bytes",
)  # fmt: skip
"""Keys of metrics.jsonl that a description has."""


class EvaluationLine(Struct, frozen=True, kw_only=True):
    """The keys of evaluations.jsonl that a description has."""

    step: int
    accuracy: float | None = None
    problems: int = 0
    ungraded: int = 0
    failed: int = 0
    reward: Estimate | None = None
    loss: Estimate | None = None
    samples: int = 0
    avg_at_k: Estimate | None = None
    pass_at: dict[str, Estimate] = {}


def describe(text: str) -> Description:
    """Describe what is at a path: a run, RUN@STEP, a checkpoint, an adapter, a model directory or a GGUF file.

    Raises an error with exit status 2 if the path does not exist, is none of these, or cannot be read.
    """
    path, step = split_step(text)
    if step is not None:
        return describe_checkpoint(find_checkpoint(text, "show"))
    if text.startswith(PACKAGE):
        path = find_model(text)
    try:
        kinds: Iterable[tuple[bool, Callable[[Path], Description]]] = (
            ((path / MANIFEST).exists() or (path / STATE).exists(), describe_checkpoint),
            (any((path / name).exists() for name in ("profile.toml", "checkpoints", "metrics.jsonl")), describe_run),
            ((path / CONFIG).exists(), describe_adapter),
            ((path / "config.json").exists(), describe_model),
            (bool(checkpoint_steps(path)), describe_checkpoints),
            (path.is_file() and path.suffix.lower() == SUFFIX, describe_gguf),
        )
        found = next((describe_kind for applies, describe_kind in kinds if applies), None)
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"show: {visible(text, 200)} cannot be read: {visible(str(error), 200)}") from error
    if found is None:
        what = "is no run, checkpoint, adapter or model" if exists else "does not exist"
        raise RunDirectoryError(f"show: {visible(text, 200)} {what}")
    with disk_errors_as(RunDirectoryError, f"show: {visible(text, 200)} cannot be read"):
        return found(path)


def describe_run(path: Path) -> Description:
    """Describe a run directory."""
    profile = _profile(path / "profile.toml")
    metrics = _last(path / "metrics.jsonl")
    evaluations = list(_evaluations(path / "evaluations.jsonl"))
    checkpoints = path / "checkpoints"
    steps = checkpoint_steps(checkpoints)
    best = read_best(path / BEST)
    return {
        "kind": "run",
        "path": str(path),
        "run_id": read_run_id(path) or None,
        "step": metrics.get("step", steps[0] if steps else 0),
        "planned_steps": planned_steps(profile) if profile else None,
        "policy_version": metrics.get("policy_version"),
        "weights_hash": metrics.get("weights_hash"),
        "age_seconds": metrics.get("time/run"),
        **_settings(profile),
        "metrics": {key: metrics[key] for key in METRICS if key in metrics},
        "evaluations": {
            "first": _evaluation(evaluations[0] if evaluations else None),
            "last": _evaluation(evaluations[-1] if evaluations else None),
            "best": None if best is None else {"step": best.step, "accuracy": best.accuracy, "problems": best.problems},
        },
        "checkpoints": _checkpoints(checkpoints),
        "adapter": _adapter_or_none(path / "adapters"),
        "lineage": _lineage(path),
        "bytes": _size(path),
    }


def describe_checkpoints(path: Path) -> Description:
    """Describe a directory of checkpoints, with its newest checkpoint that is complete."""
    found = _checkpoints(path)
    complete = [step for step in found["steps"] if step not in found["incomplete"]]
    newest = describe_checkpoint(checkpoint_path(path, complete[-1])) if complete else None
    return {"kind": "checkpoints", "path": str(path), **found, "newest": newest}


def _checkpoints(path: Path) -> Description:
    steps = sorted(checkpoint_steps(path))
    damaged = [step for step in steps if find_damage(checkpoint_path(path, step), sizes_only=True) is not None]
    return {"steps": steps[-LISTED:], "incomplete": damaged, "bytes": _size(path)}


def describe_checkpoint(path: Path) -> Description:
    """Describe a checkpoint; the sizes of its files are compared with its manifest, not their contents.

    Outside of a run, its own records have the settings and the metrics of the step.
    """
    state = read_state(path)
    run = run_of(path)
    ledger = state.ledger
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": state.step,
        "policy_version": state.version,
        "weights_hash": state.fingerprint,
        "damage": find_damage(path, sizes_only=True),
        "groups": {
            "prompted": state.prompted,
            "trained": ledger.trained,
            "discarded": dict(sorted(ledger.discarded.items())),
        },
        "sampled_tokens": state.sampled_tokens,
        "trained_tokens": state.trained_tokens,
        "update_seconds": state.train_seconds,
        **_described_parts(path),
        "inputs": dict(sorted(state.inputs.items())),
        "adapter": _adapter_or_none(path),
        **_settings(_profile(path / PROFILE)),
        "metrics": _metrics_of(run / "metrics.jsonl" if run else path / METRICS_RECORD, state),
        "evaluation": _evaluation_of(run, state) if run else None,
        "is_best": (best.step == state.step if (best := read_best(run / BEST)) else None) if run else None,
        "lineage": _lineage(run) if run else None,
        "files": {f"{entry.name}_bytes": entry.stat().st_size for entry in sorted(path.iterdir()) if entry.is_file()},
    }


DESCRIBED: Door[[CheckpointParts], Mapping[str, Any]] = Door("attachment.described")
"""Returns what `show` says about a checkpoint with these parts, whose arrays are not read."""


def _described_parts(path: Path) -> Description:
    """Return what attachments say about their parts of a checkpoint."""
    parts = CheckpointParts(read_parts(path, with_arrays=False))
    return {key: value for found in DESCRIBED(parts) for key, value in found.items()}


def describe_adapter(path: Path) -> Description:
    """Describe an adapter directory of mlx-lm or PEFT."""
    config = read_object(path / CONFIG)
    file = next((path / name for name in TENSOR_FILES if (path / name).exists()), None)
    if file is None:
        raise ModelError(f"show: {path} has {CONFIG} and neither {' nor '.join(TENSOR_FILES)}")
    tensors = read_tensor_headers(file)
    kind = config_type(config)
    is_peft = kind is PeftConfig
    ranks = _ranks(tensors, kind.form)
    parameters = _part(config, "lora_parameters")
    places = [(block, name) for block, name in map(place_of, ranks) if block is not None]
    layers = [block for block, _ in places]
    own = _part(config, "ranks")
    return {
        "kind": "adapter",
        "path": str(path),
        "format": "peft" if is_peft else "mlx-lm",
        "method": _method(config, is_peft=is_peft),
        "rank": config.get("r") if is_peft else parameters.get("rank") or max(ranks.values(), default=None),
        "ranks": own or _part(config, "rank_pattern"),
        "scale": _peft_scale(config) if is_peft else parameters.get("scale"),
        "dropout": config.get("lora_dropout") if is_peft else parameters.get("dropout"),
        "modules": sorted({name for _, name in places})[:LISTED],
        "active_share": _active_share(ranks, str(config.get(kind.base_key) or ""), path),
        "layers": f"{min(layers)} to {max(layers)}" if layers else None,
        "trained_weights": config.get("trained_weights") or config.get("modules_to_save") or [],
        "base_model": config.get(kind.base_key),
        "base_quantization": _part(config, "base_quantization") or None,
        "run_id": config.get("run_id"),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "dtype": _common_type(tensors),
        "file": file.name,
        "bytes": file.stat().st_size,
    }


def describe_model(path: Path) -> Description:
    """Describe a model directory."""
    config = read_config(path)
    tensors = read_model_headers(path)
    quantization = _part(config, "quantization")
    text = _part(config, "text_config")
    return {
        "kind": "model",
        "path": str(path),
        "format": "safetensors",
        "architecture": config["model_type"],
        "parameters": _parameters(tensors, quantization),
        "layers": _first(config, text, "num_hidden_layers", "n_layers", "n_layer"),
        "hidden_size": _first(config, text, "hidden_size", "n_embd", "d_model", "dim"),
        "vocab_size": _first(config, text, "vocab_size"),
        "context_length": _first(config, text, "max_position_embeddings", "n_positions", "max_seq_len"),
        "quantization": {key: quantization.get(key) for key in ("bits", "group_size", "mode") if key in quantization}
        or None,
        "dtype": _common_type({name: tensor for name, tensor in tensors.items() if tensor.dtype != "U32"}),
        "tensors": len(tensors),
        "bytes": sum(tensor.bytes for tensor in tensors.values()),
    }


def describe_gguf(path: Path) -> Description:
    """Describe a GGUF file."""
    header = read_gguf_header(path)
    metadata = header.metadata
    architecture = str(metadata.get("general.architecture", ""))
    return {
        "kind": "model" if metadata.get("general.type", "model") == "model" else str(metadata["general.type"]),
        "path": str(path),
        "format": "gguf",
        "name": metadata.get("general.name"),
        "architecture": architecture or None,
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors.values()),
        "layers": metadata.get(f"{architecture}.block_count"),
        "hidden_size": metadata.get(f"{architecture}.embedding_length"),
        "context_length": metadata.get(f"{architecture}.context_length"),
        "quantization": dict(Counter(f"type {tensor.kind}" for tensor in header.tensors.values())),
        "alpha": metadata.get("adapter.lora.alpha"),
        "tensors": len(header.tensors),
        "bytes": path.stat().st_size,
    }


def _settings(profile: Profile | None) -> Description:
    """The settings of a run that identify what it trains."""
    if profile is None:
        return {}
    method, model = profile.policy.method, profile.model
    policy: Description = {"method": type(method).__struct_config__.tag}
    if not isinstance(method, FullMethod):
        policy |= {"rank": method.rank, "scale": method.effective_scale, "target_modules": list(method.target_modules)}
    quantize = model.quantize
    return {
        "model": {
            "path": model.path,
            "quantize": msgspec.to_builtins(quantize) if isinstance(quantize, QuantizeAtLoad) else None,
        },
        "policy": policy,
        "data": {"train": profile.data.train, "heldout": profile.data.heldout or None},
        "learner": {
            "objective": type(profile.learner.objective).__struct_config__.tag,
            "optimizer": type(profile.learner.optimizer).__struct_config__.tag,
            "learning_rate": profile.learner.optimizer.learning_rate,
            "batch_size": profile.learner.batch_size,
            "group_size": profile.sampling.group_size,
        },
        "seed": profile.seed,
    }


def _profile(path: Path) -> Profile | None:
    """Read the profile of a run; None if there is none. Raises ProfileError if it is not valid."""
    return load_profile(str(path.absolute())) if path.exists() else None


def _lineage(run: Path) -> Description | None:
    origin = read_origin(run / LINEAGE)
    return None if origin is None else {key: value for key, value in msgspec.to_builtins(origin).items() if value}


def _adapter_or_none(path: Path) -> Description | None:
    """Describe an adapter inside a run or checkpoint, without its path; None if there is none."""
    if not (path / CONFIG).exists():
        return None
    return {key: value for key, value in describe_adapter(path).items() if key not in ("kind", "path")}


def _metrics_of(path: Path, state: RunState) -> Description:
    line = next((line for line in _lines(path) if line.get("step") == state.step), {})
    return {key: line[key] for key in METRICS if key in line}


def _evaluation_of(run: Path, state: RunState) -> Description | None:
    found = [line for line in _evaluations(run / "evaluations.jsonl") if line.step == state.step]
    return _evaluation(found[-1]) if found else None


def _evaluation(line: EvaluationLine | None) -> Description | None:
    """Return the accuracy and the counts of problems, and further values as far as the line has them."""
    if line is None:
        return None
    found: Description = msgspec.to_builtins(line)
    always = ("step", "accuracy", "problems", "ungraded")
    return {key: value for key, value in found.items() if value or key in always}


def _evaluations(path: Path) -> Iterator[EvaluationLine]:
    for line in _lines(path):
        try:
            yield msgspec.convert(line, EvaluationLine)
        except msgspec.ValidationError:
            continue


def _last(path: Path) -> Description:
    """Return the last line of a history; empty if there is none."""
    last: Description = {}
    for line in _lines(path):
        last = line
    return last


def _lines(path: Path) -> Iterator[Description]:
    """Yield the objects of a history, of a large one only those at its end."""
    if not path.exists():
        return
    require_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        if size > WHOLE_HISTORY:
            file.seek(size - HISTORY_END)
        for line in file.read(WHOLE_HISTORY).splitlines():
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except (ValueError, RecursionError):
                continue


def _part(config: Mapping[str, Any], key: str) -> Description:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _first(config: Mapping[str, Any], text: Mapping[str, Any], *keys: str) -> Any:
    return next((part[key] for key in keys for part in (config, text) if part.get(key) is not None), None)


def _method(config: Mapping[str, Any], *, is_peft: bool) -> str:
    if not is_peft:
        return str(config.get(MlxLmConfig.method_key, "lora"))
    used = [key.removeprefix("use_") for key in (PeftConfig.method_key, "use_rslora") if config.get(key) is True]
    return " ".join([str(config["peft_type"]).lower(), *used])


def _peft_scale(config: Mapping[str, Any]) -> float | None:
    alpha, rank = config.get("lora_alpha"), config.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        return None
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank))


def _ranks(tensors: Mapping[str, TensorHeader], form: AdapterFormat) -> dict[str, int]:
    """Return the rank of each module, from the shape of its A matrix."""
    return {
        found.module: tensor.shape[0 if form.transposed else 1]
        for name, tensor in tensors.items()
        if (found := form.parse(name)) and found.matrix == "lora_a" and len(tensor.shape) in (2, 3)
    }


def _active_share(modules: Iterable[str], base_name: str, path: Path) -> float | None:
    """Return the share of the weights that compute a token in the blocks whose layers have the adapter.

    None if the base model is not on this machine.
    """
    base = recorded_base(base_name, *path.absolute().parents[:3])
    if base is None:
        return None
    return reached_share(base.targets, {stacked_module(name)[0] for name in modules}, experts_per_token(base.config))


def _common_type(tensors: Mapping[str, TensorHeader]) -> str | None:
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    return sizes.most_common(1)[0][0] if sizes else None


def _parameters(tensors: Mapping[str, TensorHeader], quantization: Mapping[str, Any]) -> int:
    """Return the number of weights; a quantized weight counts once, and scales and biases of groups do not count."""
    total = 0
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        packed = f"{module}.scales" in tensors
        if packed and kind in ("scales", "biases"):
            continue
        size = math.prod(tensor.shape)
        bits = _part(quantization, module).get("bits", quantization.get("bits"))
        total += size * 32 // bits if packed and kind == "weight" and isinstance(bits, int) and bits > 0 else size
    return total


def _size(path: Path) -> int:
    """Return the size of the files in a directory."""
    return sum(entry.lstat().st_size for entry in path.rglob("*") if entry.is_file() and not entry.is_symlink())
