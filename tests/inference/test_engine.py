"""The engine's promises to its client_labels: events, endings, isolation, bounds."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ChunkedKVCache
from msgspec.structs import replace

from clotho.inference import DecodeEngine
from protocols.errors import ModelError
from protocols.sampling import CompletionDone, SampleRequest, Sampling
from tests.inference.engine_helpers import FREE, GREEDY, Answer, alone, ask, make_engine, prompt_of, run, tick_until
from tests.small_models import tiny_source


@pytest.fixture(params=["sampled by the host", "sampled on the device"], autouse=True)
def drawn_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with steps read at once, and with steps read one behind, as on a GPU."""
    if request.param == "sampled on the device":
        monkeypatch.setattr("clotho.inference.batch.can_sample_on_cpu", lambda plan: False)


END = 256


def test_the_prompt_of_a_group_is_computed_once() -> None:
    """Eight completions of 40 tokens cost 39 computed tokens: the last is the first input of every row."""
    engine = make_engine()
    answer = ask(engine, prompt_of(40), seeds=range(8))
    run(engine)
    assert engine.stats().prefill_tokens == 39
    assert len({c.tokens for c in answer.completions}) > 1


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    """A running row gets a token in every tick that computes a chunk."""
    engine = make_engine(prefill_chunk=10)
    early = ask(engine, prompt_of(3), Sampling(max_tokens=60, ignore_eos=True))
    tick_until(engine, lambda: engine.running == 1)
    engine.tick()
    late = ask(engine, prompt_of(101))
    before = engine.stats()
    ticks = 0
    while engine.running < 2:
        assert engine.tick() >= 1
        ticks += 1
    assert ticks >= 10
    assert engine.stats().prefill_tokens - before.prefill_tokens == 100
    run(engine)
    assert len(early.completions[0].tokens) == 60
    assert late.completions[0].tokens == alone(tiny_source(), prompt_of(101), FREE).tokens


def test_a_completion_ends_with_the_models_end_token() -> None:
    """The token is kept, its text is not; `ignore_eos` goes on."""
    bias = ((END, 100.0),)
    engine = make_engine()
    ended = ask(engine, prompt_of(4), Sampling(logit_bias=bias, max_tokens=5))
    ignored = ask(engine, prompt_of(4), Sampling(logit_bias=bias, max_tokens=5, ignore_eos=True))
    run(engine)
    completion = ended.completions[0]
    assert (completion.tokens, completion.text) == ((END,), "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", END)
    assert (ignored.completions[0].tokens, ignored.completions[0].finish_reason) == ((END,) * 5, "length")


def test_a_completion_ends_with_a_requested_stop_token() -> None:
    """The token is kept in `tokens` and named as the reason; the text ends before it."""
    source = tiny_source()
    tokens = alone(source, prompt_of(6), FREE).tokens
    stop = tokens[4]
    first = tokens.index(stop)
    engine = make_engine(source)
    answer = ask(engine, prompt_of(6), Sampling(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
    run(engine)
    completion = answer.completions[0]
    assert completion.tokens == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == source.tokenizer.decode(tokens[:first])


def forced(text: str) -> Sampling:
    """Return settings under which a model can say nothing but the letters of `text`, all alike."""
    return Sampling(logit_bias=tuple((b, 100.0) for b in set(text.encode())), max_tokens=8, ignore_eos=True)


def test_a_stop_string_ends_a_completion_with_the_token_that_completed_it() -> None:
    """Tokens after the match do not exist, though one more had been sampled; the text ends before it."""
    engine = make_engine()
    answer = ask(engine, prompt_of(4), replace(forced("a"), stop=("aaa",)), seeds=(1, 2))
    run(engine)
    for completion in answer.completions:
        assert completion.tokens == (97, 97, 97)
        assert len(completion.logprobs) == len(completion.versions) == 3
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "aaa")
    assert engine.stats().tokens_sampled == 6


def test_streamed_tokens_and_tail_make_up_the_completion() -> None:
    """Token by token the same tokens, log-probabilities, versions, alternatives and text as at the end."""
    engine = make_engine()
    sampling = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=2)
    answer = ask(engine, prompt_of(5), sampling, seeds=(3, 4), stream=True)
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


def test_a_row_that_ends_at_its_last_token_wastes_no_draw() -> None:
    """An end by length is foreseen: as many decode steps as tokens."""
    engine = make_engine()
    ask(engine, prompt_of(5), Sampling(max_tokens=9, ignore_eos=True), seeds=(1, 2, 3))
    assert run(engine) == 27
    assert engine.stats().decode_steps == 9


