"""The running batch: rows join, one step draws one token for each, rows leave.

The host runs one step behind: a step is launched before the tokens of the step before it are read, its input being
those tokens where they are, on the device. A row whose end shows only in its tokens therefore costs one wasted draw,
which is never reported; an end by length is foreseen and costs none. On the CPU, where most steps are sampled by
the host, tokens are known at once and nothing is wasted.

A step in flight, and what is read from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.cpu.sampling import can_draw_on_host, draw_on_host
from clotho.inference.cache_layout import Arrival, Numbers, RowCaches
from clotho.inference.sampling import PADDING, Drawn, Supports, draw, uniforms
from clotho.inference.sampling_params import SamplingPlan, plan_sampling
from clotho.inference.scheduler import Job, Row
from clotho.inference.slots import Ledger


@dataclass(eq=False, slots=True)
class Reading:
    """Tokens read from a finished step, for N rows that still live. top_*: (N, n) where some row asked for them.

    supports: tokens that could have been sampled, as `Completion.supports` has them, by index in N of the rows that
    record them.
    """

    slot_N: NDArray[np.int64]
    token_N: NDArray[np.int32]
    logp_N: NDArray[np.float32]
    version: int
    supports: dict[int, bytes]
    top_token_N: NDArray[np.uint32] | None = None
    top_logp_N: NDArray[np.float32] | None = None


@dataclass(eq=False, slots=True)
class Step:
    """A step in flight, for N rows. version: of the weights that computed it; known: its tokens need no waiting for.

    at_N: their places in the arrays; slot_N: where they are now, -1 if gone; serial_N: which rows they were.
    """

    sampled: Drawn
    at_N: NDArray[np.int64]
    slot_N: NDArray[np.int64]
    serial_N: NDArray[np.int64]
    version: int
    known: bool

    def read(self, serial_B: NDArray[np.int64]) -> Reading | None:
        """Wait for the step; return the tokens of rows that are still in their slots, None if no row is."""
        sampled = self.sampled
        token_B, logp_B = np.array(sampled.token_B), np.array(sampled.logp_B)
        stays_N = (self.slot_N >= 0) & (serial_B[self.slot_N] == self.serial_N)
        if not stays_N.any():
            return None
        at_N = self.at_N[stays_N]
        supports = _supports(sampled.supports, at_N) if sampled.supports is not None else {}
        reading = Reading(self.slot_N[stays_N], token_B[at_N], logp_B[at_N], self.version, supports)
        if sampled.top_token_B_N is not None and sampled.top_logp_B_N is not None:
            reading.top_token_N = np.array(sampled.top_token_B_N)[at_N]
            reading.top_logp_N = np.array(sampled.top_logp_B_N)[at_N]
        return reading


def _supports(supports: Supports, at_N: NDArray[np.int64]) -> dict[int, bytes]:
    """Cut each row's tokens before the padding; rows that are not at any of the places `at_N` have left."""
    token_R_K = np.array(supports.token_R_K).astype("<u4", copy=False)
    count_R = np.count_nonzero(token_R_K != PADDING, axis=-1).tolist()
    index = {place: n for n, place in enumerate(at_N.tolist())}
    recorded = enumerate(np.array(supports.row_R).tolist())
    return {index[place]: token_R_K[r, : count_R[r]].tobytes() for r, place in recorded if place in index}


PATIENCE = 1.0
"""Wasted steps' worth of dead slots after which copying the cache without them pays."""


