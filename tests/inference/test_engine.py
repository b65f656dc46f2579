"""The decode engine: events, endings, isolation of requests, and bounds."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ChunkedKVCache
from msgspec.structs import replace

from clotho.inference.engine import DecodeEngine
from protocols.errors import ModelError
from protocols.sampling import CompletionDone, SampleRequest, Sampling
from tests.inference.engine_helpers import (
    GREEDY,
    SAMPLED,
    RecordedEvents,
    complete_alone,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import tiny_source

pytestmark = pytest.mark.usefixtures("read_mode")
"""Tokens are read at once, and one step later."""
END = 256


def test_the_prompt_of_a_group_is_prefilled_once() -> None:
    """Eight completions of 40 tokens compute 39 prompt tokens. The last one is the first input of every row."""
    engine = make_engine()
    answer = submit_request(engine, make_prompt(40), seeds=range(8))
    run(engine)
    assert engine.stats().prefill_tokens == 39
    assert len({c.tokens for c in answer.completions}) > 1


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    """A running row samples a token in every tick that prefills a chunk."""
    engine = make_engine(prefill_chunk=10)
    early = submit_request(engine, make_prompt(3), Sampling(max_tokens=60, ignore_eos=True))
    tick_until(engine, lambda: engine.running == 1)
    engine.tick()
    late = submit_request(engine, make_prompt(101))
    before = engine.stats()
    ticks = 0
    while engine.running < 2:
        assert engine.tick() >= 1
        ticks += 1
    assert ticks >= 10
    assert engine.stats().prefill_tokens - before.prefill_tokens == 100
    run(engine)
    assert len(early.completions[0].tokens) == 60
    assert late.completions[0].tokens == complete_alone(tiny_source(), make_prompt(101), SAMPLED).tokens


def test_a_completion_ends_at_an_end_token_of_the_model() -> None:
    """`tokens` contains the end token, and `text` does not. `ignore_eos` continues."""
    bias = ((END, 100.0),)
    engine = make_engine()
    ended = submit_request(engine, make_prompt(4), Sampling(logit_bias=bias, max_tokens=5))
    ignored = submit_request(engine, make_prompt(4), Sampling(logit_bias=bias, max_tokens=5, ignore_eos=True))
    run(engine)
    completion = ended.completions[0]
    assert (completion.tokens, completion.text) == ((END,), "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", END)
    assert (ignored.completions[0].tokens, ignored.completions[0].finish_reason) == ((END,) * 5, "length")


def test_a_completion_ends_at_a_requested_stop_token() -> None:
    """`tokens` contains it, `stop_reason` names it, and `text` ends before it."""
    source = tiny_source()
    tokens = complete_alone(source, make_prompt(6), SAMPLED).tokens
    stop = tokens[4]
    first = tokens.index(stop)
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(6), Sampling(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
    run(engine)
    completion = answer.completions[0]
    assert completion.tokens == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == source.tokenizer.decode(tokens[:first])


def forced(text: str) -> Sampling:
    """Return sampling parameters that allow only the letters of `text`, with equal probability."""
    return Sampling(logit_bias=tuple((b, 100.0) for b in set(text.encode())), max_tokens=8, ignore_eos=True)


def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it() -> None:
    """A token that was already sampled after it is dropped. The text ends before the stop string."""
    engine = make_engine()
    answer = submit_request(engine, make_prompt(4), replace(forced("a"), stop=("aaa",)), seeds=(1, 2))
    run(engine)
    for completion in answer.completions:
        assert completion.tokens == (97, 97, 97)
        assert len(completion.logprobs) == len(completion.versions) == 3
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "aaa")
    assert engine.stats().tokens_sampled == 6


def test_the_chunks_of_a_stream_add_up_to_the_completion() -> None:
    """Tokens, log-probabilities, versions, alternatives and text of the stream equal those of the completion."""
    engine = make_engine()
    sampling = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=2)
    answer = submit_request(engine, make_prompt(5), sampling, seeds=(3, 4), stream=True)
    run(engine)
    for index, completion in enumerate(answer.completions):
        sampled = answer.streamed(index)
        assert tuple(e.token for e in sampled) == completion.tokens
        assert tuple(e.logprob for e in sampled) == completion.logprobs
        assert tuple(e.version for e in sampled) == completion.versions
        assert tuple(e.top_logprobs for e in sampled) == completion.top_logprobs
        assert all(len(top) == 2 for top in completion.top_logprobs)
        assert answer.text(index) == completion.text
    assert isinstance(answer.events[-1], CompletionDone)


def test_a_row_that_ends_by_length_samples_no_extra_token() -> None:
    """The number of decode steps equals the number of tokens."""
    engine = make_engine()
    submit_request(engine, make_prompt(5), Sampling(max_tokens=9, ignore_eos=True), seeds=(1, 2, 3))
    assert run(engine) == 27
    assert engine.stats().decode_steps == 9


def test_groups_larger_than_the_batch_are_split() -> None:
    """Twenty completions on three rows: at most three rows run, and the prompt is prefilled once."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=3)
    answer = submit_request(engine, make_prompt(9), seeds=range(20))
    most = 0
    while engine.has_work:
        engine.tick()
        most = max(most, engine.running)
    assert most == 3
    assert engine.stats().prefill_tokens == 8
    assert len(answer.completions) == 20
    assert answer.completions[17].tokens == complete_alone(source, make_prompt(9), SAMPLED, 17).tokens


