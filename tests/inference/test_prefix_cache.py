"""The prefix cache: what it finds, what it forgets, and that a hit changes nothing but the time."""

from __future__ import annotations

import pytest

from protocols.sampling import Sampling
from tests.inference.engine_helpers import FREE, alone, ask, make_engine, prompt_of, run
from tests.small_models import tiny_source


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "lfm2", "falcon_h1"])
def test_a_cached_prefix_is_continued_not_computed_again(architecture: str) -> None:
    """Exact hits, longer prompts, and answers equal to those without a cache."""
    source = tiny_source(architecture)
    engine = make_engine(source)
    base, longer = prompt_of(30), (*prompt_of(30), 5, 6, 7, 8)
    for prompt, cost in ((base, 29), (base, 0), (longer, 4), (longer, 0)):
        before = engine.stats().prefill_tokens
        answer = ask(engine, prompt, FREE, (3,), reuse_prefix=True)
        run(engine)
        assert engine.stats().prefill_tokens - before == cost
        assert answer.completions[0].tokens == alone(source, prompt, FREE, 3).tokens
    assert (engine.stats().prefix_hits, engine.stats().prefix_misses) == (3, 1)


def test_a_common_beginning_is_reused_where_caches_can_be_cut() -> None:
    """Dense attention: the cached prompt need not be a prefix as a whole."""
    source = tiny_source()
    engine = make_engine(source)
    first, second = (*prompt_of(20), 1, 2, 3), (*prompt_of(20), 9, 8)
    ask(engine, first, reuse_prefix=True)
    run(engine)
    answer = ask(engine, second, FREE, (3,), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefill_tokens == 22 + 1
    assert answer.completions[0].tokens == alone(source, second, FREE, 3).tokens


def test_only_requests_that_ask_for_it_use_the_cache() -> None:
    """Others neither look nor leave anything."""
    engine = make_engine()
    ask(engine, prompt_of(9))
    run(engine)
    ask(engine, prompt_of(9), reuse_prefix=True)
    run(engine)
    ask(engine, prompt_of(9))
    run(engine)
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefill_tokens) == (0, 1, 24)


def test_no_hit_across_versions() -> None:
    """Neither when the version moves unannounced, nor after weights_changed."""
    source = tiny_source()
    engine = make_engine(source)
    ask(engine, prompt_of(9), reuse_prefix=True)
    run(engine)
    source.version = 1
    ask(engine, prompt_of(9), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefix_hits == 0
    engine.weights_changed("keep")
    assert engine.stats().prefix_cache_tokens == 0


def test_the_least_recently_used_prompt_goes_first() -> None:
    """The cache holds at most its capacity in tokens."""
    engine = make_engine(prefix_cache_tokens=60)
    for salt in (1, 2, 1, 3):
        ask(engine, prompt_of(26, salt), Sampling(max_tokens=1), reuse_prefix=True)
        run(engine)
        assert engine.stats().prefix_cache_tokens <= 60
    before = engine.stats().prefix_hits
    for salt, hits in ((1, 1), (2, 1)):
        ask(engine, prompt_of(26, salt), Sampling(max_tokens=1), reuse_prefix=True)
        run(engine)
        assert engine.stats().prefix_hits - before == hits


def test_capacity_zero_keeps_nothing() -> None:
    """The option off."""
    engine = make_engine(prefix_cache_tokens=0)
    for _ in range(2):
        ask(engine, prompt_of(9), reuse_prefix=True)
        run(engine)
    assert engine.stats().prefix_hits == 0
