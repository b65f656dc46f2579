"""Runs transformers and PEFT, which are not installed beside the project: `python hugging_face.py JOBS.json`.

A job `adapter` writes a random adapter with the settings of LoraConfig. A job `logits` writes the logits of tokens,
a job `values` what a sequence classifier says of texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers


def base(path: str) -> Any:
    """The model in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def adapter(*, model: str, out: str, settings: dict[str, Any]) -> None:
    """Write an adapter whose B is not zero."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base(model), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_" in name:
                parameter.normal_(std=0.05)
            elif "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "magnitude" in name:
                parameter.mul_(1.1)
    adapted.save_pretrained(out)


def logits(*, model: str, out: str, tokens: list[int], adapter: str = "") -> None:
    """Write the logits of tokens."""
    found = base(model)
    if adapter:
        found = peft.PeftModel.from_pretrained(found, adapter).eval()
    with torch.inference_mode():
        np.save(out, found(torch.tensor([tokens])).logits[0].float().numpy())


def values(*, model: str, out: str, texts: list[list[int]]) -> None:
    """Write the values of texts, by a sequence classifier with one label, of all texts at once."""
    found: Any = transformers.AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    longest = max(map(len, texts))
    padding = found.config.pad_token_id
    rows = [text + [padding] * (longest - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
    with torch.inference_mode():
        np.save(out, found(torch.tensor(rows), attention_mask=torch.tensor(mask)).logits[:, 0].float().numpy())


KINDS: dict[str, Callable[..., None]] = {"adapter": adapter, "logits": logits, "values": values}

if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        KINDS[job.pop("kind")](**job)