def test_rows_are_admitted_while_their_kv_cache_fits() -> None:
    """Rows times the longest reserved length is at most `kv_cache_tokens`."""
    engine = make_engine(kv_cache_tokens=100)
    small = submit_request(engine, make_prompt(10), Sampling(max_tokens=10, ignore_eos=True), seeds=range(9))
    large = submit_request(engine, make_prompt(30), Sampling(max_tokens=20, ignore_eos=True), seeds=range(2))
    loads = []
    while engine.has_work:
        engine.tick()
        table = engine._short.batch.table
        loads.append(table.load(movable="clients").tokens)
    assert max(loads) == 100
    assert (len(small.completions), len(large.completions)) == (9, 2)


def test_waiting_requests_are_served_in_order() -> None:
    """A small request does not overtake a large one."""
    engine = make_engine(max_num_seqs=4)
    order: list[str] = []

    def listen(name: str) -> Any:
        return lambda event: order.append(name)

    for name, count in (("first", 3), ("second", 4), ("third", 1)):
        engine.submit(SampleRequest(prompt=(1, 2), sampling=SAMPLED, seeds=tuple(range(count))), listen(name))
    run(engine)
    assert order == ["first"] * 3 + ["second"] * 4 + ["third"]


def test_abort_frees_rows_and_returns_the_sampled_tokens() -> None:
    """For running, waiting and unknown requests. Every completion ends exactly once."""
    engine = make_engine(max_num_seqs=2)
    running, waiting = RecordedEvents(), RecordedEvents()
    request = SampleRequest(prompt=(1, 2, 3), sampling=Sampling(max_tokens=50, ignore_eos=True), seeds=(1, 2, 3))
    first = engine.submit(request, running.events.append)
    second = engine.submit(request, waiting.events.append)
    other = submit_request(engine, (1, 2), GREEDY)
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 8)
    for request_id in (first, second, 99):
        engine.abort(request_id)
    engine.tick()
    assert [c.finish_reason for c in running.completions] == ["abort"] * 3
    assert [len(c.tokens) for c in running.completions] == [4, 4, 0]
    assert [len(c.tokens) for c in waiting.completions] == [0, 0, 0]
    engine.abort(first)
    run(engine)
    assert len(other.completions[0].tokens) == 12
    assert len(running.events) == 3
    assert engine.stats().finished == {"abort": 6, "length": 1}


