"""The settings of speculation in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import Off, Positive, Variant, about
from clotho.settings.mounted import Setting


class Drafts(Variant, frozen=True, kw_only=True):
    """Where the drafts of speculation come from."""

    max_draft: Annotated[int, about("Maximum number of tokens of a draft.", ge=1, le=32)] = 6


class HistoryDrafts(Drafts, frozen=True, kw_only=True, tag="history"):
    """Drafts are earlier rollouts of the same prompt."""

    stored_tokens: Annotated[Positive, about("Tokens of earlier rollouts that are stored.")] = 2_097_152


class PromptDrafts(Drafts, frozen=True, kw_only=True, tag="prompt"):
    """Drafts are what followed the same tokens earlier in the prompt or the completion."""


class ModelDrafts(Drafts, frozen=True, kw_only=True, tag="model"):
    """Drafts are samples of a smaller model with the same tokens."""

    path: Annotated[str, about("Draft model: model directory, GGUF file or hub repository.", min_length=1)]


Speculation = Annotated[
    Off | HistoryDrafts | PromptDrafts | ModelDrafts, about("Several tokens per forward pass, from drafts.")
]

SPECULATION = Setting[Off | HistoryDrafts | PromptDrafts | ModelDrafts](
    path="engine.speculation",
    kind=Speculation,
    default=Off(),
    attachment="speculation",
    paths={"engine.speculation.path": "model"},
)

SETTINGS = (SPECULATION,)
