"""What this attachment adds to the library: recurrent layers in chunks."""

from __future__ import annotations

import sys

from clotho.extension import Extension


class RecurrentExtension(Extension):
    """Replaces the recurrent layers of mlx-lm."""

    def install_layers(self) -> None:
        """Replace functions of mlx-lm's model modules that are loaded."""
        if sys.modules.keys() & {"mlx_lm.models.gated_delta", "mlx_lm.models.ssm"}:
            from attachments.recurrent.layers import install

            install()


EXTENSION = RecurrentExtension()
