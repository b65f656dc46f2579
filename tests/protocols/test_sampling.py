"""The table of sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from msgspec import structs

from clotho.backend import backend
from clotho.inference.sampling import row_parameters, sample, validate
from protocols.errors import RequestError
from protocols.sampling import (
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    PARAMETERS,
    SampleRequest,
    Sampling,
    in_use,
    turns_of,
)


def test_the_table_lists_every_field_of_sampling() -> None:
    """A field of `Sampling` without a row of the table has no neutral value and no description."""
    assert tuple(PARAMETERS) == Sampling.__struct_fields__
    assert {name: parameter.default for name, parameter in PARAMETERS.items()} == msgspec.structs.asdict(Sampling())


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("temperature", (0.0, 100.0), (-0.01, 100.01)), ("top_p", (0.01, 1.0), (0.0, 1.01)), ("top_k", (0,), (-1,)),
        ("min_p", (0.0, 1.0), (-0.01, 1.01)), ("repetition_penalty", (0.01, 10.0), (0.009, 10.01)),
        ("presence_penalty", (-2.0, 2.0), (-2.01, 2.01)), ("frequency_penalty", (-2.0, 2.0), (-2.01, 2.01)),
        ("logit_bias", ([[0, -100.0]] * 1024, [[0, 100.0]]), ([[0, 0.0]] * 1025, [[0, 100.1]], [[0, -100.1]])),
        ("max_tokens", (1,), (0,)), ("min_tokens", (0,), (-1,)), ("top_logprobs", (0, 20), (-1, 21)),
        ("allowed_token_ids", ([0] * 65_536,), ([0] * 65_537, [-1])),
        ("stop_token_ids", ([0] * 128,), ([0] * 129, [-1])),
        ("bad_words", ([[0]] * 1024, [[0] * 64]), ([[0]] * 1025, [[0] * 65], [[]], [[-1]])),
        ("stop", (["x"] * 16, ["x" * 256]), (["x"] * 17, ["x" * 257], [""])),
    ],
)  # fmt: skip
def test_a_value_outside_its_range_is_refused(name: str, taken: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    """The ranges of the HTTP API, whose page states them. The ends of a range belong to it."""
    for value in taken:
        assert msgspec.convert({name: value}, Sampling)
    for value in refused:
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.convert({name: value}, Sampling)


def test_default_sampling_uses_no_parameter() -> None:
    """The defaults sample from the model's own distribution: only the maximum length applies."""
    assert in_use(Sampling()) == ["max_tokens"]


@pytest.mark.parametrize(
    ("name", "below", "lowest"),
    [
        ("temperature", MIN_TEMPERATURE * 0.99, MIN_TEMPERATURE),
        ("repetition_penalty", MIN_REPETITION_PENALTY * 0.99, MIN_REPETITION_PENALTY),
    ],
)
def test_the_engine_refuses_values_that_make_logits_infinite(name: str, below: float, lowest: float) -> None:
    """The lowest value is accepted, and temperature 0 too. The allowed range is part of the table."""
    request = SampleRequest(prompt=(1,), sampling=Sampling(), seeds=(1,))
    for value, refused in ((below, True), (1e-38, True), (lowest, False), (1.0, False)):
        asked = structs.replace(request, sampling=msgspec.structs.replace(Sampling(), **{name: value}))
        if refused:
            with pytest.raises(RequestError) as raised:
                validate(asked, vocabulary=8, context=8, cache_tokens=8)
            assert raised.value.param == name
        else:
            validate(asked, vocabulary=8, context=8, cache_tokens=8)
    validate(structs.replace(request, sampling=Sampling(temperature=0.0)), vocabulary=8, context=8, cache_tokens=8)
    assert f"at least {lowest:g}" in PARAMETERS[name].allowed


def test_logits_stay_finite_at_the_lowest_temperature_and_penalty() -> None:
    """With the largest float16 logits and the largest bias, the sampled token has a finite log-probability.

    On the device, and on the host if the backend samples there, which it does without a penalty.
    """
    sampling = Sampling(
        temperature=MIN_TEMPERATURE, repetition_penalty=MIN_REPETITION_PENALTY, logit_bias=((0, 100.0), (1, -100.0))
    )
    logits_1_V = np.array([[65504.0, -65504.0, 65504.0, 0.0]], dtype=np.float32)
    uniform_1_2 = np.full((1, 2), 0.5, dtype=np.float32)
    seen_1_V = mx.ones((1, 4), dtype=mx.bool_)
    sampled = sample(mx.array(logits_1_V), mx.array(uniform_1_2), row_parameters([sampling], 4), seen_1_V)
    assert np.isfinite(np.array(sampled[1])).all()
    unpenalized = row_parameters([structs.replace(sampling, repetition_penalty=1.0)], 4)
    if (sampler := backend().row_sampler(unpenalized)) is not None:
        assert np.isfinite(np.array(sampler(logits_1_V, uniform_1_2, unpenalized).logp_B)).all()


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ((), ()),
        ((True, True, True, True), ()),
        ((True, False, False, True), ((True, 1, 2), (False, 2, 6), (True, 1, 3))),
        ((False, True, True, False), ((False, 1, 2), (True, 2, 6), (False, 1, 3))),
    ],
)
def test_the_parts_of_a_text_are_those_of_its_tokens(
    sampled: tuple[bool, ...], expected: tuple[tuple[bool, int, int], ...]
) -> None:
    """Although the decoder removes a space at the start of a text, as those of SentencePiece do."""
    words = (" a", " of", " it", " end")

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    turns = turns_of(range(4), sampled, decode(range(4)), decode)
    assert tuple((turn.sampled, turn.tokens, turn.characters) for turn in turns) == expected
