"""On the CPU the next step is built while one is computed, and forgotten where it no longer holds."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from actors.compute.engine.step_ahead import StepAhead
from protocols.sampling import Sampling
from tests.compute.engine.asking import FREE, alone, ask, make_engine, prompt_of, run, tick_until, twin_greedy
from tests.models import tiny_source


def test_a_step_reads_the_tokens_that_were_written_into_place_last() -> None:
    """What is built over unknown tokens computes with those that were drawn meanwhile."""
    embedded_V = mx.arange(10) * 1.5
    ahead = StepAhead(3, lambda input_B: embedded_V[input_B], lambda: None)
    input_B, found_B = ahead.given(mx.array([4, 0, 9]))
    assert input_B.tolist() == [4, 0, 9]
    assert found_B.tolist() == [6.0, 0.0, 13.5]


def test_columns_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is copied from one step to the next: what could undo a step is gone before it is computed."""
    engine = make_engine()
    ask(engine, prompt_of(8), Sampling(max_tokens=30, ignore_eos=True), (1, 2))
    tick_until(engine, lambda: engine.running == 2)
    buffers = set()
    for _ in range(6):
        engine.tick()
        mx.synchronize()
        cache = engine._batch._cache
        assert cache is not None
        engine._batch.forget_ahead()
        buffers.add(np.array(cache.leaves[0].keys, copy=False).__array_interface__["data"][0])
    assert len(buffers) == 1


def test_new_weights_serve_from_the_very_next_token() -> None:
    """A step built with old weights is not computed after a swap."""
    source = tiny_source()
    engine = make_engine(source)
    prompt = prompt_of(5)
    answer = ask(engine, prompt, Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))
    tick_until(engine, lambda: engine.stats().tokens_drawn == 2)
    source.model.update({"model": {"norm": {"weight": -source.model.model.norm.weight}}})
    source.version += 1
    engine.weights_changed("keep")
    run(engine)
    completion = answer.completions[0]
    third = [*prompt, *completion.tokens[:2]]
    assert completion.tokens[2] == twin_greedy(source.model, third, Sampling(temperature=0.0, max_tokens=1))[0]
    assert completion.versions[1:3] == (0, 1)


def test_a_row_that_joins_does_not_disturb_those_whose_next_step_was_built() -> None:
    """Rows in the batch go on as if nobody had come."""
    source = tiny_source()
    engine = make_engine(source)
    first = ask(engine, prompt_of(9), FREE, (3,))
    for i in range(5):
        engine.tick()
        ask(engine, prompt_of(4 + 6 * i, i), FREE, (i,))
    run(engine)
    assert first.completions[0].tokens == alone(source, prompt_of(9), FREE, 3).tokens
