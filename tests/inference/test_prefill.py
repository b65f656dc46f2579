"""Batched prefill: which prompts are prefilled together, and that batching does not change results."""

from __future__ import annotations

import random

import pytest

from clotho.inference.cache_layout import CacheLayout
from clotho.inference.prefill import PrefixCache, common_prefix
from protocols.sampling import Sampling
from tests.inference.engine_helpers import SAMPLED, complete_alone, make_engine, make_prompt, run, submit_request
from tests.small_models import tiny_source


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "lfm2", "falcon_h1"])
def test_prompts_with_cached_prefixes_are_prefilled_together(architecture: str) -> None:
    """Turns of many conversations join the batch in one tick."""
    source = tiny_source(architecture)
    engine = make_engine(source)
    histories = [make_prompt(20, salt) for salt in range(1, 5)]
    for history in histories:
        submit_request(engine, history, reuse_prefix=True)
        run(engine)
    turns = [(*history, 3 + number, 9, 4) for number, history in enumerate(histories)]
    answers = [submit_request(engine, turn, SAMPLED, (3,), reuse_prefix=True) for turn in turns]
    engine.tick()
    assert engine.running == len(turns)
    run(engine)
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.completions[0].tokens == complete_alone(source, turn, SAMPLED, 3).tokens
    assert engine.stats().prefix_hits == len(turns)


def test_a_prefill_batch_starts_at_its_shortest_cached_prefix() -> None:
    """A few tokens of the others are computed again. Prompts without a prefix may join."""
    source = tiny_source()
    engine = make_engine(source)
    known = [make_prompt(length, length) for length in (12, 15, 19)]
    for prompt in known:
        submit_request(engine, prompt, reuse_prefix=True)
        run(engine)
    turns = [*((*prompt, 7, 5) for prompt in known), make_prompt(18, 40)]
    answers = [submit_request(engine, turn, SAMPLED, (3,), reuse_prefix=True) for turn in turns]
    engine.tick()
    assert engine.running == len(turns)
    run(engine)
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.completions[0].tokens == complete_alone(source, turn, SAMPLED, 3).tokens


def test_a_long_cached_prefix_is_not_recomputed_for_a_batch() -> None:
    """Its prompt is prefilled alone, from the end of the prefix."""
    engine = make_engine()
    long = make_prompt(60)
    submit_request(engine, long, reuse_prefix=True)
    run(engine)
    before = engine.stats().prefill_tokens
    for prompt in ((*long, 1, 2), make_prompt(62, 3)):
        submit_request(engine, prompt, Sampling(max_tokens=1), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefill_tokens - before == 2 + 61


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
def test_the_longest_prefix_is_found(architecture: str) -> None:
    """The result equals a comparison with every entry."""
    layout = CacheLayout(tiny_source(architecture).model)
    cut = layout.right_padding_limit is None
    cache, chance = PrefixCache(layout, 10_000), random.Random(0)
    kept = {tuple(chance.choices((1, 2), k=chance.randint(1, 9))) for _ in range(60)}
    for tokens in kept:
        cache.store((0, 0), tokens, ())
        cache.store((0, 1), tokens[::-1], ())
    for _ in range(200):
        prompt = tuple(chance.choices((1, 2), k=chance.randint(1, 12)))
        usable = [common_prefix(entry, prompt) for entry in kept if cut or prompt[: len(entry)] == entry]
        hit = cache.find((0, 0), prompt)
        assert (hit.tokens if hit else 0) == max(usable, default=0)
