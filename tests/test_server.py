"""The server of a sampler, in a thread, for ordinary clients."""

from __future__ import annotations

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import clotho
from protocols.errors import ServerError
from tests.library_policy import SAMPLING, groups, policy


def post(url: str, body: dict[str, object], key: str = "") -> tuple[dict[str, object], int]:
    """Return an answer, and the version of the weights that it names."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response), int(response.headers["x-clotho-weights-version"])


def test_clients_are_answered_with_the_published_weights() -> None:
    """The sampler itself is used meanwhile."""
    learner = clotho.Learner(policy(), learning_rate=0.01, sampling=SAMPLING)
    body = {"model": "student", "prompt": "What is 2 + 3?", "max_tokens": 4, "logprobs": 1, "echo": True}
    with clotho.Sampler(policy()) as sampler, clotho.serve(sampler, port=0, model_name="student") as server:
        answer, version = post(f"{server.url}/v1/completions", body)
        assert (answer["model"], version) == ("student", 0)
        learner.update(groups())
        sampler.publish(learner)
        assert sampler.sample([policy().chat("2?")], SAMPLING)
        chat = {"model": "student", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 4}
        assert post(f"{server.url}/v1/chat/completions", chat)[1] == 1
        with urlopen(f"{server.url}/health") as response:
            health = json.load(response)
        assert (health["status"], health["weights_version"]) == ("ok", 1)
        assert health["fingerprint"] == learner.fingerprint
        with urlopen(f"{server.url}/metrics") as response:
            assert b"clotho" in response.read()


def test_a_server_wants_its_key() -> None:
    """Without it, clients are refused."""
    body = {"model": "policy", "prompt": "1", "max_tokens": 1}
    with clotho.Sampler(policy()) as sampler, clotho.serve(sampler, port=0, api_key="secret") as server:
        assert post(f"{server.url}/v1/completions", body, key="secret")
        with pytest.raises(HTTPError) as caught:
            post(f"{server.url}/v1/completions", body)
        with caught.value as refusal:
            assert refusal.code == 401


def test_an_address_that_cannot_be_bound_is_a_server_error() -> None:
    """Also one that other machines could reach without a key."""
    with clotho.Sampler(policy()) as sampler, clotho.serve(sampler, port=0) as server:
        with pytest.raises(ServerError):
            clotho.serve(sampler, port=int(server.url.rsplit(":", 1)[1]))
        with pytest.raises(ServerError):
            clotho.serve(sampler, host="0.0.0.0", port=0)
        server.close()  # the end of the block closes it once more
