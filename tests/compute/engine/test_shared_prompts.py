"""Rows with the same prompt hold it once, and draw what they would draw with a copy each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from actors.compute.engine.batch_cache import BatchCache, Incoming
from actors.compute.engine.layout import CacheLayout
from actors.compute.engine.partial_attention import attend_to, united, unseen
from actors.compute.engine.probe import probe_batching
from actors.compute.engine.shared_prompts import SharedPrompts
from protocols.sampling import Sampling
from tests.compute.engine.asking import ask, make_engine, prompt_of, run, tick_until, twin_logprobs
from tests.models import tiny_source

LONG = Sampling(max_tokens=40, ignore_eos=True)


def test_attention_over_two_sets_of_keys_unites_to_attention_over_both() -> None:
    """Softmax over all keys is the weighted mean of softmaxes over some, also where one set hides keys."""
    queries, keys, values = (mx.random.normal((2, 3, n, 8), key=mx.random.key(n)) for n in (4, 11, 11))
    seen = mx.arange(11) != 2
    one = attend_to(queries, keys[:, :, :5], values[:, :, :5], unseen(seen[:5]))
    other = attend_to(queries, keys[:, :, 5:], values[:, :, 5:], None)
    whole = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=seen)
    np.testing.assert_allclose(np.array(united(one, other)), np.array(whole), atol=1e-6)


def test_a_group_holds_its_prompt_once() -> None:
    """Buffers of eight rows over a prompt of 200 tokens hold far fewer tokens than eight copies would."""
    engine = make_engine()
    ask(engine, prompt_of(200), LONG, range(8))
    tick_until(engine, lambda: engine.running == 8)
    assert 200 < engine.stats().cache_tokens < 8 * 200


def test_rows_alone_with_their_prompt_hold_it_in_columns() -> None:
    """Sharing with nobody spares nothing, so nothing is shared."""
    cache = BatchCache(_probed("qwen3"), 1)
    assert not cache.worth_sharing(1, 10_000)
    assert cache.worth_sharing(2, 10_000)


@pytest.mark.parametrize(
    ("architecture", "shares"), [("qwen3", True), ("llama", True), ("gemma2", False), ("gemma3_text", True)]
)
def test_prompts_are_shared_where_full_layers_leave_attention_to_their_cache(architecture: str, shares: bool) -> None:
    """A model that computes attention itself, such as gemma2, keeps a copy per row; windows never share."""
    layout = _probed(architecture)
    assert layout.shares_prompts is shares
    tracks = BatchCache(layout, 2).tracks
    assert all(track.shared is None for window, track in tracks.items() if window is not None)


def test_groups_come_and_go_and_every_row_draws_what_its_own_forward_pass_gives() -> None:
    """Groups of different sizes and prompts join while others leave rows, gaps and prompts behind."""
    source = tiny_source()
    engine = make_engine(source, max_rows=24)
    asked = []
    for i, (length, rows) in enumerate([(150, 6), (40, 5), (90, 1), (150, 7), (33, 9), (201, 3), (64, 8)]):
        sampling = Sampling(max_tokens=5 + 9 * (i % 3), ignore_eos=i % 2 == 0)
        seeds = range(100 * i, 100 * i + rows)
        asked.append((prompt_of(length, i), sampling, ask(engine, prompt_of(length, i), sampling, seeds)))
        for _ in range(4):
            engine.tick()
    run(engine)
    for prompt, sampling, answer in asked:
        for completion in answer.completions:
            twin = twin_logprobs(source.model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, twin, atol=1e-4)


def test_a_prompt_that_no_row_has_any_more_gives_its_place_to_the_next() -> None:
    """Prompts do not pile up while groups replace each other in the same slots."""
    shared = SharedPrompts(4)
    assert shared.enter([0, 1], 7) == 0
    assert shared.enter([2, 3], 9) == 1
    assert shared.enter([0, 1], 5) == 0
    assert shared.length_F.tolist() == [5, 9]
    assert shared.tokens_B.tolist() == [5, 5, 9, 9]


def test_rows_that_are_kept_take_only_their_prompts_along() -> None:
    """Compaction numbers the prompts anew and says which they were."""
    shared = SharedPrompts(6)
    for slots, tokens in (([0, 1], 7), ([2, 3], 9), ([4], 11)):
        shared.enter(slots, tokens)
    assert shared.take([2, 4, 5]).tolist() == [1, 2]
    assert shared.prompt_B.tolist() == [0, 1, -1]
    assert shared.length_F.tolist() == [9, 11]


def test_what_a_prompt_leaves_behind_does_not_reach_a_shorter_one_in_its_place() -> None:
    """Keys that are not finite would come through the hidden part of a product: they are overwritten."""
    layout = _probed("qwen3")
    cache = BatchCache(layout, 2)
    cache.make_room(np.zeros(2, np.int32), np.zeros(2, np.bool_), Incoming(9, 0))
    for tokens, value in ((9, mx.nan), (4, 1.0)):
        state = tuple(
            (mx.full((1, *leaf.key_shape[:1], tokens, leaf.key_shape[1]), value),) * 2  # type: ignore[union-attr]
            for leaf in layout.leaves
        )
        cache.share([0, 1], state, tokens)
    assert all(bool(mx.isfinite(array).all()) for array in cache.arrays)


def _probed(architecture: str) -> CacheLayout:
    layout = CacheLayout(tiny_source(architecture).model)
    probe_batching(layout)
    return layout