def test_a_request_that_is_aborted_twice_before_the_next_step_is_counted_once() -> None:
    """Requests that ended are counted no more either."""
    engine = make_engine()
    for client in ("a", "b"):
        engine.submit(SampleRequest(prompt=(1, 2), sampling=GREEDY, seeds=(1,), client=client), lambda event: None)
    assert [engine.abort_clients(None, client) for client in ("a", "a", "", "")] == [1, 0, 1, 0]
    engine.tick()
    assert engine.abort_clients(None) == 0


class DroppingHead(nn.Module):
    """A head after dropout, as in adapters."""

    def __init__(self, head: nn.Module) -> None:
        base: Any = super()
        base.__init__()
        self.head = head
        self.dropout = nn.Dropout(0.9)

    def __call__(self, x: mx.array) -> mx.array:
        """Project what dropout leaves."""
        logits: mx.array = self.head(self.dropout(x))
        return logits


def test_a_model_in_training_mode_is_sampled_without_dropout() -> None:
    """Its mode is restored after the tick."""
    source = tiny_source()
    expected = complete_alone(source, make_prompt(4), SAMPLED).tokens
    source.model.lm_head = DroppingHead(source.model.lm_head)
    engine = make_engine(source)
    source.model.train()
    answer = submit_request(engine, make_prompt(4))
    run(engine)
    assert source.model.training
    assert answer.completions[0].tokens == expected


def test_a_model_with_an_unshareable_kv_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction, with the name of the cache class."""
    source = tiny_source()
    chunked: Any = ChunkedKVCache
    monkeypatch.setattr(type(source.model), "make_cache", lambda self: [chunked(8), chunked(8)], raising=False)
    with pytest.raises(ModelError, match="ChunkedKVCache"):
        make_engine(source)


def test_unused_slots_are_removed_when_they_cost_more_than_a_copy() -> None:
    """Eleven of twelve rows end early. The batch shrinks, and the remaining completion does not change."""
    source = tiny_source()
    engine = make_engine(source)
    long = Sampling(max_tokens=60, ignore_eos=True)
    answer = submit_request(engine, make_prompt(7), long, seeds=(5,))
    submit_request(engine, make_prompt(9), Sampling(max_tokens=4, ignore_eos=True), seeds=range(11))
    tick_until(engine, lambda: engine.running == 12)
    tick_until(engine, lambda: engine._short.batch.slots == 1)
    assert engine.running == 1
    run(engine)
    assert answer.completions[0].tokens == complete_alone(source, make_prompt(7), long, 5).tokens


def test_a_long_prompt_does_not_lengthen_unused_slots() -> None:
    """Memory stays within the bound if a long row joins 23 rows after eight slots became unused."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=31)
    submit_request(engine, make_prompt(5), Sampling(max_tokens=3, ignore_eos=True), seeds=range(8))
    others = submit_request(engine, make_prompt(6), Sampling(max_tokens=40, ignore_eos=True), seeds=range(23))
    tick_until(engine, lambda: engine.running == 31)
    long = submit_request(engine, make_prompt(300))
    while engine.has_work:
        engine.tick()
        assert engine.stats().cache_tokens <= 24 * (300 + 64)
    assert long.completions[0].tokens == complete_alone(source, make_prompt(300), SAMPLED).tokens
    assert all(len(completion.tokens) == 40 for completion in others.completions)


def test_the_engine_works_in_any_single_thread() -> None:
    """MLX streams belong to a thread. The engine creates none outside the thread that constructs and ticks it."""
    source = tiny_source()
    expected = complete_alone(source, make_prompt(5), GREEDY).tokens
    found: list[tuple[int, ...]] = []

    def work() -> None:
        engine: DecodeEngine = make_engine(source)
        answer = submit_request(engine, make_prompt(5), GREEDY)
        run(engine)
        found.append(answer.completions[0].tokens)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [expected]
