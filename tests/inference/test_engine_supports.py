"""Recorded supports: the tokens that could have been sampled, over which each log-probability is normalised."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from msgspec.structs import replace

from protocols.sampling import Completion, SampleRequest, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    SAMPLED,
    RecordedEvents,
    complete_alone,
    full_logits,
    log_softmax,
    make_engine,
    make_prompt,
    processed_logprobs,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import FixedSource, tiny_source

pytestmark = pytest.mark.usefixtures("read_mode")
"""Tokens are read at once, and one step later."""

NUCLEUS = Sampling(temperature=0.5, top_p=0.6, top_k=20, max_tokens=12, ignore_eos=True)
LETTERS = Sampling(top_k=2, logit_bias=((97, 30.0), (98, 30.0)), max_tokens=12, ignore_eos=True)
SETTINGS = (
    NUCLEUS,
    Sampling(temperature=1.3, top_k=5, max_tokens=14, ignore_eos=True),
    Sampling(min_p=0.1, top_k=40, max_tokens=9, ignore_eos=True),
    Sampling(top_p=0.9, top_k=256, logit_bias=((5, 2.0), (9, -3.0)), max_tokens=12, ignore_eos=True),
    Sampling(repetition_penalty=1.3, top_p=0.9, top_k=30, min_p=0.02, max_tokens=12, ignore_eos=True),
)


def support_of(support: bytes) -> list[int]:
    """Return the support of one token."""
    return [int(token) for token in np.frombuffer(support, dtype="<u4")]


def check_supports(
    model: nn.Module, prompt: tuple[int, ...], completion: Completion, s: Sampling, *, start: int = 0, stop: int = 999
) -> None:
    """Compare the supports of tokens `start` to `stop` with one full forward pass.

    Each support equals the reference filter, and the log-probability is normalised over it.
    """
    tokens = [*prompt, *completion.tokens]
    logits_T_V = full_logits(model, tokens)
    unfiltered = replace(s, top_p=1.0, top_k=0, min_p=0.0)
    assert len(completion.supports) == len(completion.tokens)
    for i in range(start, min(stop, len(completion.tokens))):
        t = len(prompt) + i
        support = support_of(completion.supports[i])
        assert support == np.flatnonzero(processed_logprobs(logits_T_V[t - 1], tokens[:t], s) > -np.inf).tolist()
        logp_K = log_softmax(processed_logprobs(logits_T_V[t - 1], tokens[:t], unfiltered)[support])
        np.testing.assert_allclose(completion.logprobs[i], logp_K[support.index(tokens[t])], atol=1e-5)


@pytest.mark.lanes("4bit", read_mode=("sampled on the device",))
def test_rows_with_and_without_supports_share_a_batch() -> None:
    """Filters of all kinds that join at different times sample the same tokens as without recording."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=6)
    recorded, silent = [], []
    for i, sampling in enumerate(SETTINGS):
        recorded.append(
            submit_request(engine, make_prompt(5 + i, i), sampling, (i, i + 50), record_support=True, stream=i % 2 > 0)
        )
        silent.append(submit_request(engine, make_prompt(5 + i, i), sampling, (i,)))
        engine.tick()
    plain = submit_request(engine, make_prompt(4), SAMPLED, record_support=True)
    greedy = submit_request(engine, make_prompt(4), replace(NUCLEUS, temperature=0.0), record_support=True)
    run(engine)
    for i, (sampling, told, untold) in enumerate(zip(SETTINGS, recorded, silent, strict=True)):
        for completion in told.completions:
            check_supports(source.model, make_prompt(5 + i, i), completion, sampling)
        assert told.completions[0].tokens == untold.completions[0].tokens
        assert untold.completions[0].supports == ()
    assert plain.completions[0].supports == greedy.completions[0].supports == ()


def recorded_completion(source: FixedSource, sampling: Sampling) -> RecordedEvents:
    """Return a completion with supports from an engine of its own."""
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(6), sampling, record_support=True)
    run(engine)
    return answer


