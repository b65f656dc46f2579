"""Modules of several ranks in one adapter file: mlx-lm knows one rank, so smaller ones are padded with zeros.

Zero columns of A and zero rows of B add nothing to (x A) B: the padded adapter is the same function.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from protocols.adapter import AdapterConfig
from protocols.errors import CheckpointError


def padded(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, mx.array]:
    """The arrays with every low-rank matrix at `lora_parameters.rank`; from any thread, for evaluated float32 ones.

    Those that have this rank, and all that are no low-rank matrices, are handed through.
    """
    result = dict(arrays)
    for name, (axis, rank, largest) in _smaller(arrays, config).items():
        widths = [(0, largest - rank if index == axis else 0) for index in range(arrays[name].ndim)]
        result[name] = mx.array(np.pad(np.asarray(arrays[name]), widths))
    return result


def unpadded(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, mx.array]:
    """The inverse of `padded`; evaluates, so in the compute thread.

    An array of another shape than `padded` gives is handed through. Raises `CheckpointError` where what is cut off is
    not zero.
    """
    result = dict(arrays)
    for name, (axis, rank, largest) in _smaller(arrays, config).items():
        if arrays[name].shape[axis] == largest:
            kept, rest = mx.split(arrays[name], [rank], axis=axis)
            if mx.any(rest != 0).item():
                raise CheckpointError(f"{name} is of a larger rank than {rank}, as which it is recorded")
            result[name] = mx.contiguous(kept)
    mx.eval(result)
    return result


def _smaller(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, tuple[int, int, int]]:
    """By name: axis, rank, and rank in the file, of every low-rank matrix whose module has a rank of its own."""
    found: dict[str, tuple[int, int, int]] = {}
    if config.lora_parameters is None or not config.ranks:
        return found
    for name, array in arrays.items():
        module, _, matrix = name.partition(".lora_")
        keys = [key for key in config.lora_parameters.keys if f".{module}".endswith(f".{key}")]
        rank = config.ranks.get(max(keys, key=len)) if matrix and keys else None
        if rank is not None and array.ndim in (2, 3):
            axis = 1 if matrix.startswith("a") else 0 if array.ndim == 2 else 2
            found[name] = axis, rank, config.lora_parameters.rank
    return found
