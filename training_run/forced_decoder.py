"""Decode steps of given tokens: the logits that sampling would have seen, with the kernels of the decode engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout, Computing, pass_context
from clotho.inference.engine import DecodeEngine
from clotho.inference.parts import EngineParts, MakeCaches
from clotho.inference.rows import PrefilledPrompt, RouteArray, RowAdapter, undivided
from clotho.settings.engine import EngineSection


class ForcedDecoder:
    """Decodes given tokens, in a batch of its own."""

    def __init__(self, layout: CacheLayout, make_caches: MakeCaches, *, prefill: Computing, steps: Computing) -> None:
        """prefill, steps: select the adapters of rows in a prefill, and in decode steps."""
        self._layout, self._make_caches, self._prefill, self._steps = layout, make_caches, prefill, steps

    @classmethod
    def of_engine(cls, engine: DecodeEngine) -> ForcedDecoder:
        """Return a decoder with the model and the caches of an engine, in whose thread it decodes."""
        return cls(engine.layout, engine.make_caches, prefill=engine.row_weights.computing, steps=engine.computing)

    @classmethod
    def of_model(cls, model: nn.Module, settings: EngineSection) -> ForcedDecoder:
        """Return a decoder for a model without adapters, with the kernels of an engine with these settings."""
        model.eval()
        layout = CacheLayout(model)
        probe_batching(layout)
        parts = EngineParts(model=model, settings=settings).extended()
        make_caches = parts.batches.caches(layout, parts.decoder(layout), settings.kv_cache_tokens)
        rows = parts.rows.computing
        return cls(layout, make_caches, prefill=rows, steps=rows)

    def teacher_forced_logits(
        self,
        prompt: Sequence[int],
        completions: Sequence[Sequence[int]],
        *,
        rows: int,
        adapter: RowAdapter | None = None,
    ) -> Generator[mx.array, None, list[RouteArray]]:
        """Yield the logits before each token, (rows, V), evaluated, from decode steps of `rows` rows.

        Returns the routes of prompt and tokens but the last of each completion; nothing for a model without experts.
        completions: of equal lengths; row i has completion i modulo their number. adapter: None for the policy.
        """
        adapter_B = [adapter] * rows
        *before, last = prompt
        caches = self._make_caches(rows)
        positions_B, all_B = np.full(rows, len(before), dtype=np.int32), np.ones(rows, dtype=np.bool_)
        with pass_context(self._prefill, adapter_B[:1]):
            state = self._layout.prefilled(before)
        token_B_T = np.asarray(completions, dtype=np.int32)[np.arange(rows) % len(completions)]
        prefilled = PrefilledPrompt(rows, len(before), state, reserved=len(prompt) + token_B_T.shape[1])
        caches.make_room(positions_B, ~all_B, [prefilled])
        caches.enter(range(rows), prefilled)
        for step in range(token_B_T.shape[1]):
            token_B = token_B_T[:, step - 1] if step else np.full(rows, last, dtype=np.int32)
            with pass_context(self._steps, adapter_B):
                logits_B_V = mx.array(undivided(caches.parts(token_B, positions_B, all_B, divided=False)))
            mx.eval(logits_B_V, *caches.arrays)
            yield logits_B_V
            positions_B = positions_B + 1
        routes = [caches.routes(row, int(positions_B[row])) for row in range(min(rows, len(completions)))]
        return [one for one in routes if one is not None]
