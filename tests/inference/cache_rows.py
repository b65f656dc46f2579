"""Helpers: prompts as they arrive in a KV cache, and the logits that its rows must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from clotho.inference.cache_layout import CacheLayout, RowCaches
from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import PrefilledPrompt, undivided
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    RecordedEvents,
    complete_alone,
    full_logits,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import tiny_source

RESERVED = 100
"""Number of tokens that a row can sample."""


def arrival_of(layout: CacheLayout, tokens: Sequence[int], rows: int = 1) -> PrefilledPrompt:
    """Compute the prompt of so many rows whose next input is the last of `tokens`, as the engine does."""
    held = len(tokens) - 1
    if not held:
        return PrefilledPrompt(rows=rows, tokens=0, state=None, reserved=RESERVED)
    cache = layout.fresh()
    layout.compute(mx.array([list(tokens[:-1])]), cache)
    state = layout.extract(cache, 0, held)
    mx.eval(state)
    return PrefilledPrompt(rows=rows, tokens=held, state=state, reserved=held + RESERVED)


class Rows:
    """Rows of a cache, each with all of its tokens, the newest of which the cache has not seen yet."""

    def __init__(self, model: nn.Module, slots: int, cache: RowCaches) -> None:
        self.layout = CacheLayout(model)
        self.cache: Any = cache
        self.tokens: list[tuple[int, ...]] = [(0,)] * slots
        self.live_B = np.zeros(slots, dtype=np.bool_)

    @property
    def positions_B(self) -> NDArray[np.int32]:
        """Tokens that the cache holds of each row."""
        return np.array([len(tokens) - 1 for tokens in self.tokens], dtype=np.int32)

    def enter(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Let rows with one prompt join."""
        self.put(slots, tokens, arrival_of(self.layout, tokens, len(slots)))

    def put(self, slots: Sequence[int], tokens: Sequence[int], arrival: PrefilledPrompt) -> None:
        """Let rows join with what was computed of their prompt."""
        self.live_B[list(slots)] = False
        self.cache.make_room(self.positions_B, self.live_B, [arrival])
        self.cache.enter(slots, arrival)
        for slot in slots:
            self.tokens[slot], self.live_B[slot] = tuple(tokens), True

    def take(self, slots: Sequence[int]) -> None:
        """Keep only these."""
        self.tokens = [self.tokens[slot] for slot in slots]
        self.live_B = self.live_B[list(slots)]
        self.cache.take(slots, self.positions_B)

    def step(self) -> NDArray[np.float32]:
        """Compute the logits of every row, (B, V), and let each go on with another token."""
        newest_B = np.array([tokens[-1] for tokens in self.tokens], dtype=np.int32)
        parts = self.cache.parts(newest_B, self.positions_B, self.live_B, divided=False)
        logits_B_V = model_lanes.numpy(mx.array(undivided(parts)))
        self.tokens = [(*tokens, (5 * tokens[-1] + slot + 1) % 256) for slot, tokens in enumerate(self.tokens)]
        return logits_B_V

    def check_step(self, but: Sequence[int] = ()) -> None:
        """Step, and compare every live row (`but` a few) with one full forward pass of its own."""
        tokens = list(self.tokens)
        found_B_V = self.step()
        for slot in set(np.flatnonzero(self.live_B).tolist()).difference(but):
            expected_V = full_logits(self.layout.model, tokens[slot])[-1]
            np.testing.assert_allclose(found_B_V[slot], expected_V, atol=model_lanes.atol(1e-4))


def positions(engine: DecodeEngine) -> list[int]:
    """Number of tokens of each slot."""
    return [int(tokens) for tokens in engine._short.batch.table.positions]


def check_order(long_prompt: int) -> None:
    """Check that rows become ordered by length while they run, and that their completions do not change."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=12)
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    answers: dict[tuple[int, ...], RecordedEvents] = {}

    def all_run() -> bool:
        return engine.running == len(answers)

    def is_ordered() -> bool:
        return positions(engine) == sorted(positions(engine), reverse=True)

    ordered = []
    for i in range(12):
        prompt = make_prompt(long_prompt if i % 3 == 2 else 7, i)
        answers[prompt] = submit_request(engine, prompt, sampling)
        tick_until(engine, all_run)
        ordered.append(is_ordered())
    assert not all(ordered)
    tick_until(engine, is_ordered)
    assert engine.running == 12
    run(engine)
    for prompt, answer in list(answers.items())[::5]:
        assert answer.completions[0].tokens == complete_alone(source, prompt, sampling).tokens
