"""The settings of sessions in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import Off, Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting


class HttpSessions(Variant, frozen=True, kw_only=True, tag="http"):
    """Groups come from sessions of HTTP clients, rewarded at /v1/rewards; evaluation does not change."""

    max_tokens: Annotated[int, about("Answers that end behind so many tokens are not trained on.", ge=2)] = 2048
    max_open: Annotated[Positive, about("Sessions without a reward; one more drops the one idle longest.")] = 1024
    max_kept_mib: Annotated[
        Positive, about("MiB of tokens and routes that are kept; beyond them, the session idle longest is dropped.")
    ] = 256
    reward_seconds: Annotated[PositiveFloat, about("Time after the last answer until a session is dropped.")] = 86400.0


SESSIONS = Setting[Off | HttpSessions](
    path="sessions",
    kind=Annotated[Off | HttpSessions, about("Source of groups: data.train, or sessions of HTTP clients.")],
    default=Off(),
    attachment="sessions",
    after="environments",
)

SETTINGS = (SESSIONS,)
