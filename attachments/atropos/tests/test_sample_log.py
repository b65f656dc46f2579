"""The sample log finds sampled completions by their tokens until newer completions replace them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from attachments.atropos import sample_log as module
from attachments.atropos.sample_log import MAX_EQUAL, SampleLog
from protocols.sampling import BASE, Completion, ExpertRoutes, SampleRequest, Sampling

PROMPT = (5, 9, 33)


def request(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> SampleRequest:
    """Return a request of one completion."""
    return SampleRequest(prompt=prompt, sampling=Sampling(**sampling), seeds=(0,))


def completion(*tokens: int, **fields: Any) -> Completion:
    """Return a completion: token t has log-probability -t / 8 and version t // 10."""
    usual = {
        "logprobs": tuple(-token / 8 for token in tokens),
        "versions": tuple(token // 10 for token in tokens),
        "finish_reason": "stop",
    }
    return Completion(tokens=tokens, text="", **(usual | fields))


def test_a_completion_is_found_by_its_tokens_and_its_prompt() -> None:
    """All recorded values are returned exactly."""
    log = SampleLog()
    log.remember(request(temperature=0.7), completion(3, 14, 25, finish_reason="length"), client_label="guessing")
    found = log.find([*PROMPT, 3, 14, 25, 40], 3, 6)
    assert found
    assert found.logprobs.dtype == np.float32
    assert found.logprobs.tolist() == [-0.375, -1.75, -3.125]
    assert found.versions.dtype == np.int32
    assert found.versions.tolist() == [0, 1, 2]
    assert (found.temperature, found.supports, found.unlearnable) == (0.7, (), "")
    assert (found.finish_reason, found.client_label) == ("length", "guessing")


@pytest.mark.parametrize(
    ("tokens", "start", "end"),
    [
        ((5, 9, 33, 3, 14, 25), 3, 5), ((5, 9, 33, 3, 14, 25), 4, 6), ((5, 9, 33, 3, 14, 25), 2, 6),
        ((5, 9, 33, 3, 14, 25), 3, 7), ((5, 9, 33, 3, 14, 25), 6, 3), ((5, 9, 33, 3, 14, 25), -3, 6),
        ((5, 9, 34, 3, 14, 25), 3, 6), ((5, 9, 33, 3, 14, 26), 3, 6), ((5, 9, 33, 3, 14, 2**31), 3, 6),
        ((5, 9, 33, 3, 14, "x"), 3, 6), ((), 0, 0),
    ],
)  # fmt: skip
def test_other_tokens_are_not_found(tokens: tuple[Any, ...], start: int, end: int) -> None:
    """A part of a completion, another prompt, another boundary between prompt and completion, and invalid tokens."""
    log = SampleLog()
    log.remember(request(), completion(3, 14, 25), client_label="")
    assert log.find(tokens, start, end) is None


def test_turns_of_a_conversation_are_found_after_their_prompts() -> None:
    """The second prompt contains the first completion with a doubled end token."""
    log = SampleLog()
    log.remember(request(), completion(3, 1), client_label="one")
    log.remember(request((*PROMPT, 3, 1, 1, 7)), completion(4, 1), client_label="two")
    whole = [*PROMPT, 3, 1, 1, 7, 4, 1]
    first, second = log.find(whole, 3, 5), log.find(whole, 7, 9)
    assert first
    assert second
    assert (first.client_label, second.client_label) == ("one", "two")
    assert log.find(whole, 3, 6) is None


def test_an_equal_completion_is_stored_and_counted_once() -> None:
    """Two completions of one group may be equal. The position in the log does not change."""
    log = SampleLog(capacity_tokens=2 * (32 + 2))
    log.remember(request(), completion(3, 1), client_label="one")
    log.remember(request(), completion(4, 1), client_label="one")
    log.remember(request(), completion(3, 1, finish_reason="length"), client_label="one")
    log.remember(request(), completion(5, 1), client_label="one")
    found = [log.find([*PROMPT, token, 1], 3, 5) for token in (3, 4, 5)]
    assert [one.finish_reason if one else None for one in found] == ["length", None, "stop"]


def test_equal_tokens_of_several_versions_differ_by_their_log_probabilities() -> None:
    """Equal games of a group across a swap. Without log-probabilities the newest is returned."""
    log = SampleLog()
    for version in range(20):
        sampled = completion(3, 1, logprobs=(-0.1 * version, -1.0), versions=(version, version))
        log.remember(request(), sampled, client_label="")
    tokens = [*PROMPT, 3, 1]
    latest, near = log.find(tokens, 3, 5), log.find(tokens, 3, 5, logprobs=np.array([-0.71, -1.0]))
    assert latest
    assert near
    assert (latest.versions.tolist(), near.versions.tolist()) == ([19, 19], [7, 7])
    oldest = log.find(tokens, 3, 5, logprobs=np.array([0.0, -1.0]))
    assert oldest
    assert oldest.versions.tolist() == [20 - MAX_EQUAL] * 2, "so many, and no more"


def test_equal_tokens_of_one_version_may_differ_in_log_probabilities() -> None:
    """One completion began before a swap and has its prompt from the previous weights."""
    log = SampleLog()
    for logprob in (-0.3897, -0.3766, -0.376599):
        log.remember(request(), completion(3, logprobs=(logprob,), versions=(5,)), client_label="")
    found = [log.find([*PROMPT, 3], 3, 4, logprobs=np.array([near])) for near in (-0.39, -0.37)]
    assert [round(float(one.logprobs[0]), 6) if one else None for one in found] == [-0.3897, -0.376599]


def test_untrainable_completions_do_not_replace_trainable_ones() -> None:
    """An environment may sample greedily for its own evaluation. A trainable completion replaces an untrainable one."""
    log = SampleLog()
    log.remember(request(temperature=0.0), completion(4, 1), client_label="test")
    log.remember(request(), completion(4, 1), client_label="training")
    log.remember(request(), completion(3, 1), client_label="training")
    log.remember(request(temperature=0.0), completion(3, 1), client_label="test")
    found = [log.find([*PROMPT, token, 1], 3, 5) for token in (3, 4)]
    assert [one.client_label if one else None for one in found] == ["training", "training"]


def test_the_oldest_completions_are_removed_first() -> None:
    """A completion counts its tokens plus 32. A completion larger than the log is not stored."""
    log = SampleLog(capacity_tokens=3 * (32 + 4))
    for token in range(10):
        log.remember(request(), completion(token, 1, 1, 1), client_label="")
    found = [token for token in range(10) if log.find([*PROMPT, token, 1, 1, 1], 3, 7)]
    assert found == [7, 8, 9]
    log.remember(request(), completion(*range(3 * 36)), client_label="")
    assert log.find([*PROMPT, *range(3 * 36)], 3, 3 + 3 * 36) is None
    assert log.find([*PROMPT, 9, 1, 1, 1], 3, 7)


def test_the_oldest_routes_are_dropped_before_their_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes are bounded by themselves; the log-probabilities stay."""
    monkeypatch.setattr(module, "MAX_ROUTE_BYTES", 10)
    log = SampleLog()
    for token in range(3):
        routes = ExpertRoutes(experts=bytes([token]) * 4, layers=1, per_token=1, number_bytes=1)
        log.remember(request(), completion(token, 1, routes=routes), client_label="")
    found = [log.find([*PROMPT, token, 1], 3, 5) for token in range(3)]
    assert [one and one.routes and one.routes.experts for one in found] == [None, b"\1" * 4, b"\2" * 4]
    assert all(one is not None and one.logprobs.size == 2 for one in found)


def test_supports_are_stored_and_count_towards_the_bound() -> None:
    """Sixteen tokens of four bytes and forty per support count as thirteen tokens of eight bytes."""
    log = SampleLog(capacity_tokens=2 * (32 + 1 + 13))
    supports = (bytes(64),)
    for token in range(3):
        log.remember(request(top_k=16), completion(token, supports=supports), client_label="")
    found = [log.find([*PROMPT, token], 3, 4) for token in range(3)]
    assert [one.supports if one else None for one in found] == [None, supports, supports]
    assert [one.unlearnable if one else None for one in found] == [None, "", ""]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": 0.0}, "temperature = 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5"),
        ({"frequency_penalty": -0.5}, "frequency_penalty = -0.5"),
        ({"min_tokens": 2}, "min_tokens = 2"),
        ({"allowed_token_ids": (3,)}, "allowed_token_ids"),
        ({"bad_words": ((3,),)}, "bad_words"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({}, "logit_bias"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "top_p": 0.9}, "top_p = 0.9"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "top_k": 400}, "top_k = 400"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "min_p": 0.05}, "top_k to 1 to 256"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "temperature": 1.5}, ""),
    ],
)
def test_sampling_distributions_without_a_gradient_are_named(sampling: dict[str, Any], reason: str) -> None:
    """Greedy, penalised, other biases than the run, or filtered without supports. Any temperature is valid."""
    log = SampleLog(logit_bias=((5, 2.0), (7, -3.0)))
    log.remember(request(**sampling), completion(3, 1), client_label="")
    found = log.find([*PROMPT, 3, 1], 3, 5)
    assert found
    assert reason in found.unlearnable
    assert bool(reason) == bool(found.unlearnable)


def test_aborted_completions_are_not_stored() -> None:
    """No client received them."""
    log = SampleLog()
    log.remember(request(), completion(3, 1, finish_reason="abort"), client_label="")
    assert log.find([*PROMPT, 3, 1], 3, 5) is None


@pytest.mark.parametrize("weights", [BASE, "letters"])
def test_completions_that_the_policy_did_not_sample_are_not_stored(weights: str) -> None:
    """The learner would train on tokens of other weights."""
    log = SampleLog()
    log.remember(replace(request(), weights=weights), completion(3, 1), client_label="")
    assert log.find([*PROMPT, 3, 1], 3, 5) is None
    log.remember(request(), completion(3, 1), client_label="")
    assert log.find([*PROMPT, 3, 1], 3, 5) is not None


def test_a_concurrent_reader_finds_only_whole_completions() -> None:
    """One thread writes and another reads."""
    log = SampleLog(capacity_tokens=50 * (32 + 2))
    done = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not done.is_set():
            for token in range(100):
                found = log.find([*PROMPT, token, 1], 3, 5)
                if found and found.logprobs.tolist() != [-token / 8, -0.125]:
                    wrong.append(token)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(5000):
        log.remember(request(), completion(number % 100, 1), client_label="")
    done.set()
    reader.join()
    assert wrong == []


def test_a_request_for_the_base_model_is_a_warning_once_for_each_client() -> None:
    """Its completions are not those of the policy, so that its groups cannot be trained on."""
    log = SampleLog()
    with capture_logs() as logs:
        for client in ("first", "first", "second"):
            log.remember(replace(request(), weights=BASE), completion(3), client_label=client)
        log.remember(replace(request(), weights="an-adapter"), completion(3), client_label="third")
    assert [(line["event"], line["client"]) for line in logs] == [
        ("base_model_requested", "first"), ("base_model_requested", "second"),
    ]  # fmt: skip
    assert log.find([*PROMPT, 3], 3, 4) is None
