"""Requests that are not valid are refused: the server neither fails nor computes anything else afterwards."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import mlx.core as mx
import pytest

from attachments.tinker.proto import message_class
from attachments.tinker.tests.tinker_server import PREFIX, Client, Live, chunks, datum, logprobs_of, tinker_server
from attachments.tinker.wire import PROTOBUF
from tests import saved_models

TOKENS = [3, 9, 12, 7, 20, 5]
JUNK: list[Any] = [
    None, -1, 2**70, 1e300, True, "", "x" * 300, "tinker://a/b/c", "../..", [], [[]], {}, {"a": 1}, "\x00",
]  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of all tests of the module."""
    directory = tmp_path_factory.mktemp("mutated")
    saved_models.save(directory / "model", dtype=mx.float32)
    flags = ("--server.tinker.max-bytes", "22000000")
    with tinker_server(directory / "model", directory / "saved", *flags) as live:
        yield live


def bodies(client: Client, model_id: str, sampler: str) -> dict[str, dict[str, Any]]:
    """Return a body of each route that computes or keeps something."""
    given = {"data": [datum(TOKENS)], "loss_fn": "cross_entropy"}
    session = {"session_id": client.session}
    return {
        "create_session": {"sdk_version": "x", "tags": ["a"]},
        "create_model": {**session, "model_seq_id": 7, "base_model": "policy", "lora_config": {"rank": 2, "seed": 1}},
        "get_info": {"model_id": model_id},
        "forward_backward": {"model_id": model_id, "forward_backward_input": given, "seq_id": 1},
        "forward": {"model_id": model_id, "forward_input": given},
        "optim_step": {"model_id": model_id, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9}},
        "save_weights": {"model_id": model_id, "path": "a", "ttl_seconds": 60, "overwrite": True},
        "save_weights_for_sampler": {"model_id": model_id, "sampling_session_seq_id": 3},
        "load_weights": {"model_id": model_id, "path": "tinker://a/weights/b", "optimizer": True},
        "create_sampling_session": {**session, "sampling_session_seq_id": 2, "base_model": "policy"},
        "asample": {
            "sampling_session_id": sampler,
            "prompt": chunks(TOKENS),
            "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "stop": ["a"]},
            "num_samples": 2,
        },
        "retrieve_future": {"request_id": "a:b"},
        "weights_info": {"tinker_path": "tinker://a/weights/b"},
    }


def mutated(body: Any, random: Random) -> Any:
    """Return a body with something removed, or replaced by junk, at any depth."""
    found = copy.deepcopy(body)
    place: Any = found
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = random.choice(keys)
        inside = place[key]
        if isinstance(inside, dict | list) and inside and random.random() < 0.7:
            place = inside
            continue
        if isinstance(place, dict) and random.random() < 0.2:
            del place[key]
        else:
            place[key] = random.choice(JUNK)
        return found


def protobuf(model_id: str) -> bytes:
    """Return a valid request."""
    message = message_class("ForwardBackwardRequest")(model_id=model_id, loss_fn="cross_entropy", forward_only=True)
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = b"".join(token.to_bytes(4, "little") for token in TOKENS[:-1])
    target = row.loss_fn_inputs["target_tokens"]
    target.dense = b"".join(token.to_bytes(8, "little") for token in TOKENS[1:])
    target.dtype, target.shape[:] = 2, [len(TOKENS) - 1]
    content: bytes = message.SerializeToString()
    return content


def damaged(content: bytes, random: Random) -> bytes:
    """Return a message with some bytes changed, removed or added."""
    found = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found))
        found[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
    return bytes(found) or b"\x00"


def test_names_that_are_no_text_are_refused(live: Live) -> None:
    """Protobuf checks text when it is read, not when it arrives."""
    client = live.client()
    content, headers = protobuf(client.model("policy", rank=2)), {"content-type": PROTOBUF}
    for name in (b"target_tokens", b"cross_entropy"):
        damaged = content.replace(name, b"\xf8" + name[1:])
        answer = client.http.post(f"{PREFIX}/forward_backward", content=damaged, headers=headers)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_requests_are_refused(live: Live, count: int) -> None:
    """With a status of the client, unless they are still valid. A valid request then has the answer that it had."""
    client, random, statuses = live.client(), Random(count), Counter[int]()
    model_id = client.model("policy", rank=2, seed=1)
    sampler = client.sampler(model_id)
    given = bodies(client, model_id, sampler)
    before = logprobs_of(client.forward(model_id, [datum(TOKENS)]))
    valid = protobuf(model_id)
    for number in range(count):
        if number % 3 == 2:
            headers = {"content-type": PROTOBUF}
            answer = client.http.post(f"{PREFIX}/forward_backward", content=damaged(valid, random), headers=headers)
        else:
            route = random.choice(list(given))
            content = json.dumps(mutated(given[route], random))
            answer = client.http.post(
                f"{PREFIX}/{route}", content=content, headers={"content-type": "application/json"}
            )
        assert answer.status_code < 500, answer.text
        statuses[answer.status_code // 100] += 1
    assert statuses[4] > count / 2
    fresh = client.model("policy", rank=2, seed=1)
    assert logprobs_of(client.forward(fresh, [datum(TOKENS)])) == before
