"""The adapter's configuration, in the form that mlx-lm reads from `adapter_config.json`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field


class LoRAParameters(Struct, frozen=True, kw_only=True):
    """Low-rank adaptation as mlx-lm counts: y = W x + scale * (x A) B; `scale` is absolute.

    rank: the largest of any module, and in files the rank of all. keys: block-relative names of the adapted modules.
    """

    rank: int
    scale: float
    dropout: float
    keys: tuple[str, ...]


class AdapterConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `mlx_lm.load(base, adapter_path=...)` needs to rebuild the trained layers, and what a resumed run checks.

    num_layers: how many blocks, from the last; -1 = all. lora_parameters: None for full-weight training.

    mlx-lm does not look at the rest. ranks: of the modules in `keys` whose rank is below `lora_parameters.rank`.
    trained_weights: names of the weights that are trained in full beside the adapter. model: the base that it was
    trained on, for the reader.
    """

    fine_tune_type: Literal["lora", "dora", "full"]
    num_layers: int
    lora_parameters: LoRAParameters | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    trained_weights: tuple[str, ...] = ()
    model: str = ""
