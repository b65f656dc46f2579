"""Long decode steps: they are computed in parts, and clients that arrive get their first tokens in between."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clotho.inference.batch import Batch, Step
from clotho.inference.decoding import FIRST_ROWS, Allowance
from clotho.inference.engine import DecodeEngine
from clotho.models.turns import TurnBudget
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.engine_helpers import RecordedEvents, make_engine, make_prompt, run, submit_request, tick_until
from tests.small_models import FixedSource, tiny_source

ROLLOUT = Sampling(max_tokens=14, ignore_eos=True)
VISITOR = Sampling(max_tokens=4, ignore_eos=True)
ENDING = Sampling(max_tokens=40, stop_token_ids=tuple(range(16)))
ROWS = 16


def every_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every step as long, and end a part after every block."""
    monkeypatch.setattr("clotho.inference.decoding.LONG_STEP", 0.0)
    monkeypatch.setattr("clotho.inference.decoding.LONGEST_PART", 0.0)


def no_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the load of the machine."""
    monkeypatch.setattr("clotho.inference.decoding.LONG_STEP", float("inf"))


def rollouts(engine: DecodeEngine) -> list[RecordedEvents]:
    """Submit two groups of rollouts."""
    return [
        submit_request(engine, make_prompt(6, salt), ROLLOUT, tuple(range(ROWS // 2)), background=True)
        for salt in range(2)
    ]


def within_a_step(engine: DecodeEngine) -> None:
    """Tick until a step of rollouts is in progress."""
    tick_until(engine, lambda: engine._short.in_progress)


@pytest.mark.usefixtures("path")
def test_a_visitor_gets_its_first_token_within_the_step_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is prefilled and a token is sampled before the next step of the rollouts begins."""
    every_step_is_long(monkeypatch)
    engine = make_engine()
    groups = rollouts(engine)
    within_a_step(engine)
    steps, visitor = engine._short.steps, submit_request(engine, make_prompt(9, 5), VISITOR, stream=True)
    tick_until(engine, lambda: bool(visitor.events))
    assert engine._short.in_progress
    assert engine._short.steps == steps
    assert engine._first.tokens == 1
    run(engine)
    assert len(visitor.streamed()) == 4
    assert [len(one.tokens) for group in groups for one in group.completions] == [14] * ROWS


@pytest.mark.usefixtures("path")
def test_rollouts_without_visitors_do_not_depend_on_the_durations_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has the same rows, also where a row ends at a token that nobody could expect."""
    source, launch = tiny_source(), Batch.launch
    steps, found = list[list[int]](), list[object]()

    def recorded(self: Batch, version: int, *, divided: bool = False) -> Generator[None, None, Step | None]:
        steps.append(self.table.positions[self.table.live].tolist())
        return launch(self, version, divided=divided)

    monkeypatch.setattr(Batch, "launch", recorded)
    for choose in (every_step_is_long, no_step_is_long):
        choose(monkeypatch)
        engine = make_engine(source)
        prompts = [make_prompt(6 + 20 * salt, salt) for salt in range(3)]
        groups = [submit_request(engine, one, ENDING, tuple(range(ROWS // 2)), background=True) for one in prompts]
        run(engine)
        found.append(([(one.tokens, one.logprobs) for group in groups for one in group.completions], [*steps]))
        steps.clear()
    assert found[0] == found[1]


def beside_visitors(source: FixedSource, *, long: bool, monkeypatch: pytest.MonkeyPatch) -> list[RecordedEvents]:
    """Decode rollouts and visitors that arrive after a fixed number of tokens of the rollouts."""
    with monkeypatch.context() as patched:
        (every_step_is_long if long else no_step_is_long)(patched)
        engine = make_engine(source, prefix_cache_tokens=0)
        answers = rollouts(engine)
        for salt in range(3):
            tick_until(engine, lambda due=ROWS * (4 + salt): engine.stats().tokens_sampled >= due)  # type: ignore[misc]
            if long:
                within_a_step(engine)
            answers.append(submit_request(engine, make_prompt(8, 5 + salt), VISITOR, (salt, 9), stream=True))
        run(engine)
        assert (engine._first.tokens > 0) == long
    return answers


@pytest.mark.usefixtures("path")
@pytest.mark.needs_batch_invariance
@pytest.mark.parametrize(
    ("path", "architecture"),
    [("host", "qwen3"), *(("MLX", name) for name in ("qwen3", "gemma3_text")), ("MLX, sampled on the device", "lfm2")],
    indirect=["path"],
)
def test_parts_and_first_steps_change_no_result(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, versions and streams are those of undivided steps, and so are log-probabilities up to rounding."""
    source = tiny_source(architecture)
    divided, whole = (beside_visitors(source, long=long, monkeypatch=monkeypatch) for long in (True, False))
    for one, other in zip(divided, whole, strict=True):
        for mine, its in zip(one.completions, other.completions, strict=True):
            assert (mine.tokens, mine.versions) == (its.tokens, its.versions)
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=model_lanes.atol(1e-5))
        assert [event.token for event in one.streamed()] == [event.token for event in other.streamed()]


