"""Recorded supports: which tokens could have been sampled, and that each log-probability is over exactly those."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from msgspec.structs import replace

from protocols.sampling import Completion, SampleRequest, Sampling
from tests.inference.engine_helpers import (
    FREE,
    Answer,
    alone,
    ask,
    full_logits,
    log_softmax,
    make_engine,
    processed,
    prompt_of,
    run,
    tick_until,
)
from tests.small_models import FixedSource, tiny_source


@pytest.fixture(params=["sampled by the host", "sampled on the device"], autouse=True)
def drawn_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with steps read at once, and with steps read one behind, as on a GPU."""
    if request.param == "sampled on the device":
        monkeypatch.setattr("clotho.inference.batch.can_sample_on_cpu", lambda plan: False)


NUCLEUS = Sampling(temperature=0.5, top_p=0.6, top_k=20, max_tokens=12, ignore_eos=True)
LETTERS = Sampling(top_k=2, logit_bias=((97, 30.0), (98, 30.0)), max_tokens=12, ignore_eos=True)
SETTINGS = (
    NUCLEUS,
    Sampling(temperature=1.3, top_k=5, max_tokens=14, ignore_eos=True),
    Sampling(min_p=0.1, top_k=40, max_tokens=9, ignore_eos=True),
    Sampling(top_p=0.9, top_k=256, logit_bias=((5, 2.0), (9, -3.0)), max_tokens=12, ignore_eos=True),
    Sampling(repetition_penalty=1.3, top_p=0.9, top_k=30, min_p=0.02, max_tokens=12, ignore_eos=True),
)


def tokens_of(support: bytes) -> list[int]:
    """Read the numbers of one token's support."""
    return [int(token) for token in np.frombuffer(support, dtype="<u4")]


def check(
    model: nn.Module, prompt: tuple[int, ...], completion: Completion, s: Sampling, *, start: int = 0, stop: int = 999
) -> None:
    """Hold the supports of tokens `start` to `stop` to one full forward pass.

    Each is what the filters keep, and the log-probability is the log-softmax of adjusted logits over it.
    """
    tokens = [*prompt, *completion.tokens]
    logits_T_V = full_logits(model, tokens)
    unfiltered = replace(s, top_p=1.0, top_k=0, min_p=0.0)
    assert len(completion.supports) == len(completion.tokens)
    for i in range(start, min(stop, len(completion.tokens))):
        t = len(prompt) + i
        support = tokens_of(completion.supports[i])
        assert support == np.flatnonzero(processed(logits_T_V[t - 1], tokens[:t], s) > -np.inf).tolist()
        logp_K = log_softmax(processed(logits_T_V[t - 1], tokens[:t], unfiltered)[support])
        np.testing.assert_allclose(completion.logprobs[i], logp_K[support.index(tokens[t])], atol=1e-5)


