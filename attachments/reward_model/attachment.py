"""The reward model of a run in the estimate of memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attachments.reward_model import NAME
from clotho.settings.model import ModelSection

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile


REWARD_PATHS = {NAME: {"model": "model", "chat_template": "input"}}


def check(profile: Profile) -> None:
    """Raise ProfileError for settings that are not valid."""
    for reward in profile.rewards:
        if reward.name == NAME:
            from attachments.reward_model.settings import settings_of

            settings_of(reward.settings)


def memory(need: MemoryNeed) -> None:
    """Hold the weights of each."""
    for reward in need.profile.rewards if need.profile is not None else ():
        if reward.name == NAME:
            from attachments.reward_model.classifier import open_classifier
            from attachments.reward_model.settings import settings_of

            settings = settings_of(reward.settings)
            section = ModelSection(path=settings.model, dtype=settings.dtype)
            need.models.append(partial(open_classifier, section, read_weights=False))
