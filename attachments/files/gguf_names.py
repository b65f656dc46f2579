"""The names that llama.cpp gives to the layers of a model, and its order of rows in query and key projections.

The table of names is that of llama.cpp (package `gguf`). In models of the Llama architecture llama.cpp rotates pairs of
neighbouring dimensions, mlx-lm the two halves of a head (`attachments/files/gguf.py`), so the rows of queries and keys
differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import gguf

from attachments.files.merging import expert_layer
from protocols.errors import ArtifactError, visible
from training_run.adapters.formats import place_of


class GgufArchitecture(NamedTuple):
    """An architecture of llama.cpp. reorders: whether rows of queries and keys are in pairs."""

    name: str
    reorders: bool = False


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", reorders=True),
    "mistral": GgufArchitecture("llama", reorders=True),
    "mixtral": GgufArchitecture("llama", reorders=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen3_moe": GgufArchitecture("qwen3moe"),
    "gemma": GgufArchitecture("gemma"),
    "gemma2": GgufArchitecture("gemma2"),
    "gemma3_text": GgufArchitecture("gemma3"),
}
"""Architectures of llama.cpp by `model_type`, as far as mlx-lm and Hugging Face name the layers alike."""

HEADS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
"""Layers whose rows llama.cpp can have in another order, with the key of their number of heads."""

KINDS = {kind: value for value, kind in gguf.MODEL_ARCH_NAMES.items()}


def architecture_of(model_type: str) -> GgufArchitecture:
    """Return the architecture in llama.cpp. Raises ArtifactError if it is not in the table."""
    if (found := ARCHITECTURES.get(model_type)) is None:
        known = ", ".join(ARCHITECTURES)
        shown = visible(repr(model_type), 60)
        raise ArtifactError(f"gguf: the architecture {shown} is not supported, only {known}", reason="inexpressible")
    return found


def gguf_names(modules: Iterable[str], architecture: GgufArchitecture, layers: int) -> dict[str, str]:
    """Return the name of the weight in llama.cpp for every module that llama.cpp has."""
    table = gguf.get_tensor_name_map(KINDS[architecture.name], layers)
    names = {module: table.get_name(expert_layer(module, "")) for module in modules}
    return {module: f"{name}.weight" for module, name in names.items() if name is not None}


def heads_key(module: str, architecture: GgufArchitecture) -> str | None:
    """Return the key of the number of heads if llama.cpp has the rows of a layer in another order; None otherwise."""
    return HEADS.get(place_of(module)[1]) if architecture.reorders else None
