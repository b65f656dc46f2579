"""A tokenizer with chat templates that have one fault each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from clotho.models.tokenizer import ChatTokenizer

EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"

TURNS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + CONTENT + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + OPENED }}{%- endif %}"
)


def written(content: str = "message['content']", opened: str = "''") -> str:
    """Return a template that writes this expression for the content, and this one at the end of the prompt."""
    return TURNS.replace("CONTENT", content).replace("OPENED", opened)


HEALTHY = written()
OPENS_THINK = written(opened="'<think>'")
THINKS_UNLESS_TOLD = written(opened="('' if thinking is defined and not thinking else '<think>')")
DROPS_THINKING = written("message['content'].split('</think>')[-1]")
REWRITES = written("(message['content'] if loop.last else message['content'] ~ '!')")


def tokenizer(
    template: str = HEALTHY, *, eos: str = "<|im_end|>", variables: Mapping[str, Any] | None = None
) -> ChatTokenizer:
    """Return the tokenizer of the embedded model with another template, its variables, or another end token."""
    found = AutoTokenizer.from_pretrained(EMBEDDED, local_files_only=True)
    found.eos_token = eos
    return ChatTokenizer(found, template=template, variables=variables or {})


def embedded() -> ChatTokenizer:
    """Return the tokenizer of the embedded model as a run loads it."""
    return ChatTokenizer.from_files(EMBEDDED)
