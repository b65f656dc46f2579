"""What this attachment adds to the library: the KV cache of running rows in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.kv_quantization.sections import KV_QUANTIZATION
from clotho.settings.bounds import Off

if TYPE_CHECKING:
    from clotho.inference.parts import EngineParts


def engine(parts: EngineParts) -> None:
    """Let an engine hold keys and values in 8 bits, if its settings say so."""
    settings = KV_QUANTIZATION.of(parts.settings)
    if isinstance(settings, Off):
        return
    from attachments.kv_quantization.packed import PackedFormat

    parts.kv_format = PackedFormat(settings.group_size)
