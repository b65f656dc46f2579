"""A teacher behind a server: Clotho's or vLLM's `/v1/completions`, with the log-probabilities of prompts.

A completion behind its prompt is a prompt of the request, so that nothing but one ignored token is sampled. A request
that fails is repeated with growing pauses until the time limit of its group.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec
from msgspec import Struct

from attachments.distillation.sections import DistillationSection
from attachments.distillation.teacher import TeacherError, TeacherScores, Tokens
from clotho.settings.server import is_loopback
from protocols.errors import ProfileError, visible
from protocols.sampling import MIN_LOGPROB

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds between two attempts: doubled each time, with a random factor from 0.5 to 1."""

START_SECONDS = 10.0
"""Longest time for the answer to the probes, at the start of a run."""

MAX_SHOWN = 200
MASK = "***"


class ScoredToken(Struct, frozen=True):
    """One alternative of a position. logprob: in nats; null for minus infinity."""

    logprob: float | None = None


class ScoredPrompt(Struct, frozen=True):
    """A choice: for each token of its prompt but the first, alternatives by the number of the token."""

    index: int
    prompt_logprobs: list[dict[int, ScoredToken] | None]


class ScoredPrompts(Struct, frozen=True):
    """The fields of a response that are read."""

    choices: list[ScoredPrompt]


class ServedTeacher:
    """Scores a group with one request per attempt."""

    def __init__(self, settings: DistillationSection) -> None:
        """Raises ProfileError if the URL or the API key cannot be used."""
        parts = urlsplit(settings.teacher)
        if parts.username or parts.password:
            raise ProfileError("distillation.teacher contains a password; name a variable in distillation.api_key_env")
        self._key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""
        if settings.api_key_env and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise ProfileError(
                f"distillation.api_key_env: the environment variable {settings.api_key_env} is not set or contains "
                "more than printable ASCII"
            )
        base = settings.teacher.rstrip("/")
        self._url = f"{base if base.endswith('/v1') else f'{base}/v1'}/completions"
        self._settings, self._top = settings, settings.alternatives
        self._client: dict[str, Any] = {
            "headers": {"authorization": f"Bearer {self._key}"} if self._key else {},
            "timeout": settings.timeout_seconds,
            "trust_env": not is_loopback(parts.hostname or ""),
        }
        self.retries = 0

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of texts without the first of each, which has no log-probability. Blocks.

        Raises ProfileError if the server cannot be reached, refuses the request, or returns no log-probabilities.
        """
        try:
            with httpx.Client(**self._client | {"timeout": min(START_SECONDS, self._settings.timeout_seconds)}) as one:
                found = self._read(one.post(self._url, json=self._request(list(texts), 0)), len(texts))
        except httpx.HTTPError as error:
            text = self._masked(f"{type(error).__name__}: {error}")
            raise ProfileError(f"distillation.teacher {self._url} cannot be reached: {text}") from None
        except TeacherError as error:
            raise ProfileError(f"distillation.teacher: {error}") from None
        return [tuple(next(iter(position)) for position in one) for one in found]

    async def score(self, prompt: Tokens, completions: Sequence[Tokens]) -> list[TeacherScores]:
        """Score the completions of a prompt. Raises TeacherError."""
        request = self._request([[*prompt, *tokens] for tokens in completions], self._top)
        last, attempts, pause = "no request was finished", 0, FIRST_PAUSE
        with anyio.move_on_after(self._settings.timeout_seconds):
            async with httpx.AsyncClient(**self._client) as client:
                while True:
                    attempts += 1
                    try:
                        response = await client.post(self._url, json=request)
                    except httpx.TransportError as error:
                        last = self._masked(f"{type(error).__name__}: {error}")
                    else:
                        if response.status_code not in RETRIED:
                            found = self._read(response, len(completions))
                            return [self._scores(tokens, one) for tokens, one in zip(completions, found, strict=True)]
                        last = self._status(response)
                    self.retries += 1
                    await anyio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(LONGEST_PAUSE, 2 * pause)
        raise TeacherError(
            f"no answer from {self._url} within {self._settings.timeout_seconds:g} s and {attempts} attempts; the "
            f"last: {last}"
        )

    def _request(self, prompts: Sequence[str] | Sequence[list[int]], top: int) -> dict[str, Any]:
        named = {"model": self._settings.model} if self._settings.model else {}
        return {**named, "prompt": prompts, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}

    def _read(self, response: httpx.Response, prompts: int) -> list[list[dict[int, ScoredToken]]]:
        """Return the alternatives of each token but the first of each prompt. Raises TeacherError."""
        if response.status_code != 200:
            raise TeacherError(f"{self._url} refused the request: {self._status(response)}")
        try:
            choices = sorted(
                msgspec.json.decode(response.content, type=ScoredPrompts).choices, key=lambda one: one.index
            )
        except (ValueError, RecursionError) as error:
            raise TeacherError(f"{self._url} returned no prompt_logprobs: {error}") from None
        found = [[position or {} for position in one.prompt_logprobs[1:]] for one in choices]
        if len(found) != prompts or not all(all(one) for one in found):
            raise TeacherError(f"{self._url} returned no log-probability for some tokens of its prompts")
        return found

    def _scores(self, tokens: Tokens, positions: Sequence[dict[int, ScoredToken]]) -> TeacherScores:
        if len(positions) < len(tokens) or any(
            token not in position for token, position in zip(reversed(tokens), reversed(positions), strict=False)
        ):
            raise TeacherError(f"{self._url} scored other tokens than those of the request")
        own = positions[len(positions) - len(tokens) :]
        best = tuple(
            tuple(sorted(((k, _nats(one)) for k, one in position.items()), key=lambda pair: -pair[1])[: self._top])
            for position in own
            if self._top
        )
        if any(len(one) < self._top for one in best):
            raise TeacherError(f"{self._url} returned fewer than distillation.top_k = {self._top} alternatives")
        logprobs = tuple(_nats(position[token]) for token, position in zip(tokens, own, strict=True))
        return TeacherScores(logprobs=logprobs, best=best)

    def _status(self, response: httpx.Response) -> str:
        return f"status {response.status_code}: {visible(self._masked(response.text), MAX_SHOWN)}"

    def _masked(self, text: str) -> str:
        """Return a text without the API key, which a server may repeat in an error message."""
        return text.replace(self._key, MASK) if self._key else text


def _nats(one: ScoredToken) -> float:
    return MIN_LOGPROB if one.logprob is None else max(MIN_LOGPROB, one.logprob)
