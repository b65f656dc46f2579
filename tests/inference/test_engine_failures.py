"""What goes wrong in one request stays in that request."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from clotho.cpu.decoder import HostDecoder
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling
from tests.inference.engine_helpers import FREE, GREEDY, Answer, alone, ask, make_engine, prompt_of, run, tick_until
from tests.small_models import tiny_source


@pytest.fixture(params=["sampled by the host", "sampled on the device"], autouse=True)
def drawn_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with steps read at once, and with steps read one behind, as on a GPU."""
    if request.param == "sampled on the device":
        monkeypatch.setattr("clotho.inference.batch.can_sample_on_cpu", lambda plan: False)


END = 256


def test_a_listener_that_raises_fails_only_its_own_request() -> None:
    """Its rows are freed, it hears nothing more, others go on."""
    engine = make_engine()
    heard: list[SampleEvent] = []

    def listener(event: SampleEvent) -> None:
        heard.append(event)
        raise RuntimeError("broken listener")

    request = SampleRequest(prompt=(1, 2), sampling=FREE, seeds=(1, 2), stream=True)
    engine.submit(request, listener)
    good = ask(engine, (1, 2), seeds=(1,))
    run(engine)
    assert len(heard) == 1
    assert len(good.completions[0].tokens) == 12
    assert engine.stats().listener_errors == 1
    assert engine.stats().running_rows == 0


def test_a_listener_may_submit_and_abort() -> None:
    """During a tick; it takes effect from the next."""
    engine = make_engine()
    follow_up = Answer()

    def listener(event: SampleEvent) -> None:
        if isinstance(event, CompletionDone):
            engine.submit(SampleRequest(prompt=(3, 4), sampling=GREEDY, seeds=(1,)), follow_up.events.append)
            engine.abort(1)

    engine.submit(SampleRequest(prompt=(1, 2), sampling=FREE, seeds=(1,)), listener)
    run(engine)
    assert len(follow_up.completions[0].tokens) == 12


def test_a_prompt_that_cannot_be_computed_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing one request raises; a request that came with it, and later ones, are answered."""
    source = tiny_source()
    engine = make_engine(source, prefill_chunk=16)
    model_class = type(source.model)
    forward = model_class.__call__

    def refuse_long(self: Any, inputs: mx.array, *args: Any, **options: Any) -> mx.array:
        if inputs.shape[1] > 12:
            raise RuntimeError("out of memory")
        result: mx.array = forward(self, inputs, *args, **options)
        return result

    monkeypatch.setattr(model_class, "__call__", refuse_long)
    bad = ask(engine, prompt_of(60), seeds=(1, 2))
    good = ask(engine, prompt_of(5))
    run(engine)
    assert len(bad.failures) == 1
    assert "out of memory" in bad.failures[0]
    assert len(good.completions[0].tokens) == 12
    assert engine.stats().failed == 1


def test_a_decode_step_that_raises_fails_the_running_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every client_label is told, the caches are dropped, the next request starts afresh."""
    source = tiny_source()
    engine = make_engine(source)
    lost = ask(engine, prompt_of(5), seeds=(1, 2))
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 4)

    def refuse(*args: Any, **options: Any) -> mx.array:
        raise RuntimeError("device lost")

    with monkeypatch.context() as broken:
        broken.setattr(type(source.model), "__call__", refuse)
        broken.setattr(HostDecoder, "logits", refuse)
        engine.tick()
    assert len(lost.failures) == 1
    assert "device lost" in lost.failures[0]
    after = ask(engine, prompt_of(5), seeds=(1,))
    run(engine)
    assert after.completions[0].tokens == alone(source, prompt_of(5), FREE, 1).tokens


def test_logits_that_are_not_finite_fail_the_request_and_leave_no_trace() -> None:
    """A later row in the same slot is not reached by what is left in the cache, and a neighbour notices nothing."""
    source = tiny_source()
    embedding = source.model.model.embed_tokens
    embedding.weight = mx.where(mx.arange(257)[:, None] == 200, float("nan"), embedding.weight)
    engine = make_engine(source, max_num_seqs=2)
    never = ((200, -100.0),)
    long = Sampling(max_tokens=40, ignore_eos=True, logit_bias=never)
    neighbour = ask(engine, (9,) * 30, long)
    lost = ask(engine, (200,) * 29, long)
    tick_until(engine, lambda: bool(lost.failures))
    short = Sampling(max_tokens=12, ignore_eos=True, logit_bias=never)
    after = ask(engine, (1, 2, 3), short)
    tick_until(engine, lambda: bool(after.events))
    assert engine.running == 1
    run(engine)
    assert lost.failures == ["the model's logits are not finite"]
    assert after.completions[0].tokens == alone(source, (1, 2, 3), short).tokens
    assert neighbour.completions[0].tokens == alone(source, (9,) * 30, long).tokens


def test_a_completion_that_cannot_be_decoded_fails_alone() -> None:
    """The tokenizer raises for one request's tokens."""
    source = tiny_source()
    engine = make_engine(source)
    decode = source.tokenizer.decode

    def refuse_short(tokens: Any) -> str:
        if len(tokens) == 3:
            raise ValueError("no such token")
        return decode(tokens)

    source.tokenizer.decode = refuse_short  # type: ignore[method-assign]
    bad = ask(engine, prompt_of(4), Sampling(max_tokens=3, ignore_eos=True))
    good = ask(engine, prompt_of(4), FREE)
    run(engine)
    assert "no such token" in bad.failures[0]
    assert len(good.completions[0].tokens) == 12
