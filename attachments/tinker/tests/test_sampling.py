"""Samplers: snapshots, weights in flight, and log-probabilities of the distribution that was sampled from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from tokenizers import Tokenizer

from attachments.tinker.samplers import ServedAdapter
from attachments.tinker.tests.tinker_server import Client, Live, chunks, datum, tinker_server
from clotho.serving import auth
from tests import saved_models

PROMPT = [3, 9, 12, 7]
DATA = [datum([3, 9, 12, 7, 20, 5]), datum([4, 4, 8])]
LIMIT = 2
ANYBODY = auth.Client(name="", is_admin=True, arrived=0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model."""
    directory = tmp_path_factory.mktemp("sampling")
    saved_models.save(directory / "model", dtype=mx.float32)
    return directory


@pytest.fixture(scope="module")
def live(place: Path) -> Iterator[Live]:
    """A server of all tests of the module, which keeps few adapters in memory."""
    with tinker_server(place / "model", place / "saved", "--server.tinker.max-samplers", str(LIMIT)) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Client:
    """A session of its own."""
    return live.client()


def train(client: Client, model_id: str, steps: int = 3) -> None:
    """Take some steps."""
    for _ in range(steps):
        client.gradient(model_id, DATA)
        client.step(model_id, learning_rate=1e-2)


def filtered_logp(logits_V: Any, temperature: float, top_p: float) -> Any:
    """Return the log-probabilities after temperature and top-p, in float64."""
    z_V = np.asarray(logits_V, dtype=np.float64) / temperature
    p_V = np.exp(z_V - z_V.max())
    p_V /= p_V.sum()
    order_V = np.argsort(-p_V, kind="stable")
    kept = order_V[: int(np.searchsorted(np.cumsum(p_V[order_V]), top_p)) + 1]
    q_V = np.zeros_like(p_V)
    q_V[kept] = p_V[kept] / p_V[kept].sum()
    with np.errstate(divide="ignore"):
        return np.log(q_V)


@pytest.mark.needs_float32("the differences are those of float32")
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probabilities_are_those_of_the_distribution_that_was_sampled_from(
    client: Client, place: Path, temperature: float
) -> None:
    """Temperature and top-p included, against the adapter as mlx-lm loads it."""
    model_id = client.model(str(place / "model"), rank=8)
    train(client, model_id)
    path = client.result("save_weights_for_sampler", model_id=model_id, path="now")["path"]
    number = {"session_id": client.session, "sampling_session_seq_id": 90, "model_path": path}
    sampler = client.post("create_sampling_session", **number)["sampling_session_id"]
    found = client.sample(sampler, PROMPT, num_samples=4, max_tokens=6, temperature=temperature, top_p=0.8, stop=[])
    run, kind, name = path.removeprefix("tinker://").split("/")
    adapter = place / "saved" / run.replace(":", "_") / kind / name
    model: Any = mlx_lm.load(str(place / "model"), adapter_path=str(adapter))[0]
    for sequence in found["sequences"]:
        tokens = [*PROMPT, *sequence["tokens"]]
        assert len(sequence["tokens"]) == 6
        logits_T_V = np.array(model(mx.array([tokens]))[0].astype(mx.float32))
        for t, (token, logprob) in enumerate(zip(sequence["tokens"], sequence["logprobs"], strict=True)):
            logp_V = filtered_logp(logits_T_V[len(PROMPT) - 1 + t], temperature, 0.8)
            assert logprob == pytest.approx(logp_V[token], abs=1e-4)


def test_a_seed_gives_equal_tokens(client: Client, place: Path) -> None:
    """Whatever else is sampled."""
    sampler = client.sampler(client.model(str(place / "model")))
    one, other = (client.sample(sampler, PROMPT, max_tokens=8, seed=5, stop=[]) for _ in range(2))
    assert one["sequences"][0]["tokens"] == other["sequences"][0]["tokens"]


def test_a_completion_ends_with_a_stop_token_or_a_stop_string(client: Client, place: Path) -> None:
    """Both belong to it. Without any, the model's end tokens do; with `top_k` = 1, the most probable are sampled."""
    sampler = client.sampler(client.model(str(place / "model")))

    def tokens(**fields: Any) -> tuple[list[int], str]:
        (one,) = client.sample(sampler, PROMPT, max_tokens=8, seed=5, **fields)["sequences"]
        return one["tokens"], one["stop_reason"]

    free, reason = tokens(stop=[])
    assert (len(free), reason) == (8, "length")
    words = Tokenizer.from_file(str(place / "model" / "tokenizer.json"))
    token = next(one for one in free[2:] if len(words.decode([one])) == 1)
    ended = (free[: free.index(token) + 1], "stop")
    assert [tokens(stop=stop) for stop in ([token], words.decode([token]), [words.decode([token])])] == [ended] * 3
    assert tokens(stop=[], top_k=1, temperature=1.3) == tokens(stop=[], temperature=0.0)
    many = client.sample(sampler, PROMPT, max_tokens=40, seed=5, num_samples=16)["sequences"]
    assert {one["tokens"][-1] for one in many if one["stop_reason"] == "stop"} == {words.token_to_id("<end>")}


