"""What files of other programs add to the library: models in GGUF files."""

from __future__ import annotations

MODEL_FORMATS = {".gguf": ("attachments.files.gguf:open_gguf", "attachments.files.gguf_tokenizer:gguf_tokenizer")}
