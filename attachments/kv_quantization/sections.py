"""The setting of the quantized KV cache in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from clotho.settings.bounds import Off, Variant, about
from clotho.settings.mounted import Setting

GroupSize = Literal[32, 64, 128]


class EightBits(Variant, frozen=True, kw_only=True, tag="affine"):
    """Keys and values of running rows are quantized to 8 bits in affine groups, as MLX quantizes weights."""

    group_size: Annotated[
        GroupSize | None, about("Numbers of a key or value that share a scale; none: 64, or 32 for smaller heads.")
    ] = None


KV_QUANTIZATION = Setting[Off | EightBits](
    path="engine.kv_quantization",
    kind=Annotated[Off | EightBits, about("Keys and values of running rows in 8 bits.")],
    default=Off(),
    attachment="kv_quantization",
)

SETTINGS = (KV_QUANTIZATION,)