def test_a_single_slow_step_is_no_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the latest steps must take long."""
    monkeypatch.setattr("clotho.inference.decoding.LONG_STEP", 10.0)
    engine = make_engine()
    rollouts(engine)
    now, seconds = 0.0, iter((1.0, 50.0, 1.0, 50.0, 50.0))

    def clock() -> float:
        return now

    engine._short._clock = clock
    launch = engine._short.batch.launch

    def slow(version: int, *, divided: bool = False):  # type: ignore[no-untyped-def]
        nonlocal now
        result = yield from launch(version, divided=divided)
        now += next(seconds)
        return result

    monkeypatch.setattr(engine._short.batch, "launch", slow)
    slow_after = []
    while engine._short.steps < 5:
        engine.tick()
        slow_after.append(engine._short.is_slow())
    assert slow_after == [False, False, False, True, True]


def test_steps_of_more_rows_are_expected_to_take_as_long_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after steps of few rows, with which a batch of rollouts ends."""
    monkeypatch.setattr("clotho.inference.decoding.LONG_STEP", 10.0)
    engine = make_engine()
    decoding, now = engine._short, [0.0]
    decoding._clock = lambda: now[0]
    launch = decoding.batch.launch

    def by_rows(version: int, *, divided: bool = False):  # type: ignore[no-untyped-def]
        now[0] += decoding.running
        return (yield from launch(version, divided=divided))

    monkeypatch.setattr(decoding.batch, "launch", by_rows)
    rollouts(engine)
    run(engine)
    submit_request(engine, make_prompt(6), ROLLOUT, background=True)
    tick_until(engine, lambda: decoding.running == 1)
    assert (decoding.is_slow(), decoding.is_slow(joining=ROWS - 1)) == (False, True)


