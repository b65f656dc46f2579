"""Writes a model of 3 GB and an adapter, tensor by tensor: `python large_model.py DIRECTORY`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from attachments.files.merging import TensorShape, write_streamed
from clotho.storage.tensors import StoredTensor
from tests.saved_models import save_tokenizer

LAYERS, HIDDEN, WIDE, VOCABULARY = 22, 2048, 8192, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "intermediate_size": WIDE, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "vocab_size": VOCABULARY,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SIDES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of all weights."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in SIDES.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = (HIDDEN,)
    return found | {"model.norm.weight": (HIDDEN,)}


def tensors() -> Iterator[StoredTensor]:
    """Random bfloat16 values of about 0.02; vectors are one."""
    random = np.random.default_rng(0)
    for shape in shapes().values():
        values = np.ones(shape, np.float32) if len(shape) == 1 else random.standard_normal(shape, np.float32) * 0.02
        half = (values.view(np.uint32) >> 16).astype("<u2")
        yield StoredTensor("bfloat16", shape, half.reshape(-1).view(np.uint8))


def main(directory: Path) -> None:
    """Write `model` and `adapter`."""
    model, adapter = directory / "model", directory / "adapter"
    for path in (model, adapter):
        path.mkdir()
    stated = {name: TensorShape("bfloat16", shape) for name, shape in shapes().items()}
    write_streamed(model / "model.safetensors", stated, tensors(), {"format": "pt"})
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(model)
    random = np.random.default_rng(1)
    arrays = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in SIDES.items():
            module = f"model.layers.{layer}.{name}"
            arrays[f"{module}.lora_a"] = (random.standard_normal((inputs, 4)) * 0.05).astype(np.float32)
            arrays[f"{module}.lora_b"] = (random.standard_normal((4, outputs)) * 0.05).astype(np.float32)
    save_file(arrays, adapter / "adapters.safetensors")
    parameters = {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": sorted(SIDES)}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters, "model": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
