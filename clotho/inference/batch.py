"""The running batch: rows join, each step samples one token per row, rows leave.

On a GPU the host runs one step behind: a step is launched before the tokens of the previous step are read, and its
input is those tokens on the device. A row whose end shows only in its tokens therefore costs one wasted sample, which
is never reported. On the CPU most steps are sampled on the host, and no sample is wasted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.backend import backend
from clotho.inference.cache_layout import Computing, Logits, RowCaches, pass_context
from clotho.inference.kv_budget import MARGIN, Load
from clotho.inference.rows import (
    PADDING,
    CountPenalties,
    PrefilledPrompt,
    PromptState,
    RowAdapter,
    RowParameters,
    RowSampler,
    SampledRows,
    Supports,
    TokenMasks,
)
from clotho.inference.sampling import row_parameters, sample, uniforms
from clotho.inference.scheduler import PrefillJob, Row
from clotho.inference.token_masks import MaskedRows

INITIAL_COLUMNS = 64
"""Initial number of tokens per row in the arrays of a slot table."""


class SlotTable:
    """What the host knows of the slots of a batch, as arrays by slot. A slot without a row has serial 0.

    positions: tokens in the row's KV cache after all launched steps. launched, sampled: tokens launched, and read.
    newest: the newest token that has been read, or the last of the prompt. limit: maximum length. stops_at_eos: whether
    the model's end tokens end the row. needs_processing: see `Row`. adapter: version of the row's adapter, -1: base
    model, 0: policy. most: maximum tokens of prompt and completion.
    admitted: tokens that were reserved on admission. client: whether a row of a client is in the slot.
    """

    def __init__(self, end_tokens: frozenset[int], vocabulary: int) -> None:
        self.rows: list[Row | None] = []
        self._adapters, self._rows_changed = list[RowAdapter | None](), True
        self._is_end_V = np.zeros(vocabulary, dtype=np.bool_)
        self._is_end_V[[t for t in end_tokens if 0 <= t < vocabulary]] = True
        self.serial = np.zeros(0, dtype=np.int64)
        self.seed = np.zeros(0, dtype=np.uint64)
        self.positions = np.zeros(0, dtype=np.int32)
        self.launched = np.zeros(0, dtype=np.int64)
        self.sampled = np.zeros(0, dtype=np.int64)
        self.newest = np.zeros(0, dtype=np.int32)
        self.limit = np.zeros(0, dtype=np.int64)
        self.stops_at_eos = np.zeros(0, dtype=np.bool_)
        self.needs_processing = np.zeros(0, dtype=np.bool_)
        self.most = np.zeros(0, dtype=np.int64)
        self.admitted = np.zeros(0, dtype=np.int64)
        self.client = np.zeros(0, dtype=np.bool_)
        self.adapter = np.zeros(0, dtype=np.int64)
        self._token = np.zeros((0, INITIAL_COLUMNS), dtype=np.int32)
        self._logprob = np.zeros((0, INITIAL_COLUMNS), dtype=np.float32)
        self._version = np.zeros((0, INITIAL_COLUMNS), dtype=np.int64)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Which slots hold a row."""
        return self.serial > 0

    @property
    def running(self) -> int:
        """Number of slots that hold a row."""
        return int(np.count_nonzero(self.serial))

    @property
    def reserved(self) -> NDArray[np.int64]:
        """Tokens that each row reserves: those of its admission, then those that it has and a margin; free slots, 0."""
        reserved_B: NDArray[np.int64] = np.maximum(self.admitted, np.minimum(self.most, self.positions + MARGIN))
        return reserved_B

    @property
    def outgrown(self) -> NDArray[np.bool_]:
        """Which rows of clients have used up what was reserved on their admission."""
        outgrown_B: NDArray[np.bool_] = self.client & (self.reserved > self.admitted)
        return outgrown_B

    def longest_of_clients(self) -> int:
        """Return the slot of the client's row for which most tokens are reserved."""
        return int((self.reserved * self.client).argmax())

    def newest_outgrown(self) -> int:
        """Return the slot of the row that was submitted last, of those that have used up what was reserved."""
        return int((self.serial * self.outgrown).argmax())

    def load(self, *, movable: Literal["clients", "outgrown"]) -> Load:
        """Return what the rows reserve. movable: which rows can leave the batch."""
        rows = self.running
        if not self.client.any():
            longest = int(self.admitted.max(initial=0))
            return Load(rows, longest, background=rows, most=longest)
        reserved_B, leaving_B = self.reserved, self.client if movable == "clients" else self.outgrown
        background = rows - int(np.count_nonzero(self.client))
        return Load(rows, int(reserved_B.max()), background, int(self.most.max()), int((reserved_B * leaving_B).max()))

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        for name in self._arrays():
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((rows, *array.shape[1:]), dtype=array.dtype)]))
        self.rows, self._rows_changed = [*self.rows, *[None] * rows], True

    def take(self, slots: Sequence[int]) -> None:
        """Keep only these slots, in this order."""
        for name in self._arrays():
            setattr(self, name, getattr(self, name)[list(slots)])
        self.rows, self._rows_changed = [self.rows[slot] for slot in slots], True

    def _arrays(self) -> tuple[str, ...]:
        names = ("serial", "seed", "positions", "launched", "sampled", "limit", "stops_at_eos", "needs_processing")
        return (*names, "newest", "most", "admitted", "client", "adapter", "_token", "_logprob", "_version")

    def enter(self, slot: int, row: Row, tokens: int, newest: int, reserved: int) -> None:
        """Put a row with `tokens` tokens in its KV cache into a free slot. newest: the next token. reserved: for it."""
        request, before = row.active.request, len(row.tokens)
        self.rows[slot], self._rows_changed = row, True
        self.serial[slot], self.seed[slot] = row.serial, request.seeds[row.index]
        self.positions[slot], self.most[slot], self.admitted[slot] = tokens, row.active.reserved, reserved
        self.client[slot], self.newest[slot] = not request.background, newest
        self.launched[slot] = self.sampled[slot] = before
        self.limit[slot], self.stops_at_eos[slot] = row.active.limit, not request.sampling.ignore_eos
        self.needs_processing[slot], self.adapter[slot] = row.needs_processing, row.active.weights_version
        self._reserve_columns(before)
        self._token[slot, :before], self._logprob[slot, :before] = row.tokens, row.logprobs
        self._version[slot, :before] = row.versions

    def leave(self, slot: int) -> Row:
        """Free a slot and return its row with the tokens it has sampled."""
        row, sampled = self.rows[slot], int(self.sampled[slot])
        if row is None:
            raise ValueError(f"slot {slot} holds no row")
        row.tokens = self._token[slot, :sampled].tolist()
        row.logprobs = self._logprob[slot, :sampled].tolist()
        row.versions = self._version[slot, :sampled].tolist()
        self.rows[slot], self.serial[slot], self.positions[slot], self.adapter[slot] = None, 0, 0, 0
        self.most[slot], self.admitted[slot], self.client[slot] = 0, 0, False
        self._rows_changed = True
        return row

    def sampled_tokens(self, slot: int) -> NDArray[np.int32]:
        """Return the tokens that the row in `slot` has sampled so far, as a view."""
        return self._token[slot, : self.sampled[slot]]

    def adapters(self) -> list[RowAdapter | None]:
        """Return the adapter of every slot, None for the policy; the same list as before if nothing has changed.

        Free slots have the adapter that they had, if a row uses it: what was prepared for the last step stays usable.
        """
        if not self._rows_changed:
            return self._adapters
        live = [row.active.adapter for row in self.rows if row is not None]
        before = self._adapters if len(self._adapters) == len(self.rows) else live[:1] * len(self.rows)
        pairs = zip(self.rows, before, strict=True)
        now = [row.active.adapter if row else one if one in live else live[0] for row, one in pairs]
        self._adapters, self._rows_changed = self._adapters if now == self._adapters else now, False
        return self._adapters

    def adapters_changed(self) -> None:
        """Read the adapter of every row again."""
        self.adapter[:] = [row.active.weights_version if row is not None else 0 for row in self.rows]
        self._rows_changed = True

    def versions(self, slots: NDArray[np.int64], policy_version: int) -> NDArray[np.int64]:
        """Return the version of the weights that sample in these slots."""
        adapter_N = self.adapter[slots]
        version_N: NDArray[np.int64] = np.where(adapter_N == 0, policy_version, np.maximum(adapter_N, 0))
        return version_N

    def record(
        self,
        slots: NDArray[np.int64],
        token_N: NDArray[np.int32],
        logp_N: NDArray[np.float32],
        version_N: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Store one sampled token per slot; return which rows end with it, by an end token or by length."""
        at_N = self.sampled[slots]
        self._reserve_columns(int(at_N.max()) + 1)
        self._token[slots, at_N], self._logprob[slots, at_N], self._version[slots, at_N] = token_N, logp_N, version_N
        self.sampled[slots], self.newest[slots] = at_N + 1, token_N
        ended_N: NDArray[np.bool_] = self.is_end(slots, token_N) | (at_N + 1 >= self.limit[slots])
        return ended_N

    def is_end(self, slots: NDArray[np.int64], token_N: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which tokens are end tokens of the model in rows that stop at them."""
        end_N: NDArray[np.bool_] = self._is_end_V[token_N] & self.stops_at_eos[slots]
        return end_N

    def _reserve_columns(self, columns: int) -> None:
        have = self._token.shape[1]
        if columns <= have:
            return
        extra = ((0, 0), (0, max(columns - have, have)))
        self._token, self._logprob = np.pad(self._token, extra), np.pad(self._logprob, extra)
        self._version = np.pad(self._version, extra)


@dataclass(eq=False, slots=True)
class StepOutput:
    """Tokens of a finished step, for the N rows that are still in the batch. top_*: (N, n) if any row needs them.

    version_N: versions of the weights that sampled. supports: as in `Completion.supports`, by index in N, for rows that
    record them.
    """

    slot_N: NDArray[np.int64]
    token_N: NDArray[np.int32]
    logp_N: NDArray[np.float32]
    version_N: NDArray[np.int64]
    supports: dict[int, bytes]
    top_token_N: NDArray[np.uint32] | None = None
    top_logp_N: NDArray[np.float32] | None = None


@dataclass(eq=False, slots=True)
class Step:
    """A launched step for N rows. known: its tokens are already on the host.

    version_N: versions of the weights that compute it. more: further tokens of the same step, in order. at_N: index of
    each row in the sampled arrays. slot_N: its current slot, -1 if it left. serial_N: its serial number.
    """

    sampled: SampledRows
    at_N: NDArray[np.int64]
    slot_N: NDArray[np.int64]
    serial_N: NDArray[np.int64]
    version_N: NDArray[np.int64]
    known: bool
    more: tuple[Step, ...] = ()

    def read(self, serial_B: NDArray[np.int64]) -> StepOutput | None:
        """Wait for the step; return the tokens of rows that are still in their slots, None if there are none."""
        sampled = self.sampled
        token_B, logp_B = np.array(sampled.token_B), np.array(sampled.logp_B)
        stays_N = (self.slot_N >= 0) & (serial_B[self.slot_N] == self.serial_N)
        if not stays_N.any():
            return None
        at_N = self.at_N[stays_N]
        supports = _supports(sampled.supports, at_N) if sampled.supports is not None else {}
        output = StepOutput(self.slot_N[stays_N], token_B[at_N], logp_B[at_N], self.version_N[stays_N], supports)
        if sampled.top_token_B_N is not None and sampled.top_logp_B_N is not None:
            output.top_token_N = np.array(sampled.top_token_B_N)[at_N]
            output.top_logp_N = np.array(sampled.top_logp_B_N)[at_N]
        return output


def _supports(supports: Supports, at_N: NDArray[np.int64]) -> dict[int, bytes]:
    """Return the supports of the rows at `at_N` without padding, by index in N."""
    token_R_K = np.array(supports.token_R_K).astype("<u4", copy=False)
    count_R = np.count_nonzero(token_R_K != PADDING, axis=-1).tolist()
    index = {at: n for n, at in enumerate(at_N.tolist())}
    recorded = enumerate(np.array(supports.row_R).tolist())
    return {index[at]: token_R_K[r, : count_R[r]].tobytes() for r, at in recorded if at in index}


MAX_WASTE = 1.0
"""The KV cache is compacted once free slots and their order have wasted this many steps' worth of computation."""


class Batch:
    """Rows that are decoded together. failed: rows that must leave, because a step could not be prepared, and why.

    Index spaces: B slots, free ones included; N rows of one step or output.
    """

    def __init__(
        self,
        make_caches: Callable[[int], RowCaches],
        end_tokens: frozenset[int],
        vocabulary: int,
        computing: Computing,
    ) -> None:
        """make_caches: returns the KV caches for a number of rows. computing: selects the adapters of the rows."""
        self._make_caches, self._computing = make_caches, computing
        self._end_tokens, self.vocabulary = end_tokens, vocabulary
        self.failed: list[tuple[Row, Exception]] = []
        self._limit = sys.maxsize
        self._empty()

    def _empty(self) -> None:
        """Begin with no slots; a step in flight holds no live row."""
        self.table = SlotTable(self._end_tokens, self.vocabulary)
        self.inflight: Step | None = None
        self._cache: RowCaches | None = None
        self._input: mx.array | None = None
        self._parameters: RowParameters | None = None
        self._seen: mx.array | None = None
        self._counts: mx.array | None = None
        self._masked: MaskedRows | None = None
        self._waste = 0.0

    @property
    def slots(self) -> int:
        """Number of slots, free ones included."""
        return len(self.table.rows)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the largest KV buffers hold."""
        return self._cache.tokens if self._cache is not None else 0

    def join(self, jobs: list[PrefillJob]) -> list[tuple[PrefillJob, Exception]]:
        """Put the admitted rows of prefilled jobs into slots, free ones first; return the jobs that failed.

        The slots of a job that failed are free and zeroed. An exception is raised if making room fails; the KV caches
        of running rows can then be incomplete.
        """
        wanted = sum(job.admitted for job in jobs)
        if self._cache is None or not self.table.running:
            self._empty()
            self.table.grow(wanted)
            self._cache = self._make_caches(wanted)
            self._cache.limit = self._limit
        prompts = [PrefilledPrompt(job.admitted, len(job.tokens) - 1, job.state, job.reserved) for job in jobs]
        if not self._cache.has_room(prompts):
            self._compact()  # the limit on the KV cache counts no free slots, so free them before columns grow
        self._grow(wanted - (self.slots - self.table.running))
        free = [slot for slot, row in enumerate(self.table.rows) if row is None]
        self._cache.make_room(self.table.positions, self.table.live, prompts)
        self._parameters = None
        failed: list[tuple[PrefillJob, Exception]] = []
        for job, prompt in zip(jobs, prompts, strict=True):
            slots, free = free[: job.admitted], free[job.admitted :]
            try:
                self._enter(slots, job, prompt)
            except Exception as error:
                self._vacate(slots)
                failed.append((job, error))
        return failed

    def _enter(self, slots: Sequence[int], job: PrefillJob, prompt: PrefilledPrompt) -> None:
        assert self._cache is not None
        self._cache.enter(slots, prompt)
        for slot, row in zip(slots, job.rows, strict=False):
            self.table.enter(slot, row, len(job.tokens) - 1, job.tokens[-1], job.reserved)

    def _vacate(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.table.rows[slot] is not None:
                self.leave(slot)
            self.clear(slot)

    def _grow(self, rows: int) -> None:
        if rows <= 0:
            return
        assert self._cache is not None
        self._cache.grow(rows)
        self.table.grow(rows)
        if self.inflight is not None and self._input is not None:
            self._input = mx.concatenate([self._input, mx.zeros((rows,), self._input.dtype)])

    def leave(self, slot: int) -> Row:
        """Free a slot and return its row with the tokens it has sampled."""
        return self.table.leave(slot)

    def record_routes(self, slot: int) -> None:
        """Give a row that will leave the routes of its tokens but the newest, if its request wants them.

        A row that was interrupted before keeps the routes that it had then, also if they were computed again.
        """
        row, table = self.table.rows[slot], self.table
        if row is None or self._cache is None or not row.active.request.record_routes:
            return
        outside = self.inflight is not None and slot not in self.inflight.slot_N  # whose column this row has too
        routes = self._cache.routes(slot, int(table.positions[slot]) + outside)
        if routes is not None:
            before, tokens = len(row.routes), len(row.active.request.prompt) + int(table.sampled[slot]) - 1
            row.routes = np.concatenate([row.routes, routes[before:tokens]]) if before else routes[:tokens]

    def limit_cache(self, tokens: int) -> None:
        """Set the number of tokens of all rows that the buffers may have room for."""
        self._limit = tokens
        if self._cache is not None:
            self._cache.limit = tokens

    def state(self, slot: int) -> PromptState | None:
        """Return a copy of the KV cache of a row; None if it is empty."""
        tokens = int(self.table.positions[slot])
        return self._cache.state(slot, tokens) if self._cache is not None and tokens else None

    def clear(self, slot: int) -> None:
        """Zero the KV cache of a slot whose values were not finite."""
        if self._cache is not None:
            self._cache.clear(slot)

    def drop(self) -> None:
        """Free the buffers. All rows have left."""
        self._empty()

    def compact(self) -> None:
        """Remove free slots and order the others once that saves as much as a copy of the KV cache costs."""
        if self._cache is None or not self.table.running:
            return
        self._waste += self._cache.waste(self.table.positions, self.table.live)
        if self._waste >= MAX_WASTE:
            self._compact()

    def _compact(self) -> None:
        """Copy the KV cache without free slots and in the best order, unless no row is live or nothing changes."""
        running, slots = self.table.running, self.slots
        if self._cache is None or not running:
            return
        keep = self._cache.ordered(np.flatnonzero(self.table.live), self.table.positions)
        if np.array_equal(keep, np.arange(slots)):
            return
        self.table.take(keep.tolist())
        self._cache.take(keep.tolist(), self.table.positions)
        moved = np.full(slots, -1, dtype=np.int64)
        moved[keep] = np.arange(running)
        if self.inflight is not None:
            if self._input is not None:
                self._input = self._input[mx.array(keep.astype(np.int32))]
            slot_N = self.inflight.slot_N
            self.inflight.slot_N = np.where(slot_N >= 0, moved[slot_N], -1)
        self._parameters, self._waste = None, 0.0

    def launch(self, version: int, *, divided: bool = False) -> Generator[None, None, Step | None]:
        """Start sampling one token for every row below its limit; None if there is no such row.

        Yields where steps of other batches can be computed; meanwhile, no row joins, moves or leaves.
        divided: whether it is worth while: see `RowCaches.parts`.
        """
        table = self.table
        due = table.live & (table.launched < table.limit)
        if self._cache is None or not due.any():
            return None
        parameters, slot = self._row_parameters(), np.flatnonzero(due)
        sampler = backend().row_sampler(parameters)
        input_B = self._inputs()
        parts = self._cache.parts(input_B, table.positions, due, divided=divided)
        with pass_context(self._computing, table.adapters() if table.adapter.any() else ()):
            next(parts)
        logits_B_V = yield from parts
        yield
        uniform_B_2 = None if parameters.all_greedy else uniforms(table.seed, table.launched)
        masks = self._masks(logits_B_V, due) if self._masked is not None else None
        if sampler is not None:
            sampled = self._sample_on_host(sampler, logits_B_V, uniform_B_2, parameters, masks)
        else:
            sampled = self._sample_on_device(logits_B_V, input_B, uniform_B_2, parameters, masks)
        table.launched[slot] += 1
        table.positions[slot] += 1
        self._input = sampled.token_B
        version_N = table.versions(slot, version)
        serial_N, known = table.serial[slot], sampler is not None
        return Step(sampled=sampled, at_N=slot, slot_N=slot, serial_N=serial_N, version_N=version_N, known=known)

    def _masks(self, logits_B_V: Logits, due: NDArray[np.bool_]) -> TokenMasks | None:
        """Start the evaluation of the logits, and compute the masks meanwhile."""
        assert self._cache is not None
        assert self._masked is not None
        if isinstance(logits_B_V, mx.array):
            mx.async_eval(logits_B_V, self._cache.arrays)
        return self._masked.at_step(due, self.table.launched, self.table.sampled_tokens)

    def _sample_on_host(
        self,
        sampler: RowSampler,
        logits_B_V: Logits,
        uniform_B_2: NDArray[np.float32] | None,
        parameters: RowParameters,
        masks: TokenMasks | None,
    ) -> SampledRows:
        """Wait for the logits and sample on the host."""
        assert self._cache is not None
        if isinstance(logits_B_V, mx.array):
            mx.async_eval(logits_B_V, self._cache.arrays)
            logits_B_V = np.array(logits_B_V.astype(mx.float32))
        sampled_R_T = []
        if parameters.count_penalties is not None:
            sampled_R_T = [self.table.sampled_tokens(slot) for slot in parameters.count_penalties.row_R.tolist()]
        return sampler(logits_B_V, uniform_B_2, parameters, sampled_R_T=sampled_R_T, masks=masks)

    def _sample_on_device(
        self,
        logits_B_V: Logits,
        input_B: mx.array,
        uniform_B_2: NDArray[np.float32] | None,
        parameters: RowParameters,
        masks: TokenMasks | None,
    ) -> SampledRows:
        """Sample in MLX, and start the evaluation of everything that the step writes."""
        assert self._cache is not None
        written = list(self._cache.arrays)
        if self._seen is not None:
            self._seen[mx.arange(self.slots), input_B] = True
            written.append(self._seen)
        if parameters.count_penalties is not None and self._counts is not None:
            row_R = parameters.count_penalties.row_R
            is_sampled_R = mx.array(self.table.launched[row_R] > 0)  # the first input is a token of the prompt
            input_R = input_B[mx.array(row_R)]
            self._counts = self._counts.at[mx.arange(len(row_R)), input_R].add(is_sampled_R)
            written.append(self._counts)
        uniform = None if uniform_B_2 is None else mx.array(uniform_B_2)
        sampled = sample(mx.array(logits_B_V), uniform, parameters, self._seen, count_R_V=self._counts, masks=masks)
        mx.async_eval([a for a in sampled if a is not None], written)
        return sampled

    def _inputs(self) -> mx.array:
        """Return each row's newest token: as it has been read, or of the step in flight."""
        table = self.table
        if self.inflight is None or self._input is None:
            return mx.array(table.newest)
        is_read_B = table.live & (table.launched == table.sampled)
        if not is_read_B.any():
            return self._input
        return mx.where(mx.array(is_read_B), mx.array(table.newest), self._input)

    def _row_parameters(self) -> RowParameters:
        """Return the parameters of the present rows, rebuilt when rows have joined or moved."""
        if self._parameters is None:
            rows = self.table.rows
            recorded = [slot for slot, row in enumerate(rows) if row is not None and row.active.request.record_support]
            settings = [row.active.request.sampling if row is not None else None for row in rows]
            self._parameters = row_parameters(settings, self.vocabulary, recorded=recorded)
            self._seen = self._seen_tokens() if self._parameters.penalty_B is not None else None
            on_host = backend().row_sampler(self._parameters) is not None
            penalties = None if on_host else self._parameters.count_penalties
            self._counts = self._sampled_counts(penalties) if penalties is not None else None
            masked = any(row is not None and row.is_masked for row in rows)
            self._masked = MaskedRows(rows, self._end_tokens, self.vocabulary, self.failed) if masked else None
        return self._parameters

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step depends on the tokens of the step in flight, which must be read first."""
        parameters = self._row_parameters()
        counts_on_host = parameters.count_penalties is not None and backend().row_sampler(parameters) is not None
        return counts_on_host or (self._masked is not None and self._masked.needs_tokens)

    def _seen_tokens(self) -> mx.array:
        """Mark the tokens of rows with a repetition penalty, except the newest, which each step adds itself."""
        seen_B_V = np.zeros((self.slots, self.vocabulary), dtype=np.bool_)
        for slot, row in enumerate(self.table.rows):
            if row is not None and row.active.request.sampling.repetition_penalty != 1.0:
                seen_B_V[slot, list(row.active.request.prompt)] = True
                seen_B_V[slot, self.table.sampled_tokens(slot)] = True
        return mx.array(seen_B_V)

    def _sampled_counts(self, penalties: CountPenalties) -> mx.array:
        """Count the sampled tokens of rows with such a penalty, (R, V), but the newest, which the next step adds."""
        count_R_V = np.zeros((len(penalties.row_R), self.vocabulary), dtype=np.float32)
        for count_V, slot in zip(count_R_V, penalties.row_R.tolist(), strict=True):
            before = max(0, int(self.table.launched[slot]) - 1)
            np.add.at(count_V, self.table.sampled_tokens(slot)[:before], 1)
        return mx.array(count_R_V)
