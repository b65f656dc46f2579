"""Rows with the same prompt hold it once on the host, and draw what they would draw with a copy each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from clotho.cpu.interface import PrefilledPrompt
from clotho.cpu.kv_cache import NOT_SHARED, HostKVCache
from protocols.sampling import Sampling
from tests.cpu.supported_models import PLAIN, Rows, arrival_of, needs_cpu, plain_source
from tests.inference.engine_helpers import ask, make_engine, prompt_of, run, tick_until, twin_logprobs

LONG = Sampling(max_tokens=40, ignore_eos=True)

SPARED = 128
"""Copies of prompt tokens that are worth sharing here, whatever was measured."""


@pytest.fixture(autouse=True)
def worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as these tests count on."""
    monkeypatch.setattr("clotho.cpu.kv_cache.MIN_SHARED_TOKENS", SPARED)


@needs_cpu
def test_a_group_holds_its_prompt_once() -> None:
    """Buffers of eight rows over a prompt of 200 tokens hold far fewer tokens than eight copies would."""
    engine = make_engine()
    ask(engine, prompt_of(200), LONG, range(8))
    tick_until(engine, lambda: engine.running == 8)
    assert 199 < engine.stats().cache_tokens < 8 * 199


@needs_cpu
def test_a_shared_prompt_holds_on_to_nothing_else() -> None:
    """Not to the cache it was computed in, which has room for more tokens and prompts."""
    engine = make_engine()
    ask(engine, prompt_of(150), LONG, range(8))
    tick_until(engine, lambda: engine.running == 8)
    cache = engine._batch._cache
    assert isinstance(cache, HostKVCache)
    (layers,) = cache._prompts.values()
    assert all(array.flags.c_contiguous for pair in layers for array in pair)


@needs_cpu
def test_rows_alone_with_their_prompt_hold_it_in_columns() -> None:
    """Sharing with nobody spares nothing, and sharing little spares less than it costs."""
    rows = Rows(plain_source("qwen3").model, 6)
    rows.enter([0], prompt_of(200))
    rows.enter([1, 2], prompt_of(SPARED))
    assert rows.cache.prompt_B.tolist() == [NOT_SHARED] * 6
    assert rows.cache.tokens == 6 * rows.cache.capacity >= 6 * 200
    rows.enter([3, 4, 5], prompt_of(1 + SPARED // 2))
    assert (rows.cache.prompt_B == NOT_SHARED).tolist() == [True] * 3 + [False] * 3
    assert rows.cache.tokens == 6 * rows.cache.capacity + SPARED // 2
    rows.check_step()


@pytest.mark.parametrize("architecture", PLAIN)
def test_groups_come_and_go_and_every_row_draws_what_its_own_forward_pass_gives(architecture: str) -> None:
    """Groups of different sizes and prompts join while others leave rows, gaps and prompts behind."""
    source = plain_source(architecture)
    engine = make_engine(source, max_num_seqs=24)
    asked = []
    for i, (length, rows) in enumerate([(150, 6), (40, 5), (90, 1), (150, 7), (33, 9), (201, 3), (64, 8)]):
        sampling = Sampling(max_tokens=5 + 9 * (i % 3), ignore_eos=i % 2 == 0)
        seeds = range(100 * i, 100 * i + rows)
        asked.append((prompt_of(length, i), sampling, ask(engine, prompt_of(length, i), sampling, seeds)))
        for _ in range(4):
            engine.tick()
    run(engine)
    assert sum(len(answer.completions) for _, _, answer in asked) == 39
    for prompt, sampling, answer in asked:
        for completion in answer.completions:
            twin = twin_logprobs(source.model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, twin, atol=1e-4)


@needs_cpu
def test_a_prompt_that_no_row_has_any_more_is_forgotten() -> None:
    """Prompts do not pile up while groups replace each other in the same slots, nor when their rows leave."""
    rows = Rows(plain_source("qwen3").model, 4)

    def shared() -> int:
        return rows.cache.tokens - rows.cache.rows * rows.cache.capacity

    rows.enter([0, 1], prompt_of(151))
    assert shared() == 150
    rows.enter([2, 3], prompt_of(171, 1))
    assert shared() == 150 + 170
    rows.enter([0, 1], prompt_of(131, 2))
    assert shared() == 130 + 170
    rows.enter([2], prompt_of(5, 3))
    assert shared() == 130 + 170
    rows.check_step()
    rows.take([0, 1, 2])
    assert shared() == 130
    rows.check_step()


@needs_cpu
def test_rows_that_are_kept_keep_their_prompts() -> None:
    """Whichever slots they move to, in whatever order, and also where neighbours of one prompt are torn apart."""
    rows = Rows(plain_source("qwen3").model, 8)
    rows.enter([0, 1, 2], prompt_of(151))
    rows.enter([3, 4], prompt_of(181, 1))
    rows.enter([5], prompt_of(40, 2))
    rows.enter([6, 7], prompt_of(141, 3))
    rows.check_step()
    rows.take([7, 0, 5, 2, 4])
    first, second, *_ = rows.cache.prompt_B.tolist()
    assert rows.cache.prompt_B.tolist()[2:4] == [NOT_SHARED, second]
    assert first != second
    rows.check_step()
    rows.cache.grow(2)
    rows.tokens += [(0,), (0,)]
    rows.live_B = np.append(rows.live_B, [False, False])
    rows.enter([5, 6], prompt_of(161, 4))
    rows.check_step()
    rows.check_step()


@needs_cpu
def test_what_is_not_finite_in_a_cleared_slot_does_not_reach_the_next_row() -> None:
    """It would come through the hidden part of a product: zero times what is not a number is none either."""
    rows = Rows(plain_source("qwen3").model, 2)
    rows.enter([0], prompt_of(10))
    rows.put([1], prompt_of(10, 1), poisoned(rows, 10))
    rows.check_step(but=[1])
    rows.cache.clear(1)
    rows.enter([1], prompt_of(4, 2))
    rows.check_step()


@needs_cpu
def test_a_prompt_that_is_not_finite_stays_with_its_rows() -> None:
    """Other groups of the same step do not see it, nor do rows that follow in its cleared slots."""
    rows = Rows(plain_source("qwen3").model, 5)
    rows.enter([0, 1], prompt_of(141))
    rows.put([2, 3], prompt_of(151, 1), poisoned(rows, 151, 2))
    rows.enter([4], prompt_of(10, 2))
    rows.check_step(but=[2, 3])
    for slot in (2, 3):
        rows.cache.clear(slot)
    rows.enter([2], prompt_of(7, 3))
    rows.enter([3], prompt_of(1, 4))
    rows.check_step()


def poisoned(rows: Rows, length: int, wanted: int = 1) -> PrefilledPrompt:
    """A prompt whose computation overflowed."""
    arrival = arrival_of(rows.layout, prompt_of(length), wanted)
    assert arrival.state
    return arrival._replace(state=tuple(tuple(array * mx.nan for array in arrays) for arrays in arrival.state))
