"""The settings of a reward model, in `[rewards.settings]`."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from attachments.reward_model import NAME
from clotho.settings.bounds import NonNegativeFloat, Positive
from clotho.settings.model import Dtype
from protocols.errors import ProfileError


class NetworkSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """model: directory or hub repository of the classifier. dtype, chat_template: as in `[model]`.

    micro_batch_tokens: padded tokens of a forward pass. max_turn_ms: longest turn beside decoding; 0: no limit.
    """

    model: str
    dtype: Dtype = "auto"
    chat_template: str = ""
    micro_batch_tokens: Positive = 1024
    max_turn_ms: NonNegativeFloat = 250.0


def settings_of(given: object) -> NetworkSettings:
    """Return the settings of a table. Raises ProfileError."""
    try:
        return msgspec.convert(given, NetworkSettings)
    except msgspec.ValidationError as error:
        raise ProfileError(f'rewards.settings of "{NAME}": {error}; it needs model = "PATH or OWNER/NAME"') from error
