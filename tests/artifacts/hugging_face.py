"""Runs transformers and PEFT, which are not installed beside the project.

python hugging_face.py logits MODEL ADAPTER OUT.npy TOKEN...    ADAPTER may be "none"
python hugging_face.py adapter MODEL OUT_DIRECTORY SETTING...   a new random adapter, settings of LoraConfig as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import peft
import torch
import transformers


def base(path: str) -> Any:
    """The model in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def logits(path: str, adapter: str, out: str, *tokens: str) -> None:
    """Write the logits of tokens."""
    model = base(path)
    if adapter != "none":
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        found = model(torch.tensor([[int(token) for token in tokens]])).logits[0]
    np.save(out, found.float().numpy())


def adapter(path: str, out: str, settings: str) -> None:
    """Write an adapter whose B is not zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base(path), peft.LoraConfig(task_type="CAUSAL_LM", **json.loads(settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
            elif "magnitude" in name:
                parameter.mul_(1.1)
    model.save_pretrained(out)


if __name__ == "__main__":
    if sys.argv[1] == "logits":
        logits(*sys.argv[2:])
    else:
        adapter(*sys.argv[2:])