@pytest.mark.parametrize("stop", ["string", "token"])
def test_a_stopped_completion_has_one_support_per_token(stop: str) -> None:
    """A token that was sampled beyond its end leaves no support."""
    source = tiny_source()
    text = complete_alone(source, make_prompt(6), LETTERS).text
    stops = (
        replace(LETTERS, stop=(text[2:5],)) if stop == "string" else replace(LETTERS, stop_token_ids=(ord(text[4]),))
    )
    completion = recorded_completion(source, stops).completions[0]
    assert completion.finish_reason == "stop"
    assert 0 < len(completion.tokens) <= 5
    check_supports(source.model, make_prompt(6), completion, stops)


def test_a_prefix_cache_hit_changes_no_support() -> None:
    """The second completion of a prompt equals the first."""
    source = tiny_source()
    engine = make_engine(source)
    answers = []
    for _ in range(2):
        answers.append(submit_request(engine, make_prompt(30), NUCLEUS, reuse_prefix=True, record_support=True))
        run(engine)
    assert engine.stats().prefix_hits == 1
    assert answers[0].completions == answers[1].completions
    check_supports(source.model, make_prompt(30), answers[1].completions[0], NUCLEUS)


def test_supports_survive_an_interruption() -> None:
    """Under `recompute` each token's support is that of its version's weights."""
    source = tiny_source()
    engine = make_engine(source)
    answers = [submit_request(engine, make_prompt(4 + i), NUCLEUS, (i, i + 9), record_support=True) for i in range(2)]
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 16)
    old = source.model.parameters()
    new = model_lanes.scaled(old, 1.3)
    source.model.update(new)
    source.version += 1
    engine.weights_changed("recompute")
    run(engine)
    for i, answer in enumerate(answers):
        for completion in answer.completions:
            swapped = completion.versions.index(1)
            assert swapped > 0
            source.model.update(old)
            check_supports(source.model, make_prompt(4 + i), completion, NUCLEUS, stop=swapped)
            source.model.update(new)
            check_supports(source.model, make_prompt(4 + i), completion, NUCLEUS, start=swapped)


def test_an_aborted_completion_keeps_its_supports() -> None:
    """A row that never began has none."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=2)
    answer = RecordedEvents()
    request = SampleRequest(prompt=make_prompt(6), sampling=NUCLEUS, seeds=(1, 2, 3), record_support=True)
    request_id = engine.submit(request, answer.events.append)
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 8)
    engine.abort(request_id)
    engine.tick()
    assert [len(c.supports) for c in answer.completions] == [4, 4, 0]
    check_supports(source.model, make_prompt(6), answer.completions[0], NUCLEUS)


def test_supports_move_with_their_rows_between_slots() -> None:
    """The batch shrinks to one row between the launch of a step and its reading."""
    source = tiny_source()
    engine = make_engine(source)
    submit_request(engine, make_prompt(9), replace(SAMPLED, max_tokens=4), seeds=range(11))
    long = replace(NUCLEUS, max_tokens=40)
    answer = submit_request(engine, make_prompt(6), long, record_support=True)
    tick_until(engine, lambda: engine._short.batch.slots == 1)
    assert engine.running == 1
    run(engine)
    check_supports(source.model, make_prompt(6), answer.completions[0], long)


def test_bfloat16_logits_with_ties_keep_exactly_k_tokens() -> None:
    """Many logits are equal in bfloat16. The lowest token ids are kept."""
    source = tiny_source()
    source.model.set_dtype(mx.bfloat16)
    sampling = Sampling(top_k=6, max_tokens=12, ignore_eos=True)
    completion = recorded_completion(source, sampling).completions[0]
    for token, support in zip(completion.tokens, completion.supports, strict=True):
        kept = support_of(support)
        assert len(kept) == 6
        assert kept == sorted(kept)
        assert token in kept
