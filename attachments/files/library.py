"""What files of other programs add to the library: models in GGUF files, and adapters of PEFT, NPZ and GGUF."""

from __future__ import annotations

from collections.abc import Mapping

from clotho.extension import Extension, ModelFormat


class FilesExtension(Extension):
    """Formats of models and adapters."""

    def model_formats(self) -> Mapping[str, ModelFormat]:
        """Return the format of llama.cpp."""
        return {
            ".gguf": ModelFormat(
                open="attachments.files.gguf:open_gguf", tokenizer="attachments.files.gguf_tokenizer:gguf_tokenizer"
            )
        }

    def adapter_formats(self) -> Mapping[str, str]:
        """Return what reads the formats of other programs."""
        return {name: f"attachments.files.adapters:read_{name}" for name in ("gguf", "npz", "peft")}


EXTENSION = FilesExtension()
