"""The adapter's configuration, in the form that mlx-lm reads from `adapter_config.json`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class LoRAParameters(Struct, frozen=True, kw_only=True):
    """Low-rank adaptation as mlx-lm counts: y = W x + scale * (x A) B; `scale` is absolute.

    keys: block-relative names of the adapted modules.
    """

    rank: int
    scale: float
    dropout: float
    keys: tuple[str, ...]


class AdapterConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `mlx_lm.load(base, adapter_path=...)` needs to rebuild the trained layers.

    num_layers: how many blocks, from the last; -1 = all. lora_parameters: None for full-weight training.
    model: the base that it was trained on, for the reader; mlx-lm does not look at it.
    """

    fine_tune_type: Literal["lora", "full"]
    num_layers: int
    lora_parameters: LoRAParameters | None = None
    model: str = ""
