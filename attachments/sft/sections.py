"""The settings of demonstrations in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from clotho.settings.bounds import about
from clotho.settings.mounted import Setting

TrainOn = Literal["assistant", "last", "all", "text"]


class SftSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is learned of a record of `data.train` with `learner.objective = "sft"`."""

    train_on: Annotated[
        TrainOn,
        about(
            "Tokens that are learned: those of all answers, of the last one, or all of a conversation; text: the "
            "prompt column is a text without turns."
        ),
    ] = "assistant"
    max_tokens: Annotated[int, about("Tokens of a demonstration with its prompt; longer ones are cut.", ge=2)] = 2048


SFT = Setting[SftSection](path="sft", kind=SftSection, default=SftSection(), attachment="sft", after="learner")

SETTINGS = (SFT,)
