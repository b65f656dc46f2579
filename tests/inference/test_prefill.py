"""Prompts computed together: who fits with whom, and that company changes nothing but the time."""

from __future__ import annotations

import random

import pytest

from clotho.inference.cache_layout import CacheLayout
from clotho.inference.prefix_cache import PrefixCache, common_prefix
from protocols.sampling import Sampling
from tests.inference.engine_helpers import FREE, alone, ask, make_engine, prompt_of, run
from tests.small_models import tiny_source


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "lfm2", "falcon_h1"])
def test_prompts_that_go_on_from_found_prefixes_are_computed_together(architecture: str) -> None:
    """Turns of many conversations enter the batch in one tick, not in one each."""
    source = tiny_source(architecture)
    engine = make_engine(source)
    histories = [prompt_of(20, salt) for salt in range(1, 5)]
    for history in histories:
        ask(engine, history, reuse_prefix=True)
        run(engine)
    turns = [(*history, 3 + number, 9, 4) for number, history in enumerate(histories)]
    answers = [ask(engine, turn, FREE, (3,), reuse_prefix=True) for turn in turns]
    engine.tick()
    assert engine.running == len(turns)
    run(engine)
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.completions[0].tokens == alone(source, turn, FREE, 3).tokens
    assert engine.stats().prefix_hits == len(turns)


def test_prompts_start_together_where_the_shortest_of_their_prefixes_ends() -> None:
    """A few tokens of the others are computed anew; neighbours without any prefix at all join them."""
    source = tiny_source()
    engine = make_engine(source)
    known = [prompt_of(length, length) for length in (12, 15, 19)]
    for prompt in known:
        ask(engine, prompt, reuse_prefix=True)
        run(engine)
    turns = [*((*prompt, 7, 5) for prompt in known), prompt_of(18, 40)]
    answers = [ask(engine, turn, FREE, (3,), reuse_prefix=True) for turn in turns]
    engine.tick()
    assert engine.running == len(turns)
    run(engine)
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.completions[0].tokens == alone(source, turn, FREE, 3).tokens


def test_a_long_prefix_is_not_given_up_for_company() -> None:
    """Its prompt is computed on its own, and only what is new of it."""
    engine = make_engine()
    long = prompt_of(60)
    ask(engine, long, reuse_prefix=True)
    run(engine)
    before = engine.stats().prefill_tokens
    for prompt in ((*long, 1, 2), prompt_of(62, 3)):
        ask(engine, prompt, Sampling(max_tokens=1), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefill_tokens - before == 2 + 61


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
def test_the_longest_prefix_is_found_among_many(architecture: str) -> None:
    """As by comparing with every entry: the longest common start, or the longest entry that begins the prompt."""
    layout = CacheLayout(tiny_source(architecture).model)
    cut = layout.right_padding_limit is None
    cache, chance = PrefixCache(layout, 10_000), random.Random(0)
    kept = {tuple(chance.choices((1, 2), k=chance.randint(1, 9))) for _ in range(60)}
    for tokens in kept:
        cache.store(0, tokens, ())
        cache.store(1, tokens[::-1], ())
    for _ in range(200):
        asked = tuple(chance.choices((1, 2), k=chance.randint(1, 12)))
        usable = [common_prefix(entry, asked) for entry in kept if cut or asked[: len(entry)] == entry]
        hit = cache.find(0, asked)
        assert (hit.tokens if hit else 0) == max(usable, default=0)
