"""What the engine drew is found again by its tokens, as it was sampled, until newer completions take its place."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from clotho.inference.sample_log import MAX_EQUAL, SampleLog
from protocols.sampling import Completion, SampleRequest, Sampling

PROMPT = (5, 9, 33)


def request(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> SampleRequest:
    """One completion of a prompt."""
    return SampleRequest(prompt=prompt, sampling=Sampling(**sampling), seeds=(0,))


def completion(*tokens: int, **fields: Any) -> Completion:
    """Token t has log-probability -t / 8 and was sampled by version t // 10."""
    usual = {
        "logprobs": tuple(-token / 8 for token in tokens),
        "versions": tuple(token // 10 for token in tokens),
        "finish_reason": "stop",
    }
    return Completion(tokens=tokens, text="", **(usual | fields))


def test_a_completion_is_found_by_its_tokens_and_those_before() -> None:
    """Everything that the learner wants to know comes back, exactly."""
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
        ((5, 9, 33, 3, 14, 25), 3, 5),
        ((5, 9, 33, 3, 14, 25), 4, 6),
        ((5, 9, 33, 3, 14, 25), 2, 6),
        ((5, 9, 33, 3, 14, 25), 3, 7),
        ((5, 9, 33, 3, 14, 25), 6, 3),
        ((5, 9, 33, 3, 14, 25), -3, 6),
        ((5, 9, 34, 3, 14, 25), 3, 6),
        ((5, 9, 33, 3, 14, 26), 3, 6),
        ((5, 9, 33, 3, 14, 2**31), 3, 6),
        ((5, 9, 33, 3, 14, "x"), 3, 6),
        ((), 0, 0),
    ],
)
def test_what_was_not_drawn_so_is_not_found(tokens: tuple[Any, ...], start: int, end: int) -> None:
    """Part of a completion, another prompt, another cut between the two, what is no token at all."""
    log = SampleLog()
    log.remember(request(), completion(3, 14, 25), client_label="")
    assert log.find(tokens, start, end) is None


def test_turns_of_a_conversation_are_found_each_after_what_came_before_it() -> None:
    """The second prompt holds the first completion, with its end token doubled."""
    log = SampleLog()
    log.remember(request(), completion(3, 1), client_label="one")
    log.remember(request((*PROMPT, 3, 1, 1, 7)), completion(4, 1), client_label="two")
    whole = [*PROMPT, 3, 1, 1, 7, 4, 1]
    first, second = log.find(whole, 3, 5), log.find(whole, 7, 9)
    assert first
    assert second
    assert (first.client_label, second.client_label) == ("one", "two")
    assert log.find(whole, 3, 6) is None


def test_an_equal_draw_is_remembered_and_counted_once() -> None:
    """Two of one group may say the same; it is no older for it."""
    log = SampleLog(capacity_tokens=2 * (32 + 2))
    log.remember(request(), completion(3, 1), client_label="one")
    log.remember(request(), completion(4, 1), client_label="one")
    log.remember(request(), completion(3, 1, finish_reason="length"), client_label="one")
    log.remember(request(), completion(5, 1), client_label="one")
    found = [log.find([*PROMPT, token, 1], 3, 5) for token in (3, 4, 5)]
    assert [one.finish_reason if one else None for one in found] == ["length", None, "stop"]


def test_the_same_tokens_drawn_by_several_weights_are_told_apart_by_their_log_probabilities() -> None:
    """As games of a group that go the same way across a swap; without log-probabilities it is the latest."""
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


def test_the_same_weights_may_draw_the_same_tokens_with_other_log_probabilities() -> None:
    """One of them was begun before a swap, and has its prompt from the weights before."""
    log = SampleLog()
    for logprob in (-0.3897, -0.3766, -0.376599):
        log.remember(request(), completion(3, logprobs=(logprob,), versions=(5,)), client_label="")
    found = [log.find([*PROMPT, 3], 3, 4, logprobs=np.array([near])) for near in (-0.39, -0.37)]
    assert [round(float(one.logprobs[0]), 6) if one else None for one in found] == [-0.3897, -0.376599]


def test_what_cannot_be_learnt_from_takes_no_place_of_what_can() -> None:
    """An environment that tests itself greedily may draw what was sampled for training; the other way round it may."""
    log = SampleLog()
    log.remember(request(temperature=0.0), completion(4, 1), client_label="test")
    log.remember(request(), completion(4, 1), client_label="training")
    log.remember(request(), completion(3, 1), client_label="training")
    log.remember(request(temperature=0.0), completion(3, 1), client_label="test")
    found = [log.find([*PROMPT, token, 1], 3, 5) for token in (3, 4)]
    assert [one.client_label if one else None for one in found] == ["training", "training"]


def test_the_oldest_are_forgotten_first_and_the_bound_holds() -> None:
    """A completion counts its tokens and 32 for itself; what is larger than the log is not remembered at all."""
    log = SampleLog(capacity_tokens=3 * (32 + 4))
    for token in range(10):
        log.remember(request(), completion(token, 1, 1, 1), client_label="")
    found = [token for token in range(10) if log.find([*PROMPT, token, 1, 1, 1], 3, 7)]
    assert found == [7, 8, 9]
    log.remember(request(), completion(*range(3 * 36)), client_label="")
    assert log.find([*PROMPT, *range(3 * 36)], 3, 3 + 3 * 36) is None
    assert log.find([*PROMPT, 9, 1, 1, 1], 3, 7)


def test_supports_come_back_and_count() -> None:
    """Sixteen tokens of four bytes, and forty for each support, are thirteen tokens of eight."""
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
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({}, "logit_bias"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "top_p": 0.9}, "top_p = 0.9"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "top_k": 400}, "top_k = 400"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "min_p": 0.05}, "top_k to 1 to 256"),
        ({"logit_bias": ((7, -3.0), (5, 2.0)), "temperature": 1.5}, ""),
    ],
)
def test_laws_that_the_learner_cannot_evaluate_are_named(sampling: dict[str, Any], reason: str) -> None:
    """Greedy, penalised, otherwise biased than the run, or cut without a record; any other temperature is fine."""
    log = SampleLog(logit_bias=((5, 2.0), (7, -3.0)))
    log.remember(request(**sampling), completion(3, 1), client_label="")
    found = log.find([*PROMPT, 3, 1], 3, 5)
    assert found
    assert reason in found.unlearnable
    assert bool(reason) == bool(found.unlearnable)


def test_aborted_completions_are_not_remembered() -> None:
    """NullSampleLog got them."""
    log = SampleLog()
    log.remember(request(), completion(3, 1, finish_reason="abort"), client_label="")
    assert log.find([*PROMPT, 3, 1], 3, 5) is None


def test_a_reader_in_another_thread_sees_whole_completions_only() -> None:
    """One thread writes over and over, another reads: what is found is what was sampled."""
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
