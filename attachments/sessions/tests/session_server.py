"""A server with a fake engine that records sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from msgspec import structs

from attachments.sessions.groups import SessionGroup, SessionGroups
from attachments.sessions.sections import HttpSessions
from attachments.sessions.sessions import Sessions
from protocols.accounting import Balance
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, server_context, serving

LIFE = "a1b2"
FIXED = {"max_tokens": 4, "ignore_eos": True}
"""Answers of four tokens without an end token, which the fake template repeats as they were sampled."""


class SessionTokenizer(CharacterTokenizer):
    """A capital letter is a further token with the text of the small letter, and a tilde has no text."""

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """Return the text."""
        return super().decode(tokens, skip_special_tokens=skip_special_tokens).lower().replace("~", "")


class SessionServer:
    """The server, its sessions and their groups of two members. now: the time of sessions."""

    def __init__(self, *, saved: Balance | None = None, **settings: Any) -> None:
        self.now = 1000.0
        self.groups = SessionGroups(size=2, clock=lambda: self.now)
        self.sessions = Sessions(
            HttpSessions(**settings),
            self.groups,
            life=LIFE,
            tokenizer=SessionTokenizer(),
            context_length=CONTEXT,
            saved=saved,
            clock=lambda: self.now,
        )
        self.served: Served

    async def chat(
        self, *turns: str, session: str = "", user: str = "", label: str = "", temperature: float = 1.0, **fields: Any
    ) -> Any:
        """Return the answer to a conversation of OpenAI's client, with its headers."""
        roles = ("user", "assistant")
        client = self.served.openai.with_options(api_key=f"any:{label}" if label else "any")
        return await client.chat.completions.with_raw_response.create(
            model="policy",
            messages=[{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)],  # type: ignore[misc]
            temperature=temperature,
            extra_headers={"X-Clotho-Session": session} if session else {},
            extra_body={**FIXED, **fields, **({"user": user} if user else {})},
        )

    async def answer(self, *turns: str, **fields: Any) -> str:
        """Return the text of the answer."""
        return str((await self.chat(*turns, **fields)).parse().choices[0].message.content)

    async def receipt(self, session: str, **fields: Any) -> str:
        """Return the receipt of an answer of a session."""
        return str((await self.chat("hi", session=session, **fields)).headers["x-clotho-receipt"])

    async def post(self, **body: Any) -> httpx.Response:
        """Post to /v1/rewards."""
        return await self.served.http.post("/v1/rewards", json=body)

    async def refusal(self, **body: Any) -> tuple[int, str]:
        """Post what is refused, and return the status and the reason, which was counted."""
        before = self.sessions.counts.refused.total()
        answer = await self.post(**body)
        assert answer.status_code >= 400, answer.text
        code = str(answer.json()["error"]["code"])
        assert self.sessions.counts.refused.total() == before + 1
        return answer.status_code, code

    async def group(self) -> SessionGroup:
        """Return the next group, which is complete."""
        found = await self.groups.next(0.0)
        assert found is not None
        return found


@asynccontextmanager
async def session_server(
    monkeypatch: pytest.MonkeyPatch, *, server: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[SessionServer]:
    """Serve; `server` are keys of [server], others of [sessions]."""
    found = SessionServer(**settings)

    def with_sessions(served: Served, **keys: Any) -> Any:
        return structs.replace(server_context(served, **keys), sample_log=found.sessions, record_supports=True)

    monkeypatch.setattr("tests.serving.running_server.server_context", with_sessions)
    async with serving(**(server or {})) as found.served:
        yield found
