"""POST /tokenize and /detokenize and GET /tokenizer_info, in vLLM's forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import CONTEXT, serving

HELLO = [{"role": "user", "content": "hi"}]


async def test_a_text_becomes_tokens() -> None:
    """`token_strs` is null unless requested."""
    async with serving() as served:
        found = (await served.post("/tokenize", prompt="abc", model="policy")).json()
        tokens = list(CharacterTokenizer().encode("abc"))
        assert found == {"count": 3, "max_model_len": CONTEXT, "tokens": tokens, "token_strs": None}
        named = (await served.post("/tokenize", prompt="abc", return_token_strs=True)).json()
        assert named["token_strs"] == ["a", "b", "c"]


async def test_a_conversation_becomes_the_prompt_of_a_chat_request() -> None:
    """With and without the prompt for a new turn."""
    async with serving() as served:
        await served.post("/v1/chat/completions", messages=HELLO, max_tokens=1)
        found = (await served.post("/tokenize", messages=HELLO)).json()["tokens"]
        assert tuple(found) == served.engine.requests[0].prompt
        bare = (await served.post("/tokenize", messages=HELLO, add_generation_prompt=False)).json()["tokens"]
        assert tuple(bare) == CharacterTokenizer().render_chat(HELLO, add_generation_prompt=False)


async def test_tokens_become_text_with_special_tokens() -> None:
    """/detokenize inverts /tokenize, and names special tokens."""
    async with serving() as served:
        tokens = [*CharacterTokenizer().encode("abc"), END]
        assert (await served.post("/detokenize", tokens=tokens)).json() == {"prompt": "abc<end>"}
        assert (await served.post("/detokenize", tokens=[])).json() == {"prompt": ""}


async def test_a_client_can_ask_for_special_tokens_and_template() -> None:
    """A special token that the tokenizer lacks is null."""
    async with serving() as served:
        found = (await served.http.get("/tokenizer_info")).json()
        assert (found["eos_token"], found["bos_token"]) == ("<end>", None)
        assert found["chat_template"] == CharacterTokenizer.chat_template
        assert found["model_max_length"] == CONTEXT


@pytest.mark.parametrize(
    ("route", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"), ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"), ("/tokenize", {"prompt": "a", "unknown": 1}, 400, "unknown"),
        ("/tokenize", {"prompt": "a" * 10_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "/etc/passwd"}, 404, "model"), ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [97]}, 400, "tokens"), ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model"),
    ],
)  # fmt: skip
async def test_an_invalid_request_is_refused(route: str, fields: dict[str, Any], status: int, param: str) -> None:
    """The error names the field."""
    async with serving() as served:
        answer = await served.post(route, **fields)
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == param
