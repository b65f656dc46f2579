"""The settings of the dashboard in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import ZeroIsOff, about
from clotho.settings.mounted import Setting

TOKEN_VALUES_MB = Setting[int](
    path="monitor.token_values_mb",
    kind=Annotated[ZeroIsOff, about("Limit of the per-token values in tokens/, in MiB; 0: none.")],
    default=64,
    attachment="dashboard",
    after="rollouts",
    unused_by=("eval", "serve"),
)

SETTINGS = (TOKEN_VALUES_MB,)
