"""Drafts from a smaller model with the tokens of the policy.

The draft model samples with the sampling parameters and the random numbers with which the policy samples at the same
position, so that a draft model with the probabilities of the policy proposes what the policy samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.speculation.drafts import Drafted
from attachments.speculation.verification import VerifyingCaches
from clotho.backend import backend
from clotho.inference.cache_layout import CacheLayout, Logits
from clotho.inference.kv_budget import MARGIN
from clotho.inference.rows import DraftedTokens, PrefilledPrompt, PromptState, RowParameters
from clotho.inference.sampling import row_parameters, sample, uniforms
from clotho.inference.scheduler import Row

MAX_PENDING = 32
"""A row with more tokens than this that the draft model has not seen is prefilled again."""


class ModelDrafter:
    """Samples drafts with a model, one token for all rows per forward pass.

    The KV cache of the draft model holds the tokens of the rows of the last call. Each call appends what the policy has
    sampled since then, samples the drafts, and discards them again.
    """

    def __init__(
        self, layout: CacheLayout, make_caches: Callable[[int], VerifyingCaches], *, vocabulary: int, max_draft: int
    ) -> None:
        """layout, make_caches: of the draft model. vocabulary: width of its logits."""
        self._layout, self._make_caches = layout, make_caches
        self._vocabulary, self._max_draft = vocabulary, max_draft
        self._cache = make_caches(1)
        self._rows: list[Row | None] = [None]
        self._positions = np.zeros(1, dtype=np.int32)
        self._parameters: tuple[tuple[int, ...], RowParameters] | None = None

    def left(self, row: Row) -> None:
        """Free the slot of a row."""
        self._keep_only({one.serial for one in self._rows if one is not None} - {row.serial})

    def finished(self, row: Row) -> None:
        """The draft model does not learn."""

    def beside(self) -> ModelDrafter:
        """Return a drafter with the same model and a KV cache of its own."""
        return ModelDrafter(self._layout, self._make_caches, vocabulary=self._vocabulary, max_draft=self._max_draft)

    def propose(self, rows: Sequence[Drafted]) -> dict[int, Sequence[int]]:
        """Sample the drafts. Rows that are not among `rows` have to be prefilled again when they return."""
        if not rows:
            return {}
        waiting = self._admit(rows)
        by_serial = {one.row.serial: one for one in rows}
        drafted = [None if row is None else by_serial[row.serial] for row in self._rows]
        due = np.array([one is not None for one in drafted])
        newest = [0 if one is None else waiting[one.row.serial][0] for one in drafted]
        further = {
            slot: waiting[one.row.serial][1:]
            for slot, one in enumerate(drafted)
            if one is not None and len(waiting[one.row.serial]) > 1
        }
        token_B = np.array(newest, dtype=np.int32)
        most = min(self._max_draft, max(one.most for one in rows))
        drafts: list[NDArray[np.int32]] = []
        for _ in range(most):
            tokens = DraftedTokens.of(token_B, further)
            logits_N_V = self._cache.verify(tokens, self._positions, due)
            token_B = self._sample(logits_N_V, tokens, drafted, len(drafts))
            kept_B = np.where(due, tokens.length_B, 0)
            self._cache.keep(kept_B)
            self._positions += kept_B.astype(np.int32)
            drafts.append(token_B)
            further = {}
        self._cache.discard(np.where(due, most - 1, 0))
        self._positions -= np.where(due, most - 1, 0).astype(np.int32)
        draft_B_T = np.stack(drafts, axis=1)
        return {one.slot: draft_B_T[slot, : one.most].tolist() for slot, one in enumerate(drafted) if one is not None}

    def _sample(
        self, logits_N_V: Logits, tokens: DraftedTokens, drafted: Sequence[Drafted | None], ahead: int
    ) -> NDArray[np.int32]:
        """Sample one token after the last token of every row, `ahead` tokens beyond what the policy has sampled."""
        parameters = self._sampling_parameters()
        seed_B = np.array([0 if one is None else one.row.active.request.seeds[one.row.index] for one in drafted])
        position_B = np.array([0 if one is None else len(one.tokens) + ahead for one in drafted])
        uniform_B_2 = None if parameters.all_greedy else uniforms(seed_B.astype(np.uint64), position_B)
        last_B = tokens.first_B + tokens.length_B - 1
        mx.eval(logits_N_V if isinstance(logits_N_V, mx.array) else [], self._cache.arrays)
        sampler = backend().row_sampler(parameters)
        if sampler is not None:
            logits_B_V = np.array(logits_N_V).astype(np.float32, copy=False)[last_B]
            return np.array(sampler(logits_B_V, uniform_B_2, parameters).token_B)
        uniform = None if uniform_B_2 is None else mx.array(uniform_B_2)
        chosen = mx.array(logits_N_V)[mx.array(last_B.astype(np.int32))]
        return np.array(sample(chosen, uniform, parameters, None).token_B)

    def _sampling_parameters(self) -> RowParameters:
        key = tuple(0 if row is None else row.serial for row in self._rows)
        if self._parameters is None or self._parameters[0] != key:
            settings = [None if row is None else row.active.request.sampling for row in self._rows]
            self._parameters = key, row_parameters(settings, self._vocabulary)
        return self._parameters[1]

    def _admit(self, rows: Sequence[Drafted]) -> dict[int, list[int]]:
        """Let the KV cache hold all rows, and no others; return the tokens that it lacks, by serial number."""
        self._keep_only(one.row.serial for one in rows)
        slots = {row.serial: slot for slot, row in enumerate(self._rows) if row is not None}
        waiting: dict[int, list[int]] = {}
        new: list[Drafted] = []
        for one in rows:
            prompt, slot = one.row.active.request.prompt, slots.get(one.row.serial)
            held = 0 if slot is None else int(self._positions[slot]) - (len(prompt) - 1)
            if slot is not None and len(one.tokens) - held < MAX_PENDING:
                waiting[one.row.serial] = [prompt[-1], *one.tokens.tolist()][held:]
            else:
                new.append(one)
        if len(new) < len(rows):
            self._keep_only(waiting)
            self._compact()
        else:
            self._start(len(new))
        states: dict[tuple[int, ...], PromptState | None] = {}
        for one in new:
            tokens: list[int] = one.tokens.tolist()
            *before, last = *one.row.active.request.prompt, *tokens
            key = tuple(before)
            if key not in states:
                states[key] = self._layout.prefilled(key)
            most = min(one.row.active.reserved, len(key) + MARGIN) + self._max_draft
            self._enter(one.row, PrefilledPrompt(1, len(key), states[key], most))
            waiting[one.row.serial] = [last]
        return waiting

    def _compact(self) -> None:
        """Remove the free slots if there are more than others."""
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        if 2 * len(live) < len(self._rows):
            self._positions, self._rows = self._positions[live], [self._rows[slot] for slot in live]
            self._cache.take(live, self._positions)

    def _start(self, rows: int) -> None:
        self._cache, self._rows = self._make_caches(rows), [None] * rows
        self._positions = np.zeros(rows, dtype=np.int32)

    def _enter(self, row: Row, prompt: PrefilledPrompt) -> None:
        if None not in self._rows:
            more = max(1, len(self._rows) // 4)
            self._cache.grow(more)
            self._rows += [None] * more
            self._positions = np.append(self._positions, np.zeros(more, dtype=np.int32))
        slot = self._rows.index(None)
        live = np.array([one is not None for one in self._rows])
        self._cache.make_room(self._positions, live, [prompt])
        self._cache.enter([slot], prompt)
        self._rows[slot], self._positions[slot] = row, prompt.tokens

    def _keep_only(self, serials: Iterable[int]) -> None:
        """Free the slots of all other rows."""
        kept = set(serials)
        for slot, row in enumerate(self._rows):
            if row is not None and row.serial not in kept:
                self._rows[slot], self._positions[slot] = None, 0