def test_a_visitor_hears_its_first_token_before_rollouts_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are ready at the same time, because making room for many rows takes long."""
    every_step_is_long(monkeypatch)
    engine = make_engine()
    rollouts(engine)
    run(engine)
    group = submit_request(engine, make_prompt(1), ROLLOUT, tuple(range(ROWS)), background=True)
    visitor = submit_request(engine, make_prompt(1, 5), VISITOR, stream=True)
    engine.tick()
    assert (len(visitor.streamed()), engine._short.running) == (1, 0)
    run(engine)
    assert (len(visitor.streamed()), len(group.completions)) == (4, ROWS)


def test_first_tokens_keep_to_their_share_beside_visitors_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens have a twentieth of the time once their credit is used up, and visitors then join the others."""
    every_step_is_long(monkeypatch)
    engine = make_engine(prefix_cache_tokens=0, max_num_seqs=64)
    monkeypatch.setattr("clotho.inference.decoding.FIRST_ROWS", ROWS)
    engine._first._clock = lambda: float(engine.stats().decode_steps)
    groups, visitors = rollouts(engine), list[RecordedEvents]()
    for salt in range(400):
        if salt % 3 == 0:
            visitors.append(submit_request(engine, make_prompt(3, salt % 7), VISITOR))
        if all(len(group.completions) == ROWS // 2 for group in groups):
            groups = rollouts(engine)
        engine.tick()
    assert engine._short.steps > 0
    assert engine._first.steps <= 1 + 0.05 * engine.stats().decode_steps + 1
    run(engine)
    assert all(len(visitor.completions[0].tokens) == 4 for visitor in visitors)


def test_a_request_of_many_rows_has_no_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of first tokens has an eighth of the rows of the step that it precedes at most."""
    every_step_is_long(monkeypatch)
    engine = make_engine()
    rollouts(engine)
    within_a_step(engine)
    few = submit_request(engine, make_prompt(5, 3), VISITOR, tuple(range(ROWS // FIRST_ROWS)))
    many = submit_request(engine, make_prompt(5, 4), VISITOR, tuple(range(ROWS // FIRST_ROWS + 1)))
    run(engine)
    assert engine._first.tokens == len(few.completions) == 2
    assert len(many.completions) == 3


@pytest.mark.usefixtures("path")
def test_a_swap_within_a_step_happens_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is sampled with the weights of two versions, and every token names its version."""
    every_step_is_long(monkeypatch)
    source = tiny_source()
    engine = make_engine(source)
    groups = rollouts(engine)
    within_a_step(engine)
    sampled = engine.stats().tokens_sampled

    def publish() -> float:
        assert not engine._short.in_progress
        source.model.update(model_lanes.scaled(source.model.parameters(), 1.3))
        source.version += 1
        return 0.0

    swapped = engine.swap(publish, "keep")
    assert not swapped.done()
    tick_until(engine, swapped.done)
    assert engine.stats().tokens_sampled >= sampled + ROWS
    run(engine)
    for one in (one for group in groups for one in group.completions):
        assert list(one.versions) == sorted(one.versions)
        assert set(one.versions) == {0, 1}


def test_a_drain_waits_for_a_row_that_has_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other tokens have the same version."""
    every_step_is_long(monkeypatch)
    engine = make_engine(tiny_source())
    rollouts(engine)
    within_a_step(engine)
    visitor = submit_request(engine, make_prompt(9, 5), VISITOR, stream=True)
    tick_until(engine, lambda: bool(visitor.events))
    swapped = engine.swap(lambda: 0.0, "drain")
    tick_until(engine, swapped.done)
    assert len(visitor.completions[0].tokens) == 4


def test_an_abort_within_a_step_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between its first token and its next one."""
    every_step_is_long(monkeypatch)
    engine = make_engine()
    rollouts(engine)
    within_a_step(engine)
    visitor = submit_request(engine, make_prompt(9, 5), VISITOR, stream=True, request_id="visitor")
    tick_until(engine, lambda: bool(visitor.events))
    engine.abort_clients(["visitor"])
    run(engine)
    assert [(one.finish_reason, len(one.tokens)) for one in visitor.completions] == [("abort", 1)]


def test_a_prompt_in_turns_does_not_let_a_step_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a visitor's chunk follow each other, beside a learner too."""
    every_step_is_long(monkeypatch)
    engine = make_engine(turns=TurnBudget(1e-12))
    rollouts(engine)
    within_a_step(engine)
    steps, visitor = engine._short.steps, submit_request(engine, make_prompt(9, 5), VISITOR, stream=True)
    tick_until(engine, lambda: bool(visitor.events))
    assert engine._short.steps == steps
    run(engine)
    assert len(visitor.completions[0].tokens) == 4


def test_an_allowance_is_a_share_of_the_time() -> None:
    """Work may begin again when the time since it began is its own duration divided by the share, after the credit."""
    allowance = Allowance(0.25)
    allowance.spend(0.0, 1.0)
    assert not allowance.allows(3.9)
    assert allowance.allows(4.0)
    allowance.spend(1.0, 2.0)  # continues the same work
    assert not allowance.allows(7.9)
    assert allowance.allows(8.0)
    credited = Allowance(0.25, credit=2.0)
    for _ in range(3):
        assert credited.allows(0.0)
        credited.spend(0.0, 1.0)
    assert not credited.allows(3.9)
    assert credited.allows(4.0)


def test_beside_few_rows_one_row_gets_its_first_token_at_once() -> None:
    """A request of two rows waits for the step of all, and so does another row."""
    jobs: list[Any] = [SimpleNamespace(awaits_first_token=True, admitted=rows) for rows in (2, 1, 1)]
    assert make_engine()._first.chosen(jobs, beside=FIRST_ROWS - 1) == [jobs[1]]
