"""Rows of a group share their prompt on the host: the results are those of rows with a copy each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attachments.cpu.kv_cache import NOT_SHARED, HostKVCache
from attachments.cpu.tests.supported_models import SUPPORTED, host_rows, plain_source
from clotho.inference.rows import PrefilledPrompt
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.cache_rows import Rows, arrival_of
from tests.inference.engine_helpers import make_engine, make_prompt, reference_logprobs, run, submit_request, tick_until

pytestmark = pytest.mark.needs_cpu_path

LONG = Sampling(max_tokens=40, ignore_eos=True)

SPARED = 128
"""Number of saved prompt tokens from which these tests share a prompt."""


@pytest.fixture(autouse=True)
def worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the sharing threshold to the value these tests assume."""
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", SPARED)


def test_a_group_stores_its_prompt_once() -> None:
    """The buffers of eight rows with a prompt of 200 tokens are much smaller than eight copies."""
    engine = make_engine()
    submit_request(engine, make_prompt(200), LONG, range(8))
    tick_until(engine, lambda: engine.running == 8)
    assert 199 < engine.stats().cache_tokens < 8 * 199


def test_a_shared_prompt_keeps_no_larger_buffer_alive() -> None:
    """The cache of the prefill has room for more tokens and prompts and is released."""
    engine = make_engine()
    submit_request(engine, make_prompt(150), LONG, range(8))
    tick_until(engine, lambda: engine.running == 8)
    cache = engine._short.batch._cache
    assert isinstance(cache, HostKVCache)
    (layers,) = cache._prompts.values()
    assert all(array.flags.c_contiguous for pair in layers for array in pair)


def test_rows_without_a_shared_prompt_store_it_in_columns() -> None:
    """Sharing saves nothing for one row and costs more than it saves for a short prompt."""
    rows = host_rows(plain_source("qwen3").model, 6)
    rows.enter([0], make_prompt(200))
    rows.enter([1, 2], make_prompt(SPARED))
    assert rows.cache.prompt_B.tolist() == [NOT_SHARED] * 6
    assert rows.cache.tokens == 6 * rows.cache.capacity >= 6 * 200
    rows.enter([3, 4, 5], make_prompt(1 + SPARED // 2))
    assert (rows.cache.prompt_B == NOT_SHARED).tolist() == [True] * 3 + [False] * 3
    assert rows.cache.tokens == 6 * rows.cache.capacity + SPARED // 2
    rows.check_step()


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_groups_that_join_and_leave_keep_correct_log_probabilities(architecture: str) -> None:
    """Groups of different sizes and prompts. Each row equals its own full forward pass."""
    source = plain_source(architecture)
    engine = make_engine(source, max_num_seqs=24)
    submitted = []
    for i, (length, rows) in enumerate([(150, 6), (40, 5), (90, 1), (150, 7), (33, 9), (201, 3), (64, 8)]):
        sampling = Sampling(max_tokens=5 + 9 * (i % 3), ignore_eos=i % 2 == 0)
        seeds = range(100 * i, 100 * i + rows)
        submitted.append(
            (make_prompt(length, i), sampling, submit_request(engine, make_prompt(length, i), sampling, seeds))
        )
        for _ in range(4):
            engine.tick()
    run(engine)
    assert sum(len(answer.completions) for _, _, answer in submitted) == 39
    for prompt, sampling, answer in submitted:
        for completion in answer.completions:
            reference = reference_logprobs(source.model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, reference, atol=model_lanes.atol(1e-4))


def test_a_prompt_without_rows_is_released() -> None:
    """Prompts do not accumulate while groups replace each other or when all rows leave."""
    slots = 4
    rows = host_rows(plain_source("qwen3").model, slots)

    def shared() -> int:
        return int(rows.cache.tokens - slots * rows.cache.capacity)

    rows.enter([0, 1], make_prompt(151))
    assert shared() == 150
    rows.enter([2, 3], make_prompt(171, 1))
    assert shared() == 150 + 170
    rows.enter([0, 1], make_prompt(131, 2))
    assert shared() == 130 + 170
    rows.enter([2], make_prompt(5, 3))
    assert shared() == 130 + 170
    rows.check_step()
    rows.take([0, 1, 2])
    assert shared() == 130
    rows.check_step()


def test_kept_rows_keep_their_prompts() -> None:
    """For any new order of slots, and if rows of one prompt are separated."""
    rows = host_rows(plain_source("qwen3").model, 8)
    rows.enter([0, 1, 2], make_prompt(151))
    rows.enter([3, 4], make_prompt(181, 1))
    rows.enter([5], make_prompt(40, 2))
    rows.enter([6, 7], make_prompt(141, 3))
    rows.check_step()
    rows.take([7, 0, 5, 2, 4])
    first, second, *_ = rows.cache.prompt_B.tolist()
    assert rows.cache.prompt_B.tolist()[2:4] == [NOT_SHARED, second]
    assert first != second
    rows.check_step()
    rows.cache.grow(2)
    rows.tokens += [(0,), (0,)]
    rows.live_B = np.append(rows.live_B, [False, False])
    rows.enter([5, 6], make_prompt(161, 4))
    rows.check_step()
    rows.check_step()


def test_a_non_finite_prompt_affects_only_its_own_rows() -> None:
    """Other groups of the same step and later rows of the cleared slots are finite."""
    rows = host_rows(plain_source("qwen3").model, 5)
    rows.enter([0, 1], make_prompt(141))
    rows.put([2, 3], make_prompt(151, 1), non_finite_prompt(rows, 151, 2))
    rows.enter([4], make_prompt(10, 2))
    rows.check_step(but=[2, 3])
    for slot in (2, 3):
        rows.cache.clear(slot)
    rows.enter([2], make_prompt(7, 3))
    rows.enter([3], make_prompt(1, 4))
    rows.check_step()


def non_finite_prompt(rows: Rows, length: int, wanted: int = 1) -> PrefilledPrompt:
    """Return a prompt whose keys and values are not finite."""
    arrival = arrival_of(rows.layout, make_prompt(length), wanted)
    assert arrival.state
    return arrival._replace(state=tuple(tuple(array * mx.nan for array in arrays) for arrays in arrival.state))
