"""The files of an adapter without the triplets that are not in use."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from attachments.adalora.rule import rows
from clotho.models.parameters import Parameters, flat, nested
from clotho.storage.adapters import RANK_AXES
from protocols.checkpoint import AdapterConfig


def packed(parameters: Parameters, config: AdapterConfig) -> tuple[Parameters, AdapterConfig]:
    """Return the adapter without the triplets whose row of B is zero, and its ranks; evaluated.

    It computes the same, as a LoRA whose modules have ranks of their own. A module keeps at least one triplet, and a
    mixture those that any expert uses.
    """
    assert config.lora_parameters is not None
    arrays, ranks = flat(parameters), dict[str, int]()
    for module in [name.removesuffix(".lora_b") for name in arrays if name.endswith(".lora_b")]:
        in_use = np.array(mx.any(rows(module, "lora_b", arrays) != 0, axis=-1))
        kept = np.flatnonzero(in_use.reshape(-1, in_use.shape[-1]).any(axis=0))
        chosen = mx.array(kept if kept.size else np.zeros(1, dtype=np.int64))
        ranks[module] = int(chosen.size)
        for name in (f"{module}.lora_a", f"{module}.lora_b"):
            axis = RANK_AXES[name.rpartition(".")[2], arrays[name].ndim]
            arrays[name] = mx.contiguous(mx.take(arrays[name], chosen, axis=axis))
    mx.eval(arrays)
    largest = max(ranks.values())
    low_rank = replace(config.lora_parameters, rank=largest)
    smaller = {module: rank for module, rank in sorted(ranks.items()) if rank < largest}
    return nested(arrays), replace(config, lora_parameters=low_rank, ranks=smaller)
