"""Write a model directory for the servers: every server loads the same files, and no response ends early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mlx_lm.utils import save_config, save_model

from bench.contenders.shapes import DIRECTORY, EMBEDDED, named_model

NEVER_SAMPLED = "<|endoftext|>"
"""A padding token that the policy does not sample."""
VOCABULARY = 384
"""Vocabulary size of the embedded tokenizer."""


def write_model(name: str, target: Path) -> Path:
    """Write a model of `bench.contenders.shapes` with the embedded tokenizer.

    The end token is one that is never sampled, so that all responses have the requested length; only random weights
    sample it occasionally. Thinking tags are renamed to ordinary text, because some servers remove them from responses.
    """
    shutil.copytree(DIRECTORY, target)
    if name != EMBEDDED:
        model, config = named_model(name, vocabulary=VOCABULARY)
        save_model(target, model)
        save_config(config, target / "config.json")
    for file in ("config.json", "generation_config.json"):
        _change(target / file, eos_token_id=0)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        _change(target / file, eos_token=NEVER_SAMPLED)
    tokenizer = target / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8").replace("<think>", "<work>").replace("</think>", "</work>")
    tokenizer.write_text(text, encoding="utf-8")
    return target


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