def test_groups_larger_than_the_batch_are_split_over_time() -> None:
    """Twenty completions on three rows: never more than three run, the prompt is computed once, none differs."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=3)
    answer = ask(engine, prompt_of(9), seeds=range(20))
    most = 0
    while engine.has_work:
        engine.tick()
        most = max(most, engine.running)
    assert most == 3
    assert engine.stats().prefill_tokens == 8
    assert len(answer.completions) == 20
    assert answer.completions[17].tokens == alone(source, prompt_of(9), FREE, 17).tokens


def test_rows_are_admitted_only_while_their_cache_fits() -> None:
    """Rows x longest reserved length stays within kv_cache_tokens."""
    engine = make_engine(kv_cache_tokens=100)
    small = ask(engine, prompt_of(10), Sampling(max_tokens=10, ignore_eos=True), seeds=range(9))
    large = ask(engine, prompt_of(30), Sampling(max_tokens=20, ignore_eos=True), seeds=range(2))
    loads = []
    while engine.has_work:
        engine.tick()
        table = engine._batch.table
        loads.append(table.running * table.longest_reserved)
    assert max(loads) == 100
    assert (len(small.completions), len(large.completions)) == (9, 2)


def test_waiting_is_first_come_first_served() -> None:
    """A small request does not overtake a large one."""
    engine = make_engine(max_num_seqs=4)
    order: list[str] = []

    def listen(name: str) -> Any:
        return lambda event: order.append(name)

    for name, count in (("first", 3), ("second", 4), ("third", 1)):
        engine.submit(SampleRequest(prompt=(1, 2), sampling=FREE, seeds=tuple(range(count))), listen(name))
    run(engine)
    assert order == ["first"] * 3 + ["second"] * 4 + ["third"]


def test_abort_frees_rows_and_reports_what_was_drawn() -> None:
    """Running, waiting and unknown requests alike; every completion ends exactly once."""
    engine = make_engine(max_num_seqs=2)
    running, waiting = Answer(), Answer()
    request = SampleRequest(prompt=(1, 2, 3), sampling=Sampling(max_tokens=50, ignore_eos=True), seeds=(1, 2, 3))
    first = engine.submit(request, running.events.append)
    second = engine.submit(request, waiting.events.append)
    other = ask(engine, (1, 2), GREEDY)
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


def test_after_everything_has_ended_nothing_is_left() -> None:
    """Gauges return to zero."""
    engine = make_engine()
    for i in range(3):
        ask(engine, prompt_of(5, i), seeds=(1, 2))
    run(engine)
    stats = engine.stats()
    assert (stats.running_rows, stats.waiting_rows, engine.running, engine.has_work) == (0, 0, 0, False)
    assert engine.tick() == 0
    assert engine.stats().cache_tokens == 0


class DroppingHead(nn.Module):
    """A head behind dropout, as adapters have it."""

    def __init__(self, head: nn.Module) -> None:
        base: Any = super()
        base.__init__()
        self.head = head
        self.dropout = nn.Dropout(0.9)

    def __call__(self, x: mx.array) -> mx.array:
        """Project what dropout leaves."""
        logits: mx.array = self.head(self.dropout(x))
        return logits


def test_a_model_left_in_training_mode_is_sampled_without_dropout() -> None:
    """And is in training mode again after the tick."""
    source = tiny_source()
    expected = alone(source, prompt_of(4), FREE).tokens
    source.model.lm_head = DroppingHead(source.model.lm_head)
    engine = make_engine(source)
    source.model.train()
    answer = ask(engine, prompt_of(4))
    run(engine)
    assert source.model.training
    assert answer.completions[0].tokens == expected


def test_a_model_whose_cache_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and by name, not in the middle of a run."""
    source = tiny_source()
    chunked: Any = ChunkedKVCache
    monkeypatch.setattr(type(source.model), "make_cache", lambda self: [chunked(8), chunked(8)], raising=False)
    with pytest.raises(ModelError, match="ChunkedKVCache"):
        make_engine(source)


def test_dead_slots_are_given_up_once_they_cost_more_than_a_copy() -> None:
    """Of twelve rows eleven end early; the batch shrinks to the one that goes on, which does not notice."""
    source = tiny_source()
    engine = make_engine(source)
    long = Sampling(max_tokens=60, ignore_eos=True)
    answer = ask(engine, prompt_of(7), long, seeds=(5,))
    ask(engine, prompt_of(9), Sampling(max_tokens=4, ignore_eos=True), seeds=range(11))
    tick_until(engine, lambda: engine.running == 12)
    tick_until(engine, lambda: engine._batch.slots == 1)
    assert engine.running == 1
    run(engine)
    assert answer.completions[0].tokens == alone(source, prompt_of(7), long, 5).tokens


def test_a_long_prompt_does_not_lengthen_the_cache_of_dead_slots() -> None:
    """Memory stays within the bound although eight slots have just died when a long row joins the other 23."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=31)
    ask(engine, prompt_of(5), Sampling(max_tokens=3, ignore_eos=True), seeds=range(8))
    others = ask(engine, prompt_of(6), Sampling(max_tokens=40, ignore_eos=True), seeds=range(23))
    tick_until(engine, lambda: engine.running == 31)
    long = ask(engine, prompt_of(300))
    while engine.has_work:
        engine.tick()
        assert engine.stats().cache_tokens <= 24 * (300 + 64)
    assert long.completions[0].tokens == alone(source, prompt_of(300), FREE).tokens
    assert all(len(completion.tokens) == 40 for completion in others.completions)


def test_the_engine_can_be_made_and_used_in_one_foreign_thread() -> None:
    """Streams of MLX belong to a thread; the engine creates nothing outside the one that makes and ticks it."""
    source = tiny_source()
    expected = alone(source, prompt_of(5), GREEDY).tokens
    found: list[tuple[int, ...]] = []

    def work() -> None:
        engine: DecodeEngine = make_engine(source)
        answer = ask(engine, prompt_of(5), GREEDY)
        run(engine)
        found.append(answer.completions[0].tokens)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [expected]
