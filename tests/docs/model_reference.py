"""Generates the table of tested architectures on docs/models.md.

python -m tests.docs.model_reference
"""

from __future__ import annotations

from attachments.cpu.backend import make_host_decoder
from clotho.models.head import split_model
from clotho.models.loading import INSTALL_LAYERS
from clotho.models.lora import install_adapter
from clotho.scoring.layouts.forward import check_layout
from clotho.settings.model import Lora
from protocols.errors import ModelError
from tests.docs.pages import DOCS, replace_between
from tests.small_models import ARCHITECTURES, NEWER, tiny

PAGE = DOCS / "models.md"
VOCABULARY = 64


def table() -> str:
    """One row per architecture of `tests/small_models.py`."""
    rows = [
        f"| `{architecture}` | {', '.join(_layouts(architecture))} | {_decoding(architecture)} | "
        f"{', '.join(_adapted(architecture))} |"
        for architecture in sorted(ARCHITECTURES | NEWER)
    ]
    head = "| `model_type` | layouts | decoding on Linux in float32 | layers with an adapter by default |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _layouts(architecture: str) -> list[str]:
    model = tiny(architecture, vocab_size=VOCABULARY)
    INSTALL_LAYERS()
    split = split_model(model, VOCABULARY)
    found = ["padded"]
    for layout in ("packed", "shared"):
        try:
            check_layout(model, split, VOCABULARY, layout=layout)
        except ModelError:
            continue
        found.append(layout)
    return found


def _decoding(architecture: str) -> str:
    """Return what decodes on the CPU."""
    return "MLX" if make_host_decoder(tiny(architecture, vocab_size=VOCABULARY)) is None else "NumPy"


def _adapted(architecture: str) -> list[str]:
    """Return the last parts of the names of adapted layers."""
    _, adapted = install_adapter(tiny(architecture, vocab_size=VOCABULARY), Lora(), seed=0)
    return sorted({f"`{one.name.rpartition('.')[2]}`" for one in adapted})


if __name__ == "__main__":
    replace_between(PAGE, "models", table())
