"""What files of other programs add to the library: models in GGUF files, and adapters of PEFT, NPZ and GGUF."""

from __future__ import annotations

MODEL_FORMATS = {".gguf": ("attachments.files.gguf:open_gguf", "attachments.files.gguf_tokenizer:gguf_tokenizer")}
ADAPTER_FORMATS = {name: f"attachments.files.adapters:read_{name}" for name in ("gguf", "npz", "peft")}
