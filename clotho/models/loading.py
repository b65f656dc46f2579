"""Read a base model from a directory or the Hugging Face hub. Whatever is wrong becomes one line: a `ModelError`.

Models whose configuration ships with the project: their shape is known where their weights are not at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, dequantize_model, load_model

from clotho.config.schema import ModelSection
from protocols.errors import ModelError

OFFLINE_PROFILE = "local-m3"
"""The profile whose model and data ship with the project."""

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_base(section: ModelSection) -> tuple[nn.Module, dict[str, Any], Path]:
    """Load the base model; return it with its configuration and the directory it came from.

    The weights are evaluated and in the type that `section.dtype` asks for. Raises `ModelError`.
    """
    directory = find_model(section.path)
    model, config = open_base(directory, section)
    try:
        mx.eval(model.parameters())
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"model {section.path} cannot be converted: {_one_line(error)}") from error
    return model, config, directory


def open_base(directory: Path, section: ModelSection) -> tuple[nn.Module, dict[str, Any]]:
    """Build the base model of `section` from its files; return it with its configuration.

    Its weights have their final shapes and types and no values yet: only headers have been read. Evaluating them all
    at once holds no second copy. Raises `ModelError`.
    """
    _refuse_foreign_code(directory, section)
    try:
        model, config = load_model(directory, lazy=True, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # model files are foreign: mlx-lm raises whatever their contents provoke
        raise ModelError(f"model {section.path} cannot be loaded: {_one_line(error)}") from error
    convert(model, section)
    return model, config


def find_model(path: str) -> Path:
    """Directory of the model, downloaded from the hub where `path` is no directory. Raises `ModelError`."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(f"model directory {path} has no config.json")
        return local
    if local.exists():
        raise ModelError(f"model {path} is a file; a directory with config.json and *.safetensors is expected")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelError(f"model directory {path} does not exist")
    return _download(path)


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
            f"model {repository}: no such directory, nor such a repository on the hub; {offline}"
        ) from error
    except Exception as error:  # the client raises its own, httpx's and the operating system's errors
        raise ModelError(
            f"model {repository}: no such directory, and the Hugging Face hub could not be reached "
            f"({type(error).__name__}); {offline}"
        ) from error


def _refuse_foreign_code(directory: Path, section: ModelSection) -> None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / 'config.json'} cannot be read: {_one_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{directory / 'config.json'} names no model_type")
    if section.trust_remote_code:
        return
    for key in ("model_file", "auto_map"):
        if config.get(key):
            raise ModelError(
                f"model {section.path} wants to run code of its own ({key} in config.json); "
                "set model.trust_remote_code = true if you trust it"
            )


def convert(model: nn.Module, section: ModelSection) -> None:
    """Dequantise and cast as `section` asks; nothing is evaluated. Raises `ModelError`."""
    try:
        if section.dequantize:
            dequantize_model(model)
        dtype = _computing_type(section)
        if dtype is not None:
            _cast(model, dtype)
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"model {section.path} cannot be converted: {_one_line(error)}") from error


def _computing_type(section: ModelSection) -> mx.Dtype | None:
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    return mx.float32 if mx.default_device().type == mx.cpu else None


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating parameters, but for those that the architecture keeps as they are (`cast_predicate`)."""
    keeps = getattr(model, "cast_predicate", None)

    def cast(name: str, module: nn.Module) -> None:
        for key, value in module.items():
            path = f"{name}.{key}" if name else key
            floating = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
            if floating and not key.startswith("_") and (keeps is None or keeps(path) or dtype == mx.float32):
                module[key] = value.astype(dtype)

    model.apply_to_modules(cast)


def _one_line(error: Exception) -> str:
    lines = " ".join(str(error).split())
    return lines[:300] or type(error).__name__


SHAPES = Path(__file__).parents[2] / "profiles" / "shapes"
"""`OWNER--NAME/config.json` for a repository OWNER/NAME of the hub, as the repository itself has it."""


def shipped_shape(repository: str) -> Path | None:
    """Directory with the configuration of a repository of the hub, if it ships with the project."""
    directory = SHAPES / repository.replace("/", "--")
    return directory if (directory / "config.json").is_file() else None


def open_shape(directory: Path, section: ModelSection) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a configuration, converted as `section` asks; return it with the configuration.

    As `model_loading.open_base` builds one from files: all shapes and types are final. Its weights would be random, and
    are never to be evaluated: until then they take no memory, whatever the size of the model.
    """
    model, config = load_model(directory, lazy=True, strict=False)
    model.set_dtype(DTYPES[config["torch_dtype"]])
    if packing := config.get("quantization"):
        nn.quantize(model, group_size=packing["group_size"], bits=packing["bits"])
    convert(model, section)
    return model, config
