"""A failure in one request does not affect other requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attachments.speculation.sections import PromptDrafts
from clotho.inference.cache_layout import RowCaches
from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import PrefilledPrompt
from clotho.settings.bounds import Off
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling
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


def test_a_failing_listener_fails_only_its_own_request() -> None:
    """Its rows become free, it receives no further event, and other requests continue."""
    engine = make_engine()
    heard: list[SampleEvent] = []

    def listener(event: SampleEvent) -> None:
        heard.append(event)
        raise RuntimeError("broken listener")

    request = SampleRequest(prompt=(1, 2), sampling=SAMPLED, seeds=(1, 2), stream=True)
    engine.submit(request, listener)
    good = submit_request(engine, (1, 2), seeds=(1,))
    run(engine)
    assert len(heard) == 1
    assert len(good.completions[0].tokens) == 12
    assert engine.stats().listener_errors == 1
    assert engine.stats().running_rows == 0


def test_a_listener_may_submit_and_abort_during_a_tick() -> None:
    """Both take effect from the next tick."""
    engine = make_engine()
    follow_up = RecordedEvents()

    def listener(event: SampleEvent) -> None:
        if isinstance(event, CompletionDone):
            engine.submit(SampleRequest(prompt=(3, 4), sampling=GREEDY, seeds=(1,)), follow_up.events.append)
            engine.abort(1)

    engine.submit(SampleRequest(prompt=(1, 2), sampling=SAMPLED, seeds=(1,)), listener)
    run(engine)
    assert len(follow_up.completions[0].tokens) == 12


def test_a_failed_prefill_fails_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request submitted together with it and later requests complete."""
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
    bad = submit_request(engine, make_prompt(60), seeds=(1, 2), background=True)
    good = submit_request(engine, make_prompt(5))
    run(engine)
    assert len(bad.failures) == 1
    assert "out of memory" in bad.failures[0]
    assert len(good.completions[0].tokens) == 12
    assert engine.stats().failed == 1


def cache_class(engine: DecodeEngine) -> type[RowCaches]:
    """Return the class of the KV caches of an engine."""
    return type(engine.make_caches(1))


