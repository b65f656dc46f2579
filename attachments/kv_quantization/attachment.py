"""What the quantized KV cache adds to a run: its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.kv_quantization.sections import KV_QUANTIZATION
from clotho.settings.bounds import Off

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed


MAY_CHANGE = ("engine.kv_quantization",)


def memory(need: MemoryNeed) -> None:
    """Count the KV caches of running rows in 8 bits."""
    settings = KV_QUANTIZATION.of(need.engine)
    if isinstance(settings, Off):
        return
    from attachments.kv_quantization.packed import PackedFormat

    need.kv_format = PackedFormat(settings.group_size)