def test_a_snapshot_keeps_its_weights(client: Client, place: Path) -> None:
    """Also after it has left the memory for the disk, because newer ones took its place."""
    model_id = client.model(str(place / "model"))
    first = client.sampler(model_id)
    scores = []
    for _ in range(LIMIT + 1):
        train(client, model_id, 2)
        scores.append(client.sample(client.sampler(model_id), PROMPT, max_tokens=1, prompt_logprobs=True))
    now = client.sample(first, PROMPT, max_tokens=1, prompt_logprobs=True)
    base = {"session_id": client.session, "sampling_session_seq_id": 80, "base_model": str(place / "model")}
    base_sampler = client.post("create_sampling_session", **base)["sampling_session_id"]
    expected = client.sample(base_sampler, PROMPT, max_tokens=1, prompt_logprobs=True)
    assert now["prompt_logprobs"][0] is None
    assert now["prompt_logprobs"][1:] == pytest.approx(expected["prompt_logprobs"][1:], abs=1e-5)
    assert scores[-1]["prompt_logprobs"][1:] != pytest.approx(expected["prompt_logprobs"][1:], abs=1e-3)


def loaded(live: Live) -> set[str]:
    """Return the sampling adapters that are in memory."""
    return {one.name for one in live.service.samplers._adapters.values() if one.weights is not None}


def test_an_adapter_that_nobody_samples_from_leaves_first(live: Live, place: Path) -> None:
    """The snapshots of a program that trains do not take the places of those that others sample from."""
    client, samplers = live.client(), live.service.samplers
    model_id = client.model(str(place / "model"))
    used = [client.sampler(model_id) for _ in range(LIMIT)]
    for _ in range(3):
        client.sampler(model_id)
        for sampler in reversed(used):
            client.sample(sampler, PROMPT, max_tokens=1)
        assert loaded(live) == {samplers.get(one, ANYBODY).weights for one in used}


def test_sessions_take_turns_to_load_adapters(live: Live, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for many does not make the others wait for all of them."""
    many, one = live.client(), live.client()
    adapters, samplers, order = [], live.service.samplers, list[str]()
    for client, count in ((many, LIMIT + 3), (one, LIMIT + 1)):
        model_id = client.model(str(place / "model"))
        adapters += [samplers.get(client.sampler(model_id), ANYBODY).adapter for _ in range(count)][: count - LIMIT]
    load = samplers._load

    async def recorded(adapter: ServedAdapter) -> None:
        order.append(adapter.session_id)
        await load(adapter)

    async def all_ready() -> None:
        await asyncio.gather(*(samplers.ready(one) for one in adapters if one is not None))

    monkeypatch.setattr(samplers, "_load", recorded)
    live.call(all_ready)
    assert order == [many.session, many.session, one.session, many.session]


def test_what_is_sampled_in_flight_has_the_version_of_each_token(client: Client, live: Live, place: Path) -> None:
    """Completions continue with newer weights, and say from which token on. Versions are steps of the optimizer."""
    model_id = client.model(str(place / "model"))
    sampler = client.sampler(model_id, kind="inflight")
    with ThreadPoolExecutor(1) as threads:
        other = live.client()
        other.session = client.session
        asked = threads.submit(lambda: other.sample(sampler, PROMPT, max_tokens=120, stop=[], num_samples=16))
        for _ in range(4):
            train(client, model_id, 1)
            client.sampler(model_id, kind="inflight")
        found = asked.result()
    versions = [sequence["versions"] for sequence in found["sequences"]]
    assert all(one == sorted(one) for one in versions)
    assert {version for one in versions for version in one} <= set(range(5))
    after = client.sample(sampler, PROMPT, max_tokens=3, stop=[])
    assert after["sequences"][0]["versions"] == [4, 4, 4]


def test_the_most_probable_tokens_of_prompt_and_completion(client: Client, place: Path) -> None:
    """The first is the greedy token, and only the last tokens of a prompt are scored if the client says so."""
    sampler = client.sampler(client.model(str(place / "model")))
    found = client.sample(
        sampler,
        PROMPT,
        max_tokens=2,
        temperature=0.0,
        stop=[],
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    )
    assert [one is None for one in found["prompt_logprobs"]] == [True, True, False, False]
    assert list(map(len, found["topk_prompt_logprobs"])) == [0, 0, 3, 3]
    (sequence,) = found["sequences"]
    assert [best[0][0] for best in sequence["topk_logprobs"]] == sequence["tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"record_stability_info": True}, "record_stability_info"), ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {}}, "target_prompt_logprobs"),
        ({"topk_prompt_logprobs": 50}, "topk_prompt_logprobs"), ({"num_samples": 10_000}, "num_samples"),
        ({"prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n"), ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"), ({"prompt": [3] * 10_000}, "prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_refused_by_its_name(
    client: Client, place: Path, fields: dict[str, Any], param: str
) -> None:
    """Before anything is sampled."""
    names = ("max_tokens", "temperature", "top_p")
    params = {"max_tokens": 4} | {name: fields.pop(name) for name in names if name in fields}
    sampler = client.sampler(client.model(str(place / "model"), rank=1))
    body = {"prompt": chunks(fields.pop("prompt", PROMPT)), "sampling_params": params, **fields}
    answer = client.respond("asample", sampling_session_id=sampler, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