class Batch:
    """Rows that are being decoded together."""

    def __init__(self, make_caches: Callable[[int], RowCaches], end_tokens: frozenset[int], vocabulary: int) -> None:
        """make_caches: for so many rows."""
        self.vocabulary = vocabulary
        self.ledger = Ledger(end_tokens, vocabulary)
        self.inflight: Step | None = None
        self._make_caches = make_caches
        self._end_tokens = end_tokens
        self._cache: RowCaches | None = None
        self._input: mx.array | None = None
        self._fresh: dict[int, int] = {}  # slot -> first input of a row that just joined
        self._plan: SamplingPlan | None = None
        self._seen: mx.array | None = None
        self._waste = 0.0

    @property
    def slots(self) -> int:
        """Slots of the batch, free ones included."""
        return len(self.ledger.rows)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the largest key-value buffers have room for."""
        return self._cache.tokens if self._cache is not None else 0

    def join(self, jobs: list[Job]) -> None:
        """Put the admitted rows of computed jobs into slots, free ones first."""
        wanted = sum(job.admitted for job in jobs)
        if self._cache is None or not self.ledger.running:
            self._restart(wanted)
        assert self._cache is not None
        arrivals = [Arrival(rows=job.admitted, tokens=len(job.tokens) - 1, state=job.state) for job in jobs]
        if not self._cache.has_room(arrivals):
            self._squeeze()  # longer columns are for slots in use: the bound on the cache counts no others
        self._grow(wanted - (self.slots - self.ledger.running))
        free = [slot for slot, row in enumerate(self.ledger.rows) if row is None]
        self._cache.make_room(self.ledger.positions, self.ledger.live, arrivals)
        for job, arrival in zip(jobs, arrivals, strict=True):
            slots, free = free[: job.admitted], free[job.admitted :]
            self._cache.enter(slots, arrival)
            for slot, row in zip(slots, job.rows, strict=False):
                self.ledger.enter(slot, row, len(job.tokens) - 1)
                self._fresh[slot] = job.tokens[-1]
        self._plan = None

    def _restart(self, rows: int) -> None:
        """Begin anew with empty slots; a step in flight holds no row that still lives."""
        self.inflight = None
        self.ledger = Ledger(self._end_tokens, self.vocabulary)
        self.ledger.grow(rows)
        self._cache, self._input, self._fresh, self._seen = self._make_caches(rows), None, {}, None
        self._waste = 0.0

    def _grow(self, rows: int) -> None:
        if rows <= 0:
            return
        assert self._cache is not None
        self._cache.grow(rows)
        self.ledger.grow(rows)
        if self._input is not None:
            self._input = mx.concatenate([self._input, mx.zeros((rows,), self._input.dtype)])

    def leave(self, slot: int) -> Row:
        """Free a slot; the row takes along what it has sampled."""
        row = self.ledger.leave(slot)
        self._fresh.pop(slot, None)
        return row

    def clear(self, slot: int) -> None:
        """Zero the cache of a slot whose row was not finite."""
        if self._cache is not None:
            self._cache.clear(slot)

    def drop(self) -> None:
        """Give back the buffers; all rows have left."""
        self._restart(0)
        self._cache = None

    def compact(self) -> None:
        """Give up dead slots once they have cost as much as a copy of the cache without them would."""
        running = self.ledger.running
        dead = self.slots - running
        if self._cache is None or not dead or not running:
            return
        self._waste += dead / self.slots
        if self._waste >= PATIENCE:
            self._squeeze()

    def _squeeze(self) -> None:
        """Copy the caches without dead slots, if there are any; some row is alive."""
        running, slots = self.ledger.running, self.slots
        if self._cache is None or not running or running == slots:
            return
        keep = np.flatnonzero(self.ledger.live)
        self.ledger.take(keep.tolist())
        self._cache.take(keep.tolist(), self.ledger.positions)
        moved = np.full(slots, -1, dtype=np.int64)
        moved[keep] = np.arange(running)
        self._fresh = {int(moved[slot]): token for slot, token in self._fresh.items()}
        if self._input is not None:
            self._input = self._input[mx.array(keep.astype(np.int32))]
        if self.inflight is not None:
            slot_N = self.inflight.slot_N
            self.inflight.slot_N = np.where(slot_N >= 0, moved[slot_N], -1)
        self._plan, self._waste = None, 0.0

    def launch(self, version: int) -> Step | None:
        """Start computing one token for every row that may still have one; None if there is no such row."""
        ledger = self.ledger
        due = ledger.live & (ledger.launched < ledger.limit)
        if self._cache is None or not due.any():
            return None
        plan, slot = self._settings(), np.flatnonzero(due)
        on_host = can_draw_on_host(plan)
        input_B = self._inputs()
        logits_B_V = self._cache.logits(input_B, ledger.positions, due)
        uniform_B_2 = self._uniforms(plan)
        ledger.launched[slot] += 1
        ledger.positions[slot] += 1
        if on_host:
            sampled = self._draw_here(logits_B_V, uniform_B_2, plan)
        else:
            sampled = self._draw_there(logits_B_V, input_B, uniform_B_2, plan)
        self._input = sampled.token_B
        return Step(
            sampled=sampled, at_N=slot, slot_N=slot, serial_N=ledger.serial[slot], version=version, known=on_host
        )

    def _draw_here(self, logits_B_V: Numbers, uniform_B_2: NDArray[np.float32] | None, plan: SamplingPlan) -> Drawn:
        """Draw on the host, which waits for the logits."""
        assert self._cache is not None
        if isinstance(logits_B_V, mx.array):
            mx.async_eval(logits_B_V, self._cache.arrays)
            logits_B_V = np.array(logits_B_V.astype(mx.float32))
        return draw_on_host(logits_B_V, uniform_B_2, plan)

    def _draw_there(
        self, logits_B_V: Numbers, input_B: mx.array, uniform_B_2: NDArray[np.float32] | None, plan: SamplingPlan
    ) -> Drawn:
        """Draw on the device, and set everything that the step writes to be computed."""
        assert self._cache is not None
        written = list(self._cache.arrays)
        if self._seen is not None:
            self._seen[mx.arange(self.slots), input_B] = True
            written.append(self._seen)
        sampled = draw(mx.array(logits_B_V), None if uniform_B_2 is None else mx.array(uniform_B_2), plan, self._seen)
        mx.async_eval([a for a in sampled if a is not None], written)
        return sampled

    def _uniforms(self, plan: SamplingPlan) -> NDArray[np.float32] | None:
        return None if plan.all_greedy else uniforms(self.ledger.seed, self.ledger.launched)

    def _inputs(self) -> mx.array:
        """Each row's newest token: what the last step drew, or the last token of a prompt that just joined."""
        if not self._fresh and self._input is not None:
            return self._input
        given = np.zeros(self.slots, dtype=np.int32)
        chosen = np.zeros(self.slots, dtype=np.bool_)
        for slot, token in self._fresh.items():
            given[slot], chosen[slot] = token, True
        self._fresh = {}
        return mx.array(given) if self._input is None else mx.where(mx.array(chosen), mx.array(given), self._input)

    def _settings(self) -> SamplingPlan:
        """Return the plan of the present rows; built anew when rows have joined or moved."""
        if self._plan is None:
            rows = self.ledger.rows
            recorded = [slot for slot, row in enumerate(rows) if row is not None and row.asked.request.record_support]
            settings = [row.asked.request.sampling if row is not None else None for row in rows]
            self._plan = plan_sampling(settings, self.vocabulary, recorded=recorded)
            self._seen = self._seen_tokens() if self._plan.penalty_B is not None else None
        return self._plan

    def _seen_tokens(self) -> mx.array:
        """Mark what penalised rows have seen, but for the newest token, which each step adds itself."""
        seen_B_V = np.zeros((self.slots, self.vocabulary), dtype=np.bool_)
        for slot, row in enumerate(self.ledger.rows):
            if row is not None and row.asked.request.sampling.repetition_penalty != 1.0:
                seen_B_V[slot, list(row.asked.request.prompt)] = True
                seen_B_V[slot, self.ledger.tokens_of(slot)] = True
        return mx.array(seen_B_V)

    def read(self, step: Step) -> Reading | None:
        """Wait for a step and return its tokens, but for those of rows that have left since; None if all have."""
        return step.read(self.ledger.serial)
