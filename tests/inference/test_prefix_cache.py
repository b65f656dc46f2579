"""The prefix cache: hits, evictions, and equality of results."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.inference.prefill import PrefixCache
from protocols.sampling import Sampling
from tests.inference.engine_helpers import (
    SAMPLED,
    complete_alone,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import tiny_source


@pytest.mark.needs_float32
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_a_cached_prefix_is_not_prefilled_again(architecture: str) -> None:
    """For exact hits and longer prompts. Completions equal those without a cache."""
    source = tiny_source(architecture)
    engine = make_engine(source)
    base, longer = make_prompt(30), (*make_prompt(30), 5, 6, 7, 8)
    alone = {prompt: complete_alone(source, prompt, SAMPLED, 3).tokens for prompt in (base, longer)}
    for prompt, cost in ((base, 29), (base, 0), (longer, 4), (longer, 0)):
        before = engine.stats().prefill_tokens
        answer = submit_request(engine, prompt, SAMPLED, (3,), reuse_prefix=True)
        run(engine)
        assert engine.stats().prefill_tokens - before == cost
        assert answer.completions[0].tokens == alone[prompt]
    assert (engine.stats().prefix_hits, engine.stats().prefix_misses) == (3, 1)


def test_a_common_beginning_is_reused_if_the_cache_can_be_cut() -> None:
    """With dense attention the cached prompt need not be a complete prefix."""
    source = tiny_source()
    engine = make_engine(source)
    first, second = (*make_prompt(20), 1, 2, 3), (*make_prompt(20), 9, 8)
    submit_request(engine, first, reuse_prefix=True)
    run(engine)
    answer = submit_request(engine, second, SAMPLED, (3,), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefill_tokens == 22 + 1
    assert answer.completions[0].tokens == complete_alone(source, second, SAMPLED, 3).tokens


def test_only_requests_with_reuse_prefix_use_the_cache() -> None:
    """Others neither read nor write it."""
    engine = make_engine()
    submit_request(engine, make_prompt(9))
    run(engine)
    submit_request(engine, make_prompt(9), reuse_prefix=True)
    run(engine)
    submit_request(engine, make_prompt(9))
    run(engine)
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefill_tokens) == (0, 1, 24)


def test_an_entry_of_another_version_is_never_used() -> None:
    """Both if the version changes without an announcement and after weights_changed."""
    source = tiny_source()
    engine = make_engine(source)
    submit_request(engine, make_prompt(9), reuse_prefix=True)
    run(engine)
    source.version = 1
    submit_request(engine, make_prompt(9), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefix_hits == 0
    engine.weights_changed("keep")
    assert engine.stats().prefix_cache_tokens == 0


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    """The cache holds at most its capacity in tokens."""
    engine = make_engine(prefix_cache_tokens=60)
    for salt in (1, 2, 1, 3):
        submit_request(engine, make_prompt(26, salt), Sampling(max_tokens=1), reuse_prefix=True)
        run(engine)
        assert engine.stats().prefix_cache_tokens <= 60
    before = engine.stats().prefix_hits
    for salt, hits in ((1, 1), (2, 1)):
        submit_request(engine, make_prompt(26, salt), Sampling(max_tokens=1), reuse_prefix=True)
        run(engine)
        assert engine.stats().prefix_hits - before == hits


def test_a_capacity_of_zero_stores_nothing() -> None:
    """The cache is off."""
    engine = make_engine(prefix_cache_tokens=0)
    for _ in range(2):
        submit_request(engine, make_prompt(9), reuse_prefix=True)
        run(engine)
    assert engine.stats().prefix_hits == 0


def test_a_prompt_whose_weights_change_during_its_prefill_is_not_stored() -> None:
    """Its keys and values are of two policies."""
    source = tiny_source()
    source.version = 5
    engine = make_engine(source, prefill_chunk=4)
    answer = submit_request(engine, make_prompt(21), reuse_prefix=True)
    tick_until(engine, lambda: engine.stats().prefill_tokens >= 8)
    assert engine.stats().prefill_tokens < 20
    source.version = 6
    engine.weights_changed("keep")
    run(engine)
    assert answer.completions
    assert engine.stats().prefix_cache_tokens == 0
    submit_request(engine, make_prompt(21), reuse_prefix=True)
    run(engine)
    assert (engine.stats().prefix_hits, engine.stats().prefix_cache_tokens) == (0, 20)


@pytest.mark.usefixtures("mlx_decoder")
def test_an_entry_that_a_model_has_computed_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arrays are views of those of the whole batch, which would stay in memory."""
    copies: list[bool] = []
    store = PrefixCache.store

    def recorded(self: PrefixCache, *given: Any, is_copy: bool) -> None:
        copies.append(is_copy)
        store(self, *given, is_copy=is_copy)

    monkeypatch.setattr(PrefixCache, "store", recorded)
    engine = make_engine(tiny_source())
    submit_request(engine, make_prompt(6), SAMPLED, (3,), reuse_prefix=True)
    run(engine)
    assert copies == [False]
