"""The client of `mlx_lm.server`: its responses are checked, and a process that does not start is an error of it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from attachments.remote import mlx_server as module
from attachments.remote.messages import ServedPolicy
from attachments.remote.mlx_server import MlxServer
from attachments.remote.server import RemoteFailure
from attachments.remote.tests.inference_server import group
from attachments.remote.weights import Weights
from protocols.checkpoint import AdapterConfig
from protocols.errors import ProfileError, RequestError
from protocols.sampling import Sampling
from protocols.step import WeightsReady

END = 9
UNSTARTED = ServedPolicy(
    version=-1, step=-1, fingerprint="", run_id="run", layout="l", vocab_size=10, context_length=64
)
ANSWER: list[dict[str, Any]] = [{"id": 3, "logprob": -0.5}, {"id": END, "logprob": -1.5}]


class Letters:
    """A tokenizer: token i is letter i, and every text begins with the added token 0. A token above 25 has no text."""

    eos_ids = frozenset({END})

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens."""
        return (0, *(ord(letter) - 97 for letter in text))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text."""
        return "".join(chr(97 + token) for token in tokens if token < 26 and not (skip_special_tokens and token == 0))


async def unchanged(parameters: object) -> tuple[object, AdapterConfig]:
    """Return the parameters."""
    return parameters, AdapterConfig(fine_tune_type="full", num_layers=-1)


def client(directory: Path, transport: httpx.AsyncBaseTransport | None = None, **changes: Any) -> MlxServer:
    """Return the client of a server that has not been started."""
    settings: dict[str, Any] = {
        "url": "http://127.0.0.1:8080", "model": directory, "tokenizer": Letters(), "loadable": unchanged,
        "unstarted": UNSTARTED, "directory": directory / "remote", "concurrency": 8, "start_seconds": 60.0,
        "timeout_seconds": 60.0, "transport": transport,
    }  # fmt: skip
    return MlxServer(**(settings | changes))


def answering(content: object, status: int = 200, seen: list[Any] | None = None) -> httpx.MockTransport:
    """Return a connection to a server that always gives the same response."""

    def respond(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(msgspec.json.decode(request.content))
        return httpx.Response(status, json=content)

    return httpx.MockTransport(respond)


def answer(tokens: list[dict[str, Any]], reason: str = "stop") -> dict[str, Any]:
    """Return the body of a response of /v1/completions."""
    return {"choices": [{"index": 0, "finish_reason": reason, "text": "", "logprobs": {"content": tokens}}]}


async def test_a_group_is_one_request_per_seed(tmp_path: Path) -> None:
    """The prompt is the text to which the server adds the first token again; the end token is part of the tokens."""
    seen: list[Any] = []
    server = client(tmp_path, answering(answer(ANSWER), seen=seen))
    found = await server.sample(
        group(rows=2, prompt=(0, 4, 5), sampling=Sampling(max_tokens=6, logit_bias=((7, 2.0),)))
    )
    body = {"prompt": "ef", "max_tokens": 6, "temperature": 1.0, "logprobs": True, "logit_bias": {"7": 2.0}}
    assert seen == [body, body]
    completion = found.completions[0]
    assert (completion.tokens, completion.logprobs, completion.versions) == ((3, END), (-0.5, -1.5), (-1, -1))
    assert (completion.text, completion.finish_reason, found.fingerprints) == ("d", "stop", {-1: ""})


async def test_a_prompt_whose_text_has_other_tokens_is_refused(tmp_path: Path) -> None:
    """No server could sample it, so that no other server is asked."""
    with pytest.raises(RequestError) as refused:
        await client(tmp_path, answering(answer(ANSWER))).sample(group(prompt=(0, 30)))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("text", 200), (answer([]), 200), (answer([{"id": 3, "logprob": -0.5}]), 200),
        (answer([{"id": 3, "logprob": -0.5}] * 7, "length"), 200), (answer([{"id": -1, "logprob": -0.5}]), 200),
        (answer([{"id": 2**31, "logprob": -0.5}, *ANSWER]), 200), (answer([{"id": END}]), 200), ({"choices": []}, 200),
        ({"error": "no"}, 404),
    ],
    ids=[
        "no object", "no token", "no end", "too long", "negative token", "large token", "no logprob", "no choice",
        "404",
    ],
)  # fmt: skip
async def test_a_wrong_response_is_a_failure_of_the_server(tmp_path: Path, content: object, status: int) -> None:
    """No part of it is used."""
    with pytest.raises(RemoteFailure):
        await client(tmp_path, answering(content, status)).sample(group(prompt=(0, 4), sampling=Sampling(max_tokens=6)))


@pytest.mark.parametrize("url", ["http://127.0.0.1", "https://127.0.0.1:8080", "http://192.0.2.1:8080"])
def test_a_server_that_the_run_cannot_start_is_refused(tmp_path: Path, url: str) -> None:
    """It must be a loopback address with a port."""
    with pytest.raises(ProfileError, match="server_url"):
        client(tmp_path, url=url)


def port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
        return number


WEIGHTS = Weights(ready=WeightsReady(version=1, step=1, fingerprint="f"), parameters={})


async def test_a_process_that_ends_is_a_failure_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not started any more afterwards."""
    monkeypatch.setattr(module, "START", (sys.executable, "-c", "print('first'); raise SystemExit('no model')"))
    server = client(tmp_path, url=f"http://127.0.0.1:{port()}")
    with pytest.raises(RemoteFailure, match="no model"):
        await server.push(WEIGHTS)
    assert await server.served() == UNSTARTED
    await server.close()


async def test_a_server_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    """Otherwise its completions would be taken for those of the new weights."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = client(tmp_path, url=f"http://127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(RemoteFailure, match="another program"):
            await server.push(WEIGHTS)
        await server.close()
