"""No completion of another process is used that could not be an answer to the request.

MLX does not check the indices of a gather: a token outside the vocabulary would end the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from attachments.remote.answer_checks import check_answer
from attachments.remote.messages import RolloutAnswer
from attachments.remote.server import RemoteFailure
from attachments.remote.tests.inference_server import group
from protocols.sampling import SampleRequest, Sampling

VOCABULARY = 10
REQUEST = group(rows=2, sampling=Sampling(max_tokens=6, top_k=3, top_logprobs=2, stop=("end",)), record_support=True)
COMPLETION: dict[str, Any] = {
    "tokens": [3, 9], "logprobs": [-0.5, -1.5], "versions": [0, 1], "text": "ab", "finish_reason": "stop",
    "stop_reason": "end", "top_logprobs": [[[3, -0.5], [0, -1.0]], [[9, -1.5]]],
}  # fmt: skip


TEXTS = {3: "a", 4: "\ufffd", 9: " bend"}


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens; token 4 is an incomplete character."""
    return "".join(TEXTS.get(token, "x") for token in tokens)


def check(answer: RolloutAnswer, request: SampleRequest) -> None:
    """Check an answer of a model with ten tokens."""
    check_answer(answer, request, vocab_size=VOCABULARY, decode=decode)


def support(*tokens: int) -> bytes:
    """Return a support as it is transferred."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


SUPPORTS = [support(0, 3, 4), support(9)]


def answer(request: SampleRequest = REQUEST, /, **changes: Any) -> RolloutAnswer:
    """Return the answer to a request with a completion that differs from `COMPLETION` in `changes`."""
    valid = COMPLETION | {"supports": SUPPORTS if request.record_support else []}
    completions = [valid] * (len(request.seeds) - 1) + [valid | changes]
    return msgspec.convert({"completions": completions, "fingerprints": {0: "f", 1: "g"}}, RolloutAnswer)


def test_a_possible_answer_is_accepted() -> None:
    """The wrong answers below differ from it in one place."""
    check(answer(), REQUEST)
    unfiltered = group(rows=1, sampling=REQUEST.sampling)
    check(answer(unfiltered, stop_reason=9, text="a"), unfiltered)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [3, VOCABULARY]},
        {"tokens": [10**9, 9]},
        {"tokens": [2**64, 9]},
        {"tokens": [3, -4]},
        {"tokens": [], "logprobs": [], "versions": [], "top_logprobs": [], "supports": []},
        {
            "tokens": [9] * 7, "logprobs": [-1.0] * 7, "versions": [0] * 7, "supports": [support(9)] * 7,
            "top_logprobs": [[]] * 7,
        },
        {"sampled": [True, False]},
        {"sampled": [True, True]},
        {"weights": "math"},
        {"fingerprint": "f"},
        {"logprobs": [-0.5, 0.5]},
        {"logprobs": [-0.5, math.nan]},
        {"logprobs": [-0.5, -math.inf]},
        {"logprobs": [-0.5, -1e300]},
        {"versions": [1, 2]},
        {"versions": [1, 0]},
        {"stop_reason": "other"},
        {"stop_reason": 4},
        {"top_logprobs": [[]]},
        {"top_logprobs": [[[3, -0.5], [0, -1.0], [1, -2.0]], []]},
        {"top_logprobs": [[[VOCABULARY, -0.5]], []]},
        {"top_logprobs": [[[-1, -0.5]], []]},
        {"top_logprobs": [[[3, math.nan]], []]},
        {"top_logprobs": [[[3, 0.5]], []]},
        {"supports": []},
        {"supports": [support(3), support(9, VOCABULARY)]},
        {"supports": [support(3), support(9, 2**32 - 1)]},
        {"supports": [support(3), b""]},
        {"supports": [support(3), support(9)[:3]]},
        {"supports": [support(3), support(*range(9)) * 40]},
        {"supports": [support(4, 3), support(9)]},
        {"supports": [support(3, 3), support(9)]},
        {"supports": [support(3), support(8)]},
    ],
    ids=str,
)  # fmt: skip
def test_an_impossible_completion_is_a_failure_of_the_server(changes: dict[str, Any]) -> None:
    """The other completion of the group is valid."""
    with pytest.raises(RemoteFailure):
        check(answer(**changes), REQUEST)


@pytest.mark.parametrize("changes", [{"supports": SUPPORTS}, {"top_logprobs": [[[3, -0.5]], [[9, -1.5]]]}], ids=str)
def test_what_was_not_requested_is_a_failure_of_the_server(changes: dict[str, Any]) -> None:
    """The learner would replay a support that it has not asked for."""
    plain = group(rows=1, sampling=Sampling(max_tokens=6, stop=("end",)))
    check(answer(plain, top_logprobs=[]), plain)
    with pytest.raises(RemoteFailure):
        check(answer(plain, **({"top_logprobs": []} | changes)), plain)


def test_a_missing_completion_is_a_failure_of_the_server() -> None:
    """A group has one completion per seed."""
    one = group(rows=1, sampling=REQUEST.sampling, record_support=True)
    with pytest.raises(RemoteFailure):
        check(answer(one), REQUEST)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"text": "a b"}, True),
        ({"text": "abend"}, False),
        ({"text": "ax"}, False),
        ({"text": ""}, False),
        ({"text": "a bend", "stop_reason": None, "finish_reason": "length"}, True),
        ({"text": "a", "stop_reason": None, "finish_reason": "length"}, False),
        ({"text": "other", "stop_reason": None, "finish_reason": "length"}, False),
        ({"text": "a", "stop_reason": 9}, True),
        ({"text": "b", "stop_reason": 9}, False),
        ({"text": "a", "tokens": [3, 4], "stop_reason": None, "finish_reason": "length"}, True),
        ({"text": "a\ufffd", "tokens": [3, 4], "stop_reason": None, "finish_reason": "length"}, True),
    ],
    ids=str,
)
def test_a_text_is_that_of_its_tokens(changes: dict[str, Any], accepted: bool) -> None:
    """Without the stop string or the end token. White space and incomplete characters are not compared."""
    plain = group(rows=1, sampling=Sampling(max_tokens=6, stop=("end",)))
    with nullcontext() if accepted else pytest.raises(RemoteFailure, match="text"):
        check(answer(plain, **({"top_logprobs": []} | changes)), plain)


def test_a_text_can_end_with_its_stop_string() -> None:
    """If the request asks for it."""
    plain = replace(group(rows=1, sampling=Sampling(max_tokens=6, stop=("end",))), include_stop=True)
    check(answer(plain, top_logprobs=[], text="a bend"), plain)
