"""Fields that constrain a completion, in pairs and triples, in rows beside each other.

The vocabulary is a multiple of 32, where a grammar's mask has a word behind the vocabulary.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.constraints import Constraint, Grammar, GrammarKind
from protocols.errors import RequestError
from protocols.sampling import Completion, Sampling
from tests.inference.engine_helpers import complete_alone, make_engine, make_prompt, run, submit_request
from tests.small_models import FixedSource, byte_tokenizer, tiny_source

VOCABULARY, END = 288, 256
PLAIN = Sampling(max_tokens=8, ignore_eos=True)

GRAMMARS: dict[tuple[GrammarKind, str], str] = {
    ("regex", "[ab]{1,4}"): "[ab]{1,4}",
    ("choice", '["yes", "yesterday", "no"]'): "yes|yesterday|no",
    ("json_schema", '{"type": "boolean"}'): "true|false",
    ("lark", 'start: "x" "y"*'): "xy*",
}
"""Grammars, and a regular expression of their sentences."""

tokens = st.integers(0, VOCABULARY - 1) | st.sampled_from([*b"abxyestnrdof", END, VOCABULARY - 1])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "grammar": st.sampled_from(sorted(GRAMMARS)),
    "min_tokens": st.integers(1, 8),
    "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4).map(tuple),
    "stop_token_ids": st.lists(tokens, min_size=1, max_size=4).map(tuple),
    "stop": st.sampled_from([("a",), ("ye", "x"), ("\u20ac",)]),
    "allowed_token_ids": st.lists(tokens, min_size=1, max_size=6).map(tuple),
    "logit_bias": st.lists(st.tuples(tokens, st.sampled_from([-100.0, 3.0, 100.0])), min_size=1, max_size=4).map(tuple),
    "top_logprobs": st.integers(1, 20),
    "presence_penalty": st.sampled_from([-2.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 2.0]),
    "repetition_penalty": st.sampled_from([0.01, 10.0]),
    "temperature": st.sampled_from([0.0, 1e-5, 100.0]),
    "top_k": st.sampled_from([1, 7]),
    "top_p": st.sampled_from([1e-6, 0.9]),
    "min_p": st.sampled_from([0.1, 1.0]),
    "ignore_eos": st.just(True),
    "seeds": st.just((1, 2, 3)),
    "stream": st.just(True),
}
combinations = st.lists(st.sampled_from(sorted(FIELDS)), min_size=2, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@cache
def shared_source() -> FixedSource:
    """Return one model for all tests."""
    return tiny_source(vocab_size=VOCABULARY)


@cache
def compiled(kind: GrammarKind, text: str) -> Constraint:
    """Compile a grammar once."""
    return byte_tokenizer().compile_grammar(Grammar(kind=kind, text=text, param="grammar"), VOCABULARY)


@cache
def plain_alone() -> Completion:
    """Return the completion of a request without constraints."""
    return complete_alone(shared_source(), make_prompt(5), PLAIN)


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest) -> None:
    """Decode and sample on the host, and in MLX."""
    if request.param == "device":
        request.getfixturevalue("device_sampler")
        request.getfixturevalue("mlx_decoder")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "fields", [{"min_tokens": 2}, {"bad_words": ((97,),)}, {"stop_token_ids": (98,), "min_tokens": 2}], ids=str
)
def test_a_grammar_combines_with_excluded_tokens(fields: dict[str, Any]) -> None:
    """In one row, and in rows beside each other. Their neighbours complete unchanged."""
    engine, regex = make_engine(shared_source()), compiled("regex", "[ab]{6}")
    plain = submit_request(engine, make_prompt(5), PLAIN)
    both = submit_request(engine, make_prompt(6), Sampling(max_tokens=6, **fields), constraint=regex)
    submit_request(engine, make_prompt(7), Sampling(max_tokens=6, **fields))
    run(engine)
    assert not both.failures
    assert re.fullmatch("b*" if "bad_words" in fields else "[ab]{2,6}", both.completions[0].text)
    assert plain.completions[0].tokens == plain_alone().tokens


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("profile", ["repeatable", pytest.param("many", marks=pytest.mark.slow)])
def test_no_combination_of_fields_fails_a_request_or_its_neighbours(profile: str) -> None:
    """A request is refused with the name of one of its fields, or completes as they require."""

    @settings(settings.get_profile(profile), max_examples=20 if profile == "repeatable" else 3000)
    @given(st.lists(combinations, min_size=1, max_size=4))
    def check(requests: list[dict[str, Any]]) -> None:
        engine = make_engine(shared_source())
        plain = submit_request(engine, make_prompt(5), PLAIN)
        accepted, refused = [], []
        for number, fields in enumerate(requests):
            options = {name: value for name, value in fields.items() if name in {"seeds", "stream"}}
            if "grammar" in fields:
                options["constraint"] = compiled(*fields["grammar"])
            sampling = {name: value for name, value in fields.items() if name not in {"seeds", "stream", "grammar"}}
            try:
                answer = submit_request(engine, make_prompt(6, number), Sampling(max_tokens=8, **sampling), **options)
            except RequestError as refusal:
                refused.append((refusal.param, fields))
                continue
            accepted.append((fields, answer))
        run(engine)
        assert all(param in fields for param, fields in refused)
        assert plain.completions[0].tokens == plain_alone().tokens
        for fields, answer in accepted:
            assert not answer.failures
            assert len(answer.completions) == len(fields.get("seeds", (7,)))
            for completion in answer.completions:
                check_completion(completion, fields)

    check()


def check_completion(completion: Completion, fields: dict[str, Any]) -> None:
    """Check the rules that hold whatever other fields a request has."""
    if "allowed_token_ids" in fields:
        assert set(completion.tokens) <= set(fields["allowed_token_ids"])
    if "top_logprobs" in fields:
        assert [len(top) <= fields["top_logprobs"] for top in completion.top_logprobs] == [True] * len(
            completion.tokens
        )
    if completion.finish_reason == "stop" and "grammar" in fields and completion.stop_reason in {None, END}:
        assert re.fullmatch(GRAMMARS[fields["grammar"]], completion.text)


class _Mute:
    """A constraint whose mask cannot be computed at the third token: it is too short, empty, or not computed at all."""

    def __init__(self, last: bytes | Exception) -> None:
        self._last, self._steps = last, 0

    def start(self) -> _Mute:
        """Return the state of a completion."""
        return _Mute(self._last)

    def allowed(self) -> bytes:
        """Allow every token at first."""
        self._steps += 1
        if self._steps < 3:
            return b"\xff" * (VOCABULARY // 8)
        if isinstance(self._last, Exception):
            raise self._last
        return self._last

    def accept(self, _: int, /) -> bool:
        """Accept every token."""
        return False


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("last", "param"),
    [
        (b"\xff" * 8, ""),
        (b"\0" * (VOCABULARY // 8) + b"\xff" * 4, ""),
        (OSError("lost"), ""),
        (RequestError("too much work", param="guided_regex"), "guided_regex"),
    ],
    ids=["too short", "no token of the vocabulary", "OSError", "RequestError"],
)
def test_a_mask_that_cannot_be_computed_fails_its_own_request(last: bytes | Exception, param: str) -> None:
    """Its neighbours complete, with the tokens that they have alone."""
    engine = make_engine(shared_source())
    failing = submit_request(engine, make_prompt(6), Sampling(max_tokens=8), constraint=_Mute(last))
    plain = submit_request(engine, make_prompt(5), PLAIN)
    constrained = submit_request(engine, (1, 2), Sampling(max_tokens=8), constraint=compiled("regex", "[ab]{4}"))
    run(engine)
    assert [getattr(event, "param", None) for event in failing.events] == [param]
    assert plain.completions[0].tokens == plain_alone().tokens
    assert len(constrained.completions[0].tokens) == 4
    assert engine.running == 0
