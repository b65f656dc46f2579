"""Quotas of API keys: requests in flight, queued tokens, and tokens per minute."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attachments.keys.api_keys import ApiKey, KeyLimits
from clotho.serving.auth import ClientKey, Reservation
from clotho.serving.errors import ApiError

RETRY_SECONDS = 1
"""`Retry-After` of a refusal whose end depends on other requests."""


def limited(key: ApiKey) -> ClientKey:
    """Return a key with a quota that nothing has used."""
    return ClientKey(name=key.name, digest=key.digest, admin=key.admin, quota=Quota(key.limits))


class Quota:
    """What the requests of one key use, within its limits. All methods belong to the event loop.

    Tokens per minute are a token bucket: it holds at most the tokens of one minute and fills up evenly. A request takes
    the most tokens that it can use (prompt and maximum completions) when it is validated, and returns the unused ones
    when it has finished. A request that is aborted or fails returns none.

    refused: number of refused requests by limit.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        self._limits, self._clock = limits, clock
        self._requests = self._queued = 0
        self._allowance, self._updated = float(limits.tokens_per_minute or 0), clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request from its arrival to its end. Raises ApiError with status 429."""
        limit = self._limits.max_requests
        if limit is not None and self._requests >= limit:
            raise self._refusal("max_requests", f"{self._requests} requests are in progress, of at most {limit}")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[Reservation]:
        """Count tokens of a request until its end. Raises ApiError with status 429, or 400 if they never fit."""
        self._take(tokens)
        reservation = Reservation()
        self._queued += tokens
        try:
            yield reservation
        finally:
            self._queued -= tokens
            self._allowance += reservation.unused

    def _take(self, tokens: int) -> None:
        for name in ("max_queued_tokens", "tokens_per_minute"):
            limit = getattr(self._limits, name)
            if limit is not None and tokens > limit:
                message = f"The prompt and max_tokens are {tokens} tokens; this key is limited to {limit} ({name})."
                raise ApiError(400, message, code="request_too_large")
        limit = self._limits.max_queued_tokens
        if limit is not None and self._queued + tokens > limit:
            detail = f"{self._queued} tokens are queued and {tokens} requested, of at most {limit}"
            raise self._refusal("max_queued_tokens", detail)
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        now = self._clock()
        self._allowance = min(per_minute, self._allowance + (now - self._updated) * per_minute / 60)
        self._updated = now
        if (missing := tokens - self._allowance) > 0:
            detail = f"{tokens} tokens are requested, and {int(self._allowance)} of {per_minute} per minute are left"
            raise self._refusal("tokens_per_minute", detail, math.ceil(missing * 60 / per_minute))
        self._allowance -= tokens

    def _refusal(self, limit: str, detail: str, seconds: int = RETRY_SECONDS) -> ApiError:
        self.refused[limit] += 1
        return ApiError(
            429,
            f"Rate limit of this key reached ({limit}): {detail}. Try again in {seconds} s.",
            code="rate_limit_exceeded",
            error_type="requests" if limit == "max_requests" else "tokens",
            headers={"retry-after": str(seconds)},
        )
