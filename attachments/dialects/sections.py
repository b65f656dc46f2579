"""The settings of the control of the engine in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import about
from clotho.settings.mounted import Setting

ALLOW_PAUSE = Setting[bool](
    path="server.allow_pause",
    kind=Annotated[bool, about("Clients may pause the decode engine, and with it the rollouts.")],
    default=False,
    attachment="dialects",
    after="dashboard",
    unused_by=("serve",),
)

SETTINGS = (ALLOW_PAUSE,)
