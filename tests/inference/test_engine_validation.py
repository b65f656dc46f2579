"""The engine refuses invalid requests with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.errors import RequestError
from protocols.sampling import SampleRequest, Sampling
from tests.inference.engine_helpers import SAMPLED, make_engine, run, submit_request
from tests.small_models import tiny_source

SMALL = tiny_source(vocab_size=300)


def refused(
    prompt: tuple[Any, ...] = (1, 2), seeds: tuple[Any, ...] = (0,), record_support: bool = False, **settings: Any
) -> RequestError:
    """Submit an invalid request, and check that a valid request completes afterwards."""
    engine = make_engine(SMALL, kv_cache_tokens=600)
    request = SampleRequest(prompt=prompt, sampling=Sampling(**settings), seeds=seeds, record_support=record_support)
    with pytest.raises(RequestError) as caught:
        engine.submit(request, lambda _: None)
    assert not engine.has_work
    return caught.value


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"prompt": ()}, "prompt"), ({"prompt": (-1,)}, "prompt"), ({"prompt": (300,)}, "prompt"),
        ({"prompt": (1.0,)}, "prompt"), ({"prompt": (True,)}, "prompt"), ({"prompt": (1,) * 512}, "prompt"),
        ({"seeds": ()}, "n"), ({"seeds": (0,) * 5000}, "n"), ({"seeds": (-1,)}, "seed"), ({"seeds": (2**64,)}, "seed"),
        ({"seeds": (0.5,)}, "seed"), ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"), ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"min_p": 2.0}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": ((300, 1.0),)}, "logit_bias"), ({"logit_bias": ((99_999_999, 5.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"), ({"logit_bias": ((1, float("-inf")),)}, "logit_bias"),
        ({"logit_bias": tuple((i % 300, 0.0) for i in range(2000))}, "logit_bias"), ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 257,)}, "stop"), ({"stop": ("x",) * 17}, "stop"), ({"stop": (5,)}, "stop"),
        ({"stop_token_ids": (300,)}, "stop_token_ids"), ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"), ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"allowed_token_ids": (300,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1.5,)}, "allowed_token_ids"), ({"bad_words": ((1, 300),)}, "bad_words"),
        ({"bad_words": ((),)}, "bad_words"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_fields_are_refused_by_name(settings: dict[str, Any], param: str) -> None:
    """Invalid values never reach the device."""
    assert refused(**settings).param == param


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 257}], ids=str)
def test_unbounded_supports_are_not_recorded(settings: dict[str, Any]) -> None:
    """A filter that may keep more than 256 tokens is refused with the bound, if supports are requested."""
    error = refused(record_support=True, **settings)
    assert error.param == "top_k"
    assert "256" in str(error)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 256, "top_p": 0.5}, {"top_k": 10**9}, {"temperature": 0.0, "top_p": 0.5}], ids=str
)
def test_supports_are_recorded_where_they_are_bounded_or_complete(settings: dict[str, Any]) -> None:
    """Requests without a filter need no bound."""
    engine = make_engine(SMALL)
    answer = submit_request(engine, (1, 2), Sampling(max_tokens=2, ignore_eos=True, **settings), record_support=True)
    run(engine)
    assert len(answer.completions[0].supports) == (2 if settings.get("top_k") == 256 else 0)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """The message has both lengths."""
    assert all(number in str(refused(prompt=(1,) * 600)) for number in ("600", "512"))


def test_a_completion_beyond_the_kv_cache_is_refused() -> None:
    """No ending of other rows would make it fit."""
    engine = make_engine(SMALL, kv_cache_tokens=40)
    with pytest.raises(RequestError) as caught:
        submit_request(engine, (1,) * 30, Sampling(max_tokens=11))
    assert caught.value.param == "max_tokens"
    answer = submit_request(engine, (1,) * 30, Sampling(max_tokens=10, ignore_eos=True))
    run(engine)
    assert len(answer.completions[0].tokens) == 10


def test_max_tokens_are_limited_by_the_context() -> None:
    """The completion then ends by length."""
    engine = make_engine(SMALL)
    answer = submit_request(engine, (1,) * 505, Sampling(max_tokens=10**12, ignore_eos=True))
    run(engine)
    completion = answer.completions[0]
    assert (len(completion.tokens), completion.finish_reason) == (7, "length")


def test_a_full_waiting_queue_refuses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bounded in rows and in requests."""
    monkeypatch.setattr("clotho.inference.scheduler.MAX_WAITING_ROWS", 4)
    engine = make_engine(SMALL)
    answer = submit_request(engine, (1, 2), SAMPLED, (1, 2, 3))
    with pytest.raises(RequestError) as caught:
        submit_request(engine, (1, 2), SAMPLED, (4, 5))
    assert caught.value.param == "queue"
    run(engine)
    assert len(answer.completions) == 3


def test_waiting_rollouts_are_neither_refused_nor_counted_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator bounds them, with many batches ahead far above the limit of clients."""
    monkeypatch.setattr("clotho.inference.scheduler.MAX_WAITING_ROWS", 4)
    monkeypatch.setattr("clotho.inference.scheduler.MAX_WAITING_REQUESTS", 2)
    engine = make_engine(SMALL)
    rollouts = [submit_request(engine, (1, 2), SAMPLED, (1, 2, 3), background=True) for _ in range(5)]
    clients = [submit_request(engine, (1, 2), SAMPLED, (seed,)) for seed in (4, 5)]
    with pytest.raises(RequestError):
        submit_request(engine, (1, 2), SAMPLED, (6,))
    rollouts.append(submit_request(engine, (1, 2), SAMPLED, (1, 2, 3), background=True))
    run(engine)
    assert [len(answer.completions) for answer in (*rollouts, *clients)] == [3] * 6 + [1] * 2


def test_extreme_but_valid_parameters_are_accepted() -> None:
    """Filters wider than the vocabulary, the largest seed, the largest penalties, and a bias that dominates all
    logits.
    """
    engine = make_engine(SMALL)
    wild = Sampling(
        temperature=100.0, top_k=10**9, repetition_penalty=10.0, logit_bias=((7, 100.0),), max_tokens=3, top_logprobs=20
    )
    answer = submit_request(engine, (1, 2), wild, (2**64 - 1,))
    cold = submit_request(engine, (1, 2), Sampling(temperature=1e-5, max_tokens=3, ignore_eos=True))
    run(engine)
    assert not answer.failures
    assert not cold.failures
    assert len(answer.completions[0].top_logprobs[0]) == 20
