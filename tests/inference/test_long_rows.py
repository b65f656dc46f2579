"""Long requests of clients: they are decoded beside the short rows, and neither stop nor change them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import numpy as np
import pytest

from clotho.inference.decoding import Turns
from clotho.inference.engine import DecodeEngine
from clotho.lanes.arbiter import LONG_SHARE
from protocols.errors import RequestError
from protocols.sampling import CompletionDone, SampleEvent, SampleFailed, SampleRequest, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    RecordedEvents,
    make_engine,
    make_prompt,
    reference_logprobs,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import ARCHITECTURES, FixedSource, tiny_source

SHORT, MARGIN = 24, 8
ROLLOUT = Sampling(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def short_rows_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows become long early."""
    set_short(monkeypatch, SHORT)
    for module in ("batch", "scheduler"):
        monkeypatch.setattr(f"clotho.inference.{module}.MARGIN", MARGIN)


def set_short(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Set the number of tokens that are reserved for a short row at most."""
    monkeypatch.setattr("clotho.inference.engine.short_tokens", lambda *_: tokens)


def long_request(engine: DecodeEngine, tokens: int, salt: int = 0, **options: object) -> RecordedEvents:
    """Submit a request of a client for so many tokens."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return submit_request(engine, make_prompt(4, salt), sampling, (salt,), **options)


def count_steps_as_time(engine: DecodeEngine) -> None:
    """Let every decode step take a second, of short and of long rows."""
    engine._turns = Turns(lambda: float(engine.stats().decode_steps))


def held(engine: DecodeEngine) -> int:
    """Return the tokens that the rows of both batches hold, each as many as the longest of its batch."""
    tables = [decoding.batch.table for decoding in engine._decodings]
    return sum(table.running * int(table.positions.max(initial=0)) for table in tables)


class Rollouts:
    """Groups of rollouts, as many at a time as a run keeps in progress. completed: completions that have ended."""

    def __init__(self, engine: DecodeEngine, *, group: int, groups: int) -> None:
        self.completed = 0
        self._engine, self._group, self._most = engine, group, group * groups
        self._submitted = 0

    def tick(self) -> None:
        """Replace the groups that have ended, and decode."""
        while self._submitted - self.completed <= self._most - self._group:
            prompt, seeds = make_prompt(6, self._submitted % 11), tuple(range(self._group))
            self._engine.submit(
                SampleRequest(prompt=prompt, sampling=ROLLOUT, seeds=seeds, background=True), self._hear
            )
            self._submitted += self._group
        self._engine.tick()

    def _hear(self, event: SampleEvent) -> None:
        assert isinstance(event, CompletionDone)
        self.completed += 1


def rollouts_beside(clients: int, tokens: int, *, group: int, steps: int = 120) -> float:
    """Return the rollouts per decode step beside so many requests, whose rows become long before it is counted."""
    engine = make_engine(kv_cache_tokens=3200, max_num_seqs=256)
    count_steps_as_time(engine)
    rollouts = Rollouts(engine, group=group, groups=2)
    answers = [long_request(engine, tokens, salt) for salt in range(clients)]
    for _ in range(SHORT):
        rollouts.tick()
    completed, decoded = rollouts.completed, engine.stats().decode_steps
    while engine.stats().decode_steps < decoded + steps:
        rollouts.tick()
        assert held(engine) <= 3200
    assert not any(answer.failures for answer in answers)
    return (rollouts.completed - completed) / steps


@pytest.mark.parametrize("group", [8])
def test_rollouts_continue_beside_long_requests(group: int) -> None:
    """At 0.8 of their rate at least, also if the requests could fill the KV cache several times."""
    alone = rollouts_beside(0, 0, group=group)
    for clients, tokens in ((1, 500), (24, 500)):
        assert rollouts_beside(clients, tokens, group=group) >= 0.8 * alone, (clients, tokens)


def test_requests_that_hold_the_kv_cache_are_named_while_others_wait_for_it() -> None:
    """By the identifier of the request; nobody is named while all rows have room."""
    engine = make_engine(kv_cache_tokens=400)
    answers = [long_request(engine, 150, salt, request_id=f"request {salt}") for salt in range(3)]
    tick_until(engine, lambda: engine._long.running == 3)
    assert engine.running == 3 + engine._short.running
    assert engine.stats().cache_holders == ()
    tick_until(engine, lambda: bool(engine.stats().cache_holders))
    assert engine.stats().cache_holders == ("request 0", "request 1")
    run(engine)
    assert [len(answer.completions[0].tokens) for answer in answers] == [150, 150, 150]
    assert engine.stats().cache_holders == ()


SAMPLINGS = (
    Sampling(temperature=0.8, top_p=0.7, max_tokens=40, ignore_eos=True),
    Sampling(temperature=0.0, repetition_penalty=1.7, max_tokens=40, ignore_eos=True),
    Sampling(frequency_penalty=0.6, presence_penalty=0.3, top_logprobs=2, max_tokens=40, ignore_eos=True),
    Sampling(bad_words=((80,), (3, 5)), min_tokens=35, max_tokens=40),
)


@pytest.mark.usefixtures("path")
@pytest.mark.needs_batch_invariance
@pytest.mark.parametrize(
    ("path", "architecture"),
    [
        ("host", "qwen3"),
        *(("MLX", architecture) for architecture in ("gemma3_text", "lfm2")),
        ("MLX, sampled on the device", "qwen3"),
    ],
    indirect=["path"],
)
def test_rows_that_become_long_and_their_neighbours_do_not_change(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, streams and alternatives are those of one batch; log-probabilities are those without a cache."""
    assert architecture in ARCHITECTURES
    source = tiny_source(architecture)
    answers = []
    for short in (SHORT, 10_000):
        set_short(monkeypatch, short)
        engine = make_engine(source, prefix_cache_tokens=0)
        answers.append(submit_beside_rollouts(engine))
        assert (engine._long.steps > 0) == (short == SHORT)
    for divided, together in zip(*answers, strict=True):
        for one, other in zip(divided.completions, together.completions, strict=True):
            assert (one.tokens, one.versions, one.text) == (other.tokens, other.versions, other.text)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=model_lanes.atol(1e-4))
        assert [event.token for event in divided.streamed()] == [event.token for event in together.streamed()]
    sampled = answers[0][0].completions[0]
    reference = reference_logprobs(source.model, make_prompt(5), sampled, SAMPLINGS[0])
    np.testing.assert_allclose(sampled.logprobs, reference, atol=model_lanes.atol(1e-4))


def submit_beside_rollouts(engine: DecodeEngine) -> list[RecordedEvents]:
    """Complete two long completions with each of `SAMPLINGS`, and groups of rollouts that join meanwhile."""
    answers = [
        submit_request(engine, make_prompt(5 + 4 * i, i), sampling, (i, i + 7), stream=True)
        for i, sampling in enumerate(SAMPLINGS)
    ]
    for salt in range(8):
        answers.append(submit_request(engine, make_prompt(9, salt), ROLLOUT, (0, 1, 2), background=True))
        for _ in range(3):
            engine.tick()
    run(engine)
    return answers


@pytest.mark.usefixtures("path")
@pytest.mark.needs_batch_invariance
def test_rows_without_columns_continue_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all their tokens. A row can be interrupted only after it has doubled."""
    source = tiny_source()
    engine = make_engine(source, kv_cache_tokens=200, max_num_seqs=16)
    answers = [long_request(engine, 75, salt, stream=True) for salt in range(6)]
    while engine.has_work:
        engine.tick()
        assert held(engine) <= 200
    assert 1 <= engine.stats().preempted <= 6 * 4  # 8 tokens and a margin, 32, 64
    set_short(monkeypatch, 10_000)
    whole = make_engine(source)
    expected = [long_request(whole, 75, salt) for salt in range(6)]
    run(whole)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.completions[0].tokens == other.completions[0].tokens
        assert answer.completions[0].tokens == tuple(event.token for event in answer.streamed())
        assert answer.completions[0].finish_reason == "length"


MOST_REQUESTS = 20


@pytest.mark.parametrize("seed", [2, 9])
def test_every_request_ends(seed: int) -> None:
    """Whatever arrives and is aborted: rollouts, short and long requests, in a KV cache with room for few of them.

    The seeds choose 120 tokens for one row, and 300 for 16.
    """
    choose = random.Random(seed)
    limit = choose.choice((120, 300, 600))
    source = tiny_source(num_hidden_layers=1)
    engine = make_engine(source, kv_cache_tokens=limit, max_num_seqs=choose.choice((1, 4, 16)), prefill_chunk=16)
    count_steps_as_time(engine)
    open_requests, events = dict[int, int](), Counter[str]()

    def submit() -> None:
        rows, background = choose.randint(1, 4), choose.random() < 0.5
        prompt = make_prompt(choose.randint(1, 40), choose.randint(0, 5))
        most = min(limit * 7 // 8, 200) - len(prompt)
        tokens = choose.randint(1, 20) if choose.random() < 0.6 else choose.randint(1, most)
        sampling = Sampling(max_tokens=tokens, ignore_eos=choose.random() < 0.9)
        request = SampleRequest(prompt=prompt, sampling=sampling, seeds=tuple(range(rows)), background=background)

        def hear(event: SampleEvent) -> None:
            assert not isinstance(event, SampleFailed), event.reason
            if isinstance(event, CompletionDone):
                events[event.completion.finish_reason] += 1
                open_requests[number] -= 1
                assert event.completion.finish_reason != "length" or len(event.completion.tokens) == tokens

        number = engine.submit(request, hear)
        open_requests[number] = rows

    submitted = 0
    for _ in range(20_000):
        if submitted < MOST_REQUESTS and choose.random() < 0.1:
            submit()
            submitted += 1
        if choose.random() < 0.03 and open_requests:
            engine.abort(choose.choice(list(open_requests)))
        engine.tick()
        assert held(engine) <= limit
        assert engine.running <= 18
        if submitted == MOST_REQUESTS and not engine.has_work:
            break
    assert not any(open_requests.values())
    assert not engine.has_work
    stats = engine.stats()
    assert (stats.running_rows, stats.waiting_rows, stats.cache_tokens) == (0, 0, 0)
    assert sum(events.values()) == sum(stats.finished.values())


@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_rollouts_and_long_requests_that_exclude_each_other_take_turns(max_num_seqs: int) -> None:
    """If they do not fit into the KV cache at the same time, neither waits for the end of all others."""
    engine = make_engine(kv_cache_tokens=100, max_num_seqs=max_num_seqs)
    ended: list[str] = []

    def submit(name: str, prompt: int, tokens: int, *, background: bool) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        request = SampleRequest(prompt=make_prompt(prompt), sampling=sampling, seeds=(0,), background=background)
        engine.submit(request, lambda event: ended.append(name))

    for _ in range(6):
        submit("long", 60, 20, background=False)
        submit("rollout", 12, 30, background=True)
    run(engine)
    assert sorted(ended) == ["long"] * 6 + ["rollout"] * 6
    for name in ("long", "rollout"):
        assert all(name in ended[first : first + 4] for first in range(7))


@pytest.mark.parametrize("background", [True, False])
def test_a_request_beyond_its_part_of_the_kv_cache_is_refused(*, background: bool) -> None:
    """The error names the field and the setting. A request of a client leaves an eighth; a rollout can use all."""
    engine = make_engine(kv_cache_tokens=400)
    request = SampleRequest(prompt=make_prompt(4), sampling=Sampling(max_tokens=360), seeds=(0,), background=background)
    if background:
        engine.submit(request, lambda event: None)
        return
    with pytest.raises(RequestError, match=r"engine\.kv_cache_tokens") as error:
        engine.submit(request, lambda event: None)
    assert error.value.param == "max_tokens"


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_swap_concerns_long_rows(policy: Literal["keep", "recompute"]) -> None:
    """`keep`: a row has tokens of both versions, also if it moves afterwards. `recompute`: its KV cache is new."""
    source = tiny_source()
    engine = make_engine(source)
    answers = [long_request(engine, 80, salt) for salt in range(2)]
    tick_until(engine, lambda: engine._long.tokens >= 10)
    answers.append(long_request(engine, 80, 3))
    tick_until(engine, lambda: engine.policy_rows == 3)
    publish_scaled(source)
    engine.weights_changed(policy)
    assert engine.stats().preempted == (3 if policy == "recompute" else 0)
    run(engine)
    for answer in answers:
        versions = answer.completions[0].versions
        assert sorted(versions) == list(versions)
        assert (len(versions), set(versions)) == (80, {0, 1})


def publish_scaled(source: FixedSource) -> None:
    """Publish other weights as the next version."""
    source.model.update(model_lanes.scaled(source.model.parameters(), 1.3))
    source.version += 1


def test_a_drain_waits_for_long_rows() -> None:
    """Rows that become long meanwhile join the long rows."""
    source = tiny_source()
    engine = make_engine(source)
    answer = long_request(engine, 60)
    tick_until(engine, lambda: engine.running == 1)
    engine.admission_paused = True
    tick_until(engine, lambda: not engine.policy_rows)
    assert set(answer.completions[0].versions) == {0}
    assert engine._long.steps > 0


def test_the_buffers_of_long_rows_end_with_the_last_row() -> None:
    """Also if its request is aborted, after which no step follows."""
    engine = make_engine()
    long_request(engine, 100)
    tick_until(engine, lambda: engine._long.running == 1)
    engine.abort_clients(None)
    engine.tick()
    assert engine.stats().cache_tokens == 0


def test_long_rows_are_charged_for_what_they_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the event loop takes as long for a token as a decode step does, streams get half as many steps."""
    monkeypatch.setattr("clotho.inference.decoding.STREAMED_TOKEN", 1.0)
    engine = make_engine(kv_cache_tokens=2000)
    count_steps_as_time(engine)
    long_request(engine, 400, stream=True)
    tick_until(engine, lambda: engine._long.steps > 20)
    rollouts = Rollouts(engine, group=2, groups=2)
    short, before = engine._short.steps, engine._long.steps
    for _ in range(160):
        rollouts.tick()
    share = (engine._long.steps - before) / (engine._short.steps - short + engine._long.steps - before)
    assert share == pytest.approx(LONG_SHARE / 2, abs=0.01)  # one step of 145 is 0.007


def test_long_rows_have_an_eighth_of_the_time() -> None:
    """Beside short rows; alone, they take every step."""
    engine = make_engine(kv_cache_tokens=2000)
    count_steps_as_time(engine)
    long = long_request(engine, 400)
    tick_until(engine, lambda: engine._long.steps > 20)
    before = engine._long.steps
    assert engine.long_only
    engine.tick()
    assert engine._long.steps == before + 1
    rollouts = Rollouts(engine, group=2, groups=2)
    short, before = engine._short.steps, engine._long.steps
    for _ in range(160):
        rollouts.tick()
        assert not engine.long_only or not engine._short.running
    share = (engine._long.steps - before) / (engine._short.steps - short + engine._long.steps - before)
    assert 0.9 * LONG_SHARE < share <= LONG_SHARE + 0.01
    assert not long.completions