def test_rows_that_record_and_rows_that_do_not_share_a_batch() -> None:
    """Filters of every kind side by side, joining at different times: the same tokens as without recording."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=6)
    recorded, silent = [], []
    for i, sampling in enumerate(SETTINGS):
        recorded.append(ask(engine, prompt_of(5 + i, i), sampling, (i, i + 50), record_support=True, stream=i % 2 > 0))
        silent.append(ask(engine, prompt_of(5 + i, i), sampling, (i,)))
        engine.tick()
    plain = ask(engine, prompt_of(4), FREE, record_support=True)
    greedy = ask(engine, prompt_of(4), replace(NUCLEUS, temperature=0.0), record_support=True)
    run(engine)
    for i, (sampling, told, untold) in enumerate(zip(SETTINGS, recorded, silent, strict=True)):
        for completion in told.completions:
            check(source.model, prompt_of(5 + i, i), completion, sampling)
        assert told.completions[0].tokens == untold.completions[0].tokens
        assert untold.completions[0].supports == ()
    assert plain.completions[0].supports == greedy.completions[0].supports == ()


def test_supports_are_narrower_than_top_k_where_top_p_says_so() -> None:
    """They are what survived, not what top-k bounds."""
    source = tiny_source()
    completion = answered(source, NUCLEUS).completions[0]
    sizes = {len(support) // 4 for support in completion.supports}
    assert min(sizes) < 20
    assert len(sizes) > 1


def answered(source: FixedSource, sampling: Sampling) -> Answer:
    """Ask for a recorded completion in an engine of its own."""
    engine = make_engine(source)
    answer = ask(engine, prompt_of(6), sampling, record_support=True)
    run(engine)
    return answer


@pytest.mark.parametrize("stop", ["string", "token"])
def test_a_completion_that_stops_has_as_many_supports_as_tokens(stop: str) -> None:
    """Whatever had been sampled beyond its end leaves no trace."""
    source = tiny_source()
    text = alone(source, prompt_of(6), LETTERS).text
    stops = (
        replace(LETTERS, stop=(text[2:5],)) if stop == "string" else replace(LETTERS, stop_token_ids=(ord(text[4]),))
    )
    completion = answered(source, stops).completions[0]
    assert completion.finish_reason == "stop"
    assert 0 < len(completion.tokens) <= 5
    check(source.model, prompt_of(6), completion, stops)


def test_a_prompt_from_the_prefix_cache_changes_no_support() -> None:
    """The second completion of a prompt, which computes nothing, is the first again."""
    source = tiny_source()
    engine = make_engine(source)
    answers = []
    for _ in range(2):
        answers.append(ask(engine, prompt_of(30), NUCLEUS, reuse_prefix=True, record_support=True))
        run(engine)
    assert engine.stats().prefix_hits == 1
    assert answers[0].completions == answers[1].completions
    check(source.model, prompt_of(30), answers[1].completions[0], NUCLEUS)


def test_supports_go_with_a_row_that_is_interrupted() -> None:
    """Under `recompute` each token's support is that of its version's weights."""
    source = tiny_source()
    engine = make_engine(source)
    answers = [ask(engine, prompt_of(4 + i), NUCLEUS, (i, i + 9), record_support=True) for i in range(2)]
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 16)
    old = source.model.parameters()
    new = tree_map(lambda a: a * 1.3, old)
    source.model.update(new)
    source.version += 1
    engine.weights_changed("recompute")
    run(engine)
    for i, answer in enumerate(answers):
        for completion in answer.completions:
            swapped = completion.versions.index(1)
            assert swapped > 0
            source.model.update(old)
            check(source.model, prompt_of(4 + i), completion, NUCLEUS, stop=swapped)
            source.model.update(new)
            check(source.model, prompt_of(4 + i), completion, NUCLEUS, start=swapped)


def test_an_aborted_completion_keeps_the_supports_of_what_it_drew() -> None:
    """A row that never began has none."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=2)
    answer = Answer()
    request = SampleRequest(prompt=prompt_of(6), sampling=NUCLEUS, seeds=(1, 2, 3), record_support=True)
    request_id = engine.submit(request, answer.events.append)
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 8)
    engine.abort(request_id)
    engine.tick()
    assert [len(c.supports) for c in answer.completions] == [4, 4, 0]
    check(source.model, prompt_of(6), answer.completions[0], NUCLEUS)


def test_rows_move_between_slots_and_their_supports_with_them() -> None:
    """The batch shrinks to the one row that goes on, between a launch and its reading."""
    source = tiny_source()
    engine = make_engine(source)
    ask(engine, prompt_of(9), replace(FREE, max_tokens=4), seeds=range(11))
    long = replace(NUCLEUS, max_tokens=40)
    answer = ask(engine, prompt_of(6), long, record_support=True)
    tick_until(engine, lambda: engine._batch.slots == 1)
    assert engine.running == 1
    run(engine)
    check(source.model, prompt_of(6), answer.completions[0], long)


def test_logits_that_are_not_finite_fail_their_own_request_alone() -> None:
    """A row without a support beside one that has them."""
    source = tiny_source()
    embedding = source.model.model.embed_tokens
    embedding.weight = mx.where(mx.arange(257)[:, None] == 200, float("nan"), embedding.weight)
    engine = make_engine(source)
    sampling = replace(NUCLEUS, logit_bias=((200, -30.0),))
    lost = ask(engine, (200,) * 4, sampling, record_support=True)
    fine = ask(engine, (9,) * 4, sampling, record_support=True)
    run(engine)
    assert lost.failures == ["the model's logits are not finite"]
    check(source.model, (9,) * 4, fine.completions[0], sampling)


def test_narrow_logits_with_many_ties_keep_the_promise() -> None:
    """In bfloat16 many logits are equal: top-k still keeps exactly k tokens, the lowest among ties."""
    source = tiny_source()
    source.model.set_dtype(mx.bfloat16)
    sampling = Sampling(top_k=6, max_tokens=12, ignore_eos=True)
    completion = answered(source, sampling).completions[0]
    for token, support in zip(completion.tokens, completion.supports, strict=True):
        kept = tokens_of(support)
        assert len(kept) == 6
        assert kept == sorted(kept)
        assert token in kept
