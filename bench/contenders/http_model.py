"""A model on disk for servers: what they load is the same, and it never ends an answer early on purpose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mlx_lm.utils import save_config, save_model

from bench.contenders.shapes import DIRECTORY, EMBEDDED, named_model

NEVER_DRAWN = "<|endoftext|>"
"""Padding while the policy learned: it does not draw it."""
VOCABULARY = 384
"""Of the tokenizer that ships with the project."""


def write_model(name: str, target: Path) -> Path:
    """Write a model of `bench.contenders.shapes` with the tokenizer that ships with the project.

    Answers end with a token that is never sampled, so that all are as long as asked; only random weights draw it at
    times. Marks of thinking are ordinary text under other names, for some servers take them out of the answer.
    """
    shutil.copytree(DIRECTORY, target)
    if name != EMBEDDED:
        model, config = named_model(name, vocabulary=VOCABULARY)
        save_model(target, model)
        save_config(config, target / "config.json")
    for file in ("config.json", "generation_config.json"):
        _change(target / file, eos_token_id=0)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        _change(target / file, eos_token=NEVER_DRAWN)
    tokenizer = target / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8").replace("<think>", "<work>").replace("</think>", "</work>")
    tokenizer.write_text(text, encoding="utf-8")
    return target


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