@pytest.mark.parametrize("speculation", [Off(), PromptDrafts(max_draft=4)])
def test_a_failed_decode_step_fails_the_running_requests_only(
    speculation: Off | PromptDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client receives the failure, the KV caches are dropped, and the next request completes."""
    source = tiny_source()
    engine = make_engine(source, speculation=speculation)
    lost = submit_request(engine, make_prompt(5), seeds=(1, 2))
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 4)

    def refuse(*args: Any, **options: Any) -> mx.array:
        raise RuntimeError("device lost")

    with monkeypatch.context() as broken:
        broken.setattr(type(source.model), "__call__", refuse)
        for name in ("parts", "verify"):
            broken.setattr(cache_class(engine), name, refuse, raising=False)
        engine.tick()
    assert len(lost.failures) == 1
    assert "device lost" in lost.failures[0]
    assert engine.stats().cache_tokens == 0
    after = submit_request(engine, make_prompt(5), seeds=(1,))
    run(engine)
    assert after.completions[0].tokens == complete_alone(source, make_prompt(5), SAMPLED, 1).tokens


def test_non_finite_logits_fail_only_their_own_request() -> None:
    """A later row in the same slot and neighbouring rows do not change."""
    source = tiny_source()
    embedding = source.model.model.embed_tokens
    embedding.weight = mx.where(mx.arange(257)[:, None] == 200, float("nan"), embedding.weight)
    engine = make_engine(source, max_num_seqs=2)
    never = ((200, -100.0),)
    long = Sampling(max_tokens=40, ignore_eos=True, logit_bias=never)
    neighbour = submit_request(engine, (9,) * 30, long)
    lost = submit_request(engine, (200,) * 29, long)
    tick_until(engine, lambda: bool(lost.failures))
    short = Sampling(max_tokens=12, ignore_eos=True, logit_bias=never)
    after = submit_request(engine, (1, 2, 3), short)
    tick_until(engine, lambda: bool(after.events))
    assert engine.running == 1
    run(engine)
    assert lost.failures == ["the model's logits are not finite"]
    assert after.completions[0].tokens == complete_alone(source, (1, 2, 3), short).tokens
    assert neighbour.completions[0].tokens == complete_alone(source, (9,) * 30, long).tokens


def test_a_failed_detokenization_fails_only_its_own_request() -> None:
    """The tokenizer raises for the tokens of one request."""
    source = tiny_source()
    engine = make_engine(source)
    decode = source.tokenizer.decode

    def refuse_short(tokens: Any, *, skip_special_tokens: bool = True) -> str:
        if len(tokens) == 3:
            raise ValueError("no such token")
        return decode(tokens, skip_special_tokens=skip_special_tokens)

    source.tokenizer.decode = refuse_short  # type: ignore[method-assign]
    bad = submit_request(engine, make_prompt(4), Sampling(max_tokens=3, ignore_eos=True))
    good = submit_request(engine, make_prompt(4), SAMPLED)
    run(engine)
    assert "no such token" in bad.failures[0]
    assert len(good.completions[0].tokens) == 12


@pytest.fixture(params=[pytest.param("host", marks=pytest.mark.needs_cpu_path), "MLX"])
def both_caches(request: pytest.FixtureRequest) -> None:
    """Decode with the KV cache of the backend, and with that of MLX."""
    if request.param == "MLX":
        request.getfixturevalue("mlx_decoder")


@pytest.mark.usefixtures("both_caches")
def test_a_prompt_that_cannot_join_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are partly written. Prompts that join in the same step, running rows and later rows are unchanged."""
    source = tiny_source()
    engine = make_engine(source)
    caches = cache_class(engine)
    enter = caches.enter

    def refuse(self: RowCaches, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        if prompt.tokens == 19 and prompt.state is not None:
            state = tuple(tuple(array * mx.nan for array in arrays) for arrays in prompt.state)
            enter(self, slots, prompt._replace(state=state))
            raise MemoryError("refused by the test")
        enter(self, slots, prompt)

    monkeypatch.setattr(caches, "enter", refuse)
    long = Sampling(max_tokens=20, ignore_eos=True)
    running = submit_request(engine, (9,) * 30, long)
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 4)
    before, bad, behind = (submit_request(engine, (2,) * count, long, (7, 8)) for count in (18, 20, 19))
    tick_until(engine, lambda: bool(bad.failures))
    after = submit_request(engine, (1, 2, 3), long)
    run(engine)
    assert ["refused by the test" in reason for reason in bad.failures] == [True]
    assert engine.stats().failed == 1
    answers = {(9,) * 30: running, (2,) * 18: before, (2,) * 19: behind, (1, 2, 3): after}
    for prompt, answer in answers.items():
        assert answer.completions[0].tokens == complete_alone(source, prompt, long).tokens


@pytest.mark.usefixtures("both_caches")
@pytest.mark.parametrize("failures", [1, 100])
def test_rows_are_computed_again_if_a_prompt_gets_no_room(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """The KV caches of running rows may be moved in part only. A prompt for which no attempt succeeds fails alone."""
    source = tiny_source()
    engine = make_engine(source)
    caches = cache_class(engine)
    make_room, left = caches.make_room, [failures]

    def refuse(
        self: RowCaches, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], prompts: Sequence[PrefilledPrompt]
    ) -> None:
        make_room(self, positions_B, live_B, prompts)
        if left[0] and any(prompt.tokens == 19 for prompt in prompts):
            left[0] -= 1
            for slot in range(len(live_B)):
                self.clear(slot)
            raise MemoryError("refused by the test")

    monkeypatch.setattr(caches, "make_room", refuse)
    long = Sampling(max_tokens=20, ignore_eos=True)
    running = submit_request(engine, (9,) * 30, long, (7, 8))
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 4)
    beside, large = (submit_request(engine, (2,) * count, long) for count in (18, 20))
    run(engine)
    assert len(large.failures) == (failures > 1)
    answers = {(9,) * 30: running, (2,) * 18: beside} | ({(2,) * 20: large} if failures == 1 else {})
    for prompt, answer in answers.items():
        assert answer.completions[0].tokens == complete_alone(source, prompt, long).tokens
    assert [len(completion.tokens) for completion in running.completions] == [20, 20]
