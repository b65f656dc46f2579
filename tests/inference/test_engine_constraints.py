"""Rows whose completions are constrained by a grammar, sampled by the host and on the device."""

from __future__ import annotations

import json
from typing import Literal

import numpy as np
import pytest

from attachments.atropos.sample_log import SampleLog
from protocols.constraints import Constraint, Grammar, GrammarKind
from protocols.errors import RequestError
from protocols.sampling import Completion, SampleRequest, Sampling
from tests.inference.engine_helpers import (
    full_logits,
    log_softmax,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import FixedSource, byte_tokenizer, tiny_source

pytestmark = pytest.mark.usefixtures("read_mode")
"""Both implementations of sampling."""

END = 256
CHOICES = ("yes", "yesterday", "no", "nöon", "\U0001f600!")


def compiled(kind: GrammarKind, text: str) -> Constraint:
    """Compile a grammar for the byte tokenizer."""
    return byte_tokenizer().compile_grammar(Grammar(kind=kind, text=text, param="guided"), END + 1)


@pytest.fixture(scope="module")
def choice() -> Constraint:
    """The constraint to one of `CHOICES`."""
    return compiled("choice", json.dumps(CHOICES))


def may_follow(sampled: bytes) -> list[int]:
    """Return the tokens that may follow, by comparison with every choice."""
    sentences = [one.encode() for one in CHOICES]
    bytes_ = {one[len(sampled)] for one in sentences if one.startswith(sampled) and len(one) > len(sampled)}
    return sorted(bytes_ | ({END} if sampled in sentences else set()))


def expected_logprobs(
    source: FixedSource, prompt: tuple[int, ...], completion: Completion, temperature: float
) -> list[float]:
    """Renormalise the model's logits over the tokens that may follow."""
    tokens = [*prompt, *completion.tokens]
    logits_T_V = full_logits(source.model, tokens)
    found = []
    for t in range(len(prompt), len(tokens)):
        allowed = may_follow(bytes(tokens[len(prompt) : t]))
        logp_N = log_softmax(logits_T_V[t - 1][allowed] / (temperature or 1.0))
        found.append(float(logp_N[allowed.index(tokens[t])]))
    return found


def test_log_probabilities_are_those_of_the_constrained_distribution(choice: Constraint) -> None:
    """At two temperatures and greedily. Every completion is a choice, and ends when nothing can follow."""
    source = tiny_source()
    engine = make_engine(source)
    prompts = [make_prompt(5, salt) for salt in range(3)]
    answers = [
        submit_request(
            engine, prompt, Sampling(temperature=temperature, max_tokens=40), range(8), constraint=choice, stream=True
        )
        for prompt, temperature in zip(prompts, (0.0, 1.0, 2.5), strict=True)
    ]
    run(engine)
    texts = set()
    for prompt, temperature, answer in zip(prompts, (0.0, 1.0, 2.5), answers, strict=True):
        for completion in answer.completions:
            texts.add(completion.text)
            assert completion.finish_reason == "stop"
            assert (completion.tokens[-1] == END) == (completion.text == "yes" and completion.stop_reason == END)
            expected = expected_logprobs(source, prompt, completion, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    assert len(texts) > 2
    assert texts <= set(CHOICES)


def test_rows_without_a_constraint_are_equal_bit_for_bit() -> None:
    """A constraint of a neighbour changes neither tokens nor log-probabilities, with and without filters."""
    regex = compiled("regex", "[ab]{30}")
    outcomes = []
    for constraint in (None, regex):
        engine = make_engine()
        free = [
            submit_request(engine, make_prompt(6, 1), Sampling(max_tokens=20, ignore_eos=True), (1, 2)),
            submit_request(engine, make_prompt(6, 2), Sampling(top_p=0.8, max_tokens=20, ignore_eos=True), (3,)),
            submit_request(engine, make_prompt(6, 4), Sampling(temperature=0.0, max_tokens=20, ignore_eos=True), (3,)),
        ]
        sampling = Sampling(max_tokens=20, logit_bias=((END, -100.0),))
        beside = submit_request(engine, make_prompt(6, 3), sampling, (4, 5), constraint=constraint)
        run(engine)
        outcomes.append([answer.completions for answer in free])
        assert {len(one.tokens) for one in beside.completions} == {20}
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
def test_the_constraint_follows_a_row_through_a_weight_swap(kv_policy: Literal["keep", "recompute"]) -> None:
    """The completion stays a sentence of the grammar; with equal weights, it is the same sentence."""
    constraint = compiled("regex", "(ab|cd){4}[xyz]{3}")
    texts = []
    for swaps in (False, True):
        engine = make_engine()
        answer = submit_request(engine, make_prompt(5), Sampling(max_tokens=40), range(4), constraint=constraint)
        if swaps:
            tick_until(engine, lambda: engine.stats().tokens_sampled >= 17)  # noqa: B023
            engine.weights_changed(kv_policy)
        run(engine)
        texts.append([one.text for one in answer.completions])
    assert texts[0] == texts[1]
    assert {len(text) for text in texts[0]} == {11}


def test_a_minimum_length_ends_no_sentence_early(choice: Constraint) -> None:
    """The end token is excluded after `yes`, where the sentence can continue."""
    engine = make_engine()
    sampling = Sampling(max_tokens=40, min_tokens=5, logit_bias=((ord("y"), 100.0),), temperature=0.5)
    answer = submit_request(engine, make_prompt(5), sampling, range(6), constraint=choice)
    run(engine)
    assert {one.text for one in answer.completions} == {"yesterday"}


@pytest.mark.parametrize("field", ["allowed_token_ids", "ignore_eos"])
def test_contradicting_parameters_are_refused(field: str, choice: Constraint) -> None:
    """A constrained completion ends with its grammar, which may need any token."""
    sampling = Sampling(**{"allowed_token_ids": (1,)} if field == "allowed_token_ids" else {"ignore_eos": True})
    with pytest.raises(RequestError) as raised:
        submit_request(make_engine(), (1,), sampling, constraint=choice)
    assert raised.value.param == field


class _Exhausted:
    """A constraint whose library gives up at the third token."""

    def start(self) -> _Exhausted:
        """Return the state of a completion."""
        self.accepted = 0
        return self

    def allowed(self) -> bytes:
        """Allow every token."""
        return b"\xff" * 32 + b"\x01\0\0\0"

    def accept(self, _: int, /) -> bool:
        """Raise at the third token."""
        self.accepted += 1
        if self.accepted == 3:
            raise RequestError("too much work", param="guided_regex")
        return False


def test_a_grammar_that_exceeds_its_limits_fails_its_request_alone(choice: Constraint) -> None:
    """The failure names the field; the other rows complete, and constraints of theirs follow them."""
    engine = make_engine()
    failing = submit_request(engine, (1, 2), Sampling(max_tokens=9), constraint=_Exhausted())
    other = submit_request(engine, (1, 2), Sampling(max_tokens=9, ignore_eos=True))
    chosen = submit_request(engine, (1, 2), Sampling(max_tokens=12), constraint=choice)
    run(engine)
    assert failing.failures == ["too much work"]
    assert bytes(token for token in chosen.completions[0].tokens if token != END).decode() in CHOICES
    assert [getattr(event, "param", None) for event in failing.events] == ["guided_regex"]
    assert len(other.completions[0].tokens) == 9


def test_constrained_completions_cannot_be_trained_on(choice: Constraint) -> None:
    """The sample log marks them, because the learner does not know which tokens were excluded."""
    log = SampleLog()
    request = SampleRequest(prompt=(1,), sampling=Sampling(), seeds=(1,), constraint=choice)
    completion = Completion(tokens=(3,), logprobs=(-1.0,), versions=(0,), text="", finish_reason="stop")
    log.remember(request, completion, client_label="")
    found = log.find([1, 3], 1, 2)
    assert found is not None
    assert "grammar" in found.unlearnable
