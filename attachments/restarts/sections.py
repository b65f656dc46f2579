"""The setting of restarts in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import NonNegative, about
from clotho.settings.mounted import Setting

RESTARTS = Setting[int](
    path="restarts",
    kind=Annotated[
        NonNegative, about("How often the run is continued after a signal such as SIGABRT has ended its process.")
    ],
    default=0,
    attachment="restarts",
    after="steps",
    unused_by=("doctor",),
)

SETTINGS = (RESTARTS,)
