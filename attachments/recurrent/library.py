"""What this attachment adds to the library: recurrent layers in chunks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.nn as nn


def install_layers() -> None:
    """Replace functions of mlx-lm's model modules that are loaded."""
    if sys.modules.keys() & {"mlx_lm.models.gated_delta", "mlx_lm.models.ssm"}:
        from attachments.recurrent.layers import install

        install()


def scan_bytes(block: nn.Module, state: Sequence[int], rows: int, tokens: int) -> int:
    """Return the bytes of the chunks that are computed again together."""
    from attachments.recurrent.layers import scan_bytes

    return scan_bytes(block, state, rows=rows, tokens=tokens)
