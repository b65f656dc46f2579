"""Clients of atroposlib for a test. The script runs in an interpreter that has atroposlib.

    python atroposlib_clients.py URL TOKENIZER CHECK...

prints one JSON object with the result of each check as the last line.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

GROUP = 16
SAMPLING = {"temperature": 0.8, "top_k": 40, "max_tokens": 48}


class Clients:
    """Creates clients of every type; each has its own label."""

    def __init__(self, url: str, tokenizer: str) -> None:
        handling = "atroposlib.envs.server_handling"
        self._config = importlib.import_module(f"{handling}.server_baseline").APIServerConfig
        self._manager = importlib.import_module(f"{handling}.server_manager").ServerManager
        self._url, self._tokenizer = url, tokenizer
        self.number = 0

    @property
    def question(self) -> list[dict[str, str]]:
        """Return a conversation that no other check uses."""
        first = 10 + self.number
        return [{"role": "user", "content": f"What comes next? {first}, {first + 6}, {first + 12}, {first + 18}"}]

    def manager(self, kind: str, label: str) -> Any:
        """Return atroposlib's ServerManager with one server of this type."""
        config = self._config(
            # This type's client takes the tokenizer from the model's name, which it does not send.
            model_name=self._tokenizer if kind == "trl" else "policy",
            tokenizer_name=self._tokenizer,
            base_url=f"{self._url}/v1",
            api_key=f"any:{label}",
            server_type=kind,
        )
        return self._manager([config])

    async def managed(self, kind: str, label: str, conversations: int = 1, **asked: Any) -> dict[str, Any]:
        """Sample a group with managed_server; `conversations` is the number of turns."""
        messages = self.question
        async with self.manager(kind, label).managed_server() as managed:
            for turn in range(conversations):
                answer = await managed.chat_completion(messages=messages, **{**SAMPLING, **asked})
                content = answer.choices[0].message.content
                if turn + 1 < conversations:
                    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Again."}]
            return {
                "nodes": [node.model_dump() for node in managed.get_state()["nodes"]],
                "reasons": [choice.finish_reason for choice in answer.choices],
                "texts": [choice.message.content for choice in answer.choices],
            }

    async def group(self, kind: str) -> dict[str, Any]:
        """Sample a group in one request."""
        return await self.managed(kind, f"{kind}-group", n=GROUP)

    async def stopped(self, kind: str) -> dict[str, Any]:
        """Sample with a stop string."""
        return await self.managed(kind, f"{kind}-stopped", n=4, stop=["answer"], max_tokens=500)

    async def turns(self, kind: str) -> dict[str, Any]:
        """Sample two turns; the first ends with the end token."""
        for _ in range(50):
            seen = await self.managed(kind, f"{kind}-turns", 2, max_tokens=200)
            if seen["nodes"][0]["masked_tokens"].count(2) >= 1:
                return seen
        raise AssertionError("no answer ended by itself")

    async def raw(self, kind: str) -> dict[str, Any]:
        """Sample tokens and log-probabilities without a managed server."""
        asked = await self.manager(kind, f"{kind}-raw").tokens_and_logprobs_completion(
            prompt=f"{self.number}, 2, 3,", n=GROUP, **{**SAMPLING, "max_tokens": 6}
        )
        return dict(zip(("prompt", "tokens", "logprobs", "reasons"), asked, strict=True))

    async def text(self, kind: str) -> dict[str, Any]:
        """Sample text from both OpenAI endpoints."""
        manager = self.manager(kind, f"{kind}-text")
        keys = {"temperature": 0.8, "max_tokens": 12}
        chat = await manager.chat_completion(messages=self.question, n=GROUP, **keys)
        plain = await manager.completion(prompt=f"{self.number}, 2, 3,", n=4, **keys)
        return {
            "chat": [choice.message.content for choice in chat.choices],
            "plain": [choice.text for choice in plain.choices],
            "reasons": [choice.finish_reason for choice in (*chat.choices, *plain.choices)],
            "n_is_ignored": manager.servers[0].config.n_kwarg_is_ignored,
        }

    async def scored(self, kind: str) -> dict[str, Any]:
        """Score a prompt with alternatives."""
        async with self.manager(kind, f"{kind}-scored").managed_server() as managed:
            found: dict[str, Any] = await managed.get_logprobs(messages=self.question, top_k=3)
            return found

    async def healthy(self, kind: str) -> dict[str, Any]:
        """Run the health check until it succeeds."""
        server = self.manager(kind, f"{kind}-healthy").servers[0]
        server.server_healthy = False
        loop = asyncio.create_task(server.check_server_status_task())
        while not server.server_healthy:  # noqa: ASYNC110 - Atropos sets a flag, and tells nobody
            await asyncio.sleep(0.01)
        loop.cancel()
        return {"healthy": server.server_healthy}


async def main(url: str, tokenizer: str, checks: list[str]) -> None:
    """Run the checks `kind-method` one after the other."""
    clients = Clients(url, tokenizer)
    seen = {}
    for clients.number, check in enumerate(checks):
        kind, what = check.split("-")
        run: Callable[[str], Awaitable[dict[str, Any]]] = getattr(clients, what)
        seen[check] = await run(kind)
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
