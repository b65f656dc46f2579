"""A running batch that verifies drafts: one forward pass samples several tokens of a row.

Verification is rejection sampling with a deterministic proposal (Leviathan et al., arXiv:2211.17192). A draft token x
is accepted with probability p(x), and a rejected one is replaced by a sample of p without x, where p is the sampling
distribution of the row after penalties, temperature and filters. Both come from one sample y of p with the random
numbers that plain decoding uses at this position: x is accepted if y = x, which has probability p(x), and otherwise y
has the distribution of p without x. A draft model samples with the same random numbers; then x depends on them, and y
is a sample of p all the same. The tokens of a row are therefore those of plain decoding with the same seed, up to
the rounding of matrix products of other shapes, whatever the drafts are. Log-probabilities are those of p.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.speculation.draft_model import ModelDrafter
from attachments.speculation.drafts import Drafted, Drafter, HistoryDrafter, PromptLookupDrafter
from attachments.speculation.sections import SPECULATION, Drafts, HistoryDrafts, ModelDrafts
from attachments.speculation.verification import VerifyingCaches, VerifyingKVCache
from clotho.backend import backend
from clotho.inference.batch import Batch, Step
from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout, Computing, Logits
from clotho.inference.parts import Batches, MakeCaches
from clotho.inference.prefill import RowDecoder
from clotho.inference.rows import DraftedTokens, Filters, RowLogitBias, RowParameters, SampledRows
from clotho.inference.sampling import sample, uniforms
from clotho.inference.scheduler import PrefillJob, Row
from clotho.models.loading import load_base, vocabulary_size
from clotho.settings.bounds import Off
from clotho.settings.engine import EngineSection
from clotho.settings.model import ModelSection
from protocols.compute import SpeculationCounts
from protocols.errors import ModelError

MAX_PAUSE = 16
"""After steps without any draft, so many steps at most do not look for drafts, so that a GPU need not wait for the
tokens of each step."""


class SpeculativeBatches(Batches):
    """Makes batches that verify drafts, from a source of drafts that both share."""

    def __init__(self, settings: EngineSection) -> None:
        """settings: with a source of drafts."""
        self._settings = settings
        self._long: SpeculativeBatch | None = None

    @property
    def counts(self) -> SpeculationCounts:
        """Drafts and their accepted tokens of both batches."""
        return SpeculationCounts() if self._long is None else self._long.counts

    def caches(self, layout: CacheLayout, decoder: RowDecoder | None, limit: int) -> MakeCaches:
        """Return what makes KV caches that can verify drafts; see `verifying_caches`."""
        return verifying_caches(layout, decoder, limit)

    def pair(
        self, make_caches: MakeCaches, end_tokens: frozenset[int], vocabulary: int, computing: Computing
    ) -> tuple[Batch, Batch]:
        """Return empty batches. Raises ModelError for a draft model that cannot be loaded or has another vocabulary."""
        common = make_caches, end_tokens, vocabulary, computing
        short = SpeculativeBatch(*common, settings=self._settings)
        self._long = SpeculativeBatch(*common, settings=self._settings, beside=short)
        return short, self._long

    def finished(self, row: Row) -> None:
        """Show a completion to the source of drafts."""
        if self._long is not None:
            self._long.drafter.finished(row)


class SpeculativeBatch(Batch):
    """Rows that are decoded together, with drafts where the source has some.

    Rows with a constraint, excluded tokens or a minimum length take part without a draft. While a row with a
    repetition, presence or frequency penalty runs, no row has a draft: these change with every token.
    On a GPU, a step with drafts waits for the tokens of the previous step.
    """

    def __init__(
        self,
        make_caches: MakeCaches,
        end_tokens: frozenset[int],
        vocabulary: int,
        computing: Computing,
        *,
        settings: EngineSection,
        beside: SpeculativeBatch | None = None,
    ) -> None:
        """Arguments are those of `Batch`; make_caches: as `verifying_caches` returns it.

        settings: with a source of drafts. beside: shares its drafts with this one.

        Raises ModelError for a draft model that cannot be loaded or has another vocabulary.
        """
        super().__init__(make_caches, end_tokens, vocabulary, computing)
        drafts = SPECULATION.of(settings)
        if isinstance(drafts, Off):
            raise ValueError("speculation is off")
        self._beside = beside
        self.drafter: Drafter = (
            make_drafter(drafts, vocabulary, settings.kv_cache_tokens) if beside is None else beside.drafter.beside()
        )
        self._max_draft = drafts.max_draft
        self._passes = self._drafts = self._draft_tokens = 0
        self._accepted = np.zeros(drafts.max_draft, dtype=np.int64)
        self._fruitless = self._pause = 0

    @property
    def counts(self) -> SpeculationCounts:
        """Drafts and their tokens since the engine was created, with those of the batch beside this one."""
        batches = [self] if self._beside is None else [self, self._beside]
        return SpeculationCounts(
            passes=sum(batch._passes for batch in batches),
            drafts=sum(batch._drafts for batch in batches),
            draft_tokens=sum(batch._draft_tokens for batch in batches),
            accepted_by_position=tuple(np.sum([batch._accepted for batch in batches], axis=0).tolist()),
        )

    def leave(self, slot: int) -> Row:
        """Free a slot and return its row with the tokens it has sampled."""
        row = super().leave(slot)
        self.drafter.left(row)
        return row

    def join(self, jobs: list[PrefillJob]) -> list[tuple[PrefillJob, Exception]]:
        """Put the admitted rows of prefilled jobs into slots; new rows are asked for drafts at once."""
        self._fruitless = self._pause = 0
        return super().join(jobs)

    def drop(self) -> None:
        """Free the buffers, and forget rows that are still in slots."""
        for row in self.table.rows:
            if row is not None:
                self.drafter.left(row)
        super().drop()

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step depends on the tokens of the step in flight, which must be read first."""
        return super().needs_tokens or self._speculates

    @property
    def _speculates(self) -> bool:
        parameters = self._row_parameters()
        penalised = parameters.penalty_B is not None or parameters.count_penalties is not None
        return not penalised and not self._pause

    def launch(self, version: int, *, divided: bool = False) -> Generator[None, None, Step | None]:
        """Start sampling for every row below its limit: one token, or as many as its draft allows.

        A verification is not divided.
        """
        table = self.table
        due = table.live & (table.launched < table.limit)
        if self._cache is None or not due.any():
            return None
        self._passes += int(np.count_nonzero(due))
        if not self._speculates:
            self._pause = max(0, self._pause - 1)
            return (yield from super().launch(version, divided=divided))
        cache: VerifyingCaches = self._cache  # type: ignore[assignment]
        drafts = self._propose(due)
        self._fruitless = 0 if drafts else self._fruitless + 1
        self._pause = min(self._fruitless, MAX_PAUSE)
        if not drafts and not cache.is_lagging:
            return (yield from super().launch(version, divided=divided))
        return self._verify(cache, due, drafts, version)

    def _propose(self, due: NDArray[np.bool_]) -> dict[int, Sequence[int]]:
        """Return the drafts of the rows by slot, none beyond a token that ends its row.

        A row samples one token more than its draft has.
        """
        table, rows = self.table, []
        room = np.minimum(table.limit - table.launched - 1, self._max_draft)
        for slot in np.flatnonzero(due & (room > 0)).tolist():
            row = table.rows[slot]
            if row is not None and not row.is_masked:
                rows.append(Drafted(slot, row, table.sampled_tokens(slot), int(room[slot])))
        drafts = self.drafter.propose(rows)
        for slot, row, _, _ in rows:
            ends = {*row.active.request.sampling.stop_token_ids}
            if table.stops_at_eos[slot]:
                ends |= self._end_tokens
            draft = drafts.get(slot, ())
            if not ends.isdisjoint(draft):
                drafts[slot] = draft[: 1 + next(i for i, token in enumerate(draft) if token in ends)]
        return drafts

    def _verify(
        self, cache: VerifyingCaches, due: NDArray[np.bool_], drafts: dict[int, Sequence[int]], version: int
    ) -> Step:
        """Sample after every token of the drafts, and keep the tokens up to the first that differs from its draft."""
        table = self.table
        tokens = DraftedTokens.of(table.newest.copy(), drafts)
        with self._computing_tokens(cache, tokens):
            logits_N_V = cache.verify(tokens, table.positions, due)
        sampled = self._sample_tokens(cache, logits_N_V, tokens, due)
        token_N, first_B = np.array(sampled.token_B), tokens.first_B
        kept_B = np.where(due, 1 + accepted_tokens(tokens, token_N), 0)
        cache.keep(kept_B)
        table.launched += kept_B
        table.positions += kept_B.astype(table.positions.dtype)
        self._count(tokens, kept_B)
        parts = []
        for index in range(int(kept_B.max())):
            slot = np.flatnonzero(kept_B > index)
            version_N, serial_N = table.versions(slot, version), table.serial[slot]
            at_N = first_B[slot] + index
            parts.append(
                Step(sampled=sampled, at_N=at_N, slot_N=slot, serial_N=serial_N, version_N=version_N, known=True)
            )
        parts[0].more = tuple(parts[1:])
        return parts[0]

    def _computing_tokens(self, cache: VerifyingCaches, tokens: DraftedTokens) -> AbstractContextManager[None]:
        """Return the context in which every token is computed with the adapter of its row."""
        if not self.table.adapter.any():
            return nullcontext()
        adapter_B = self.table.adapters()
        if cache.computes_tokens_as_rows:
            return self._computing([adapter_B[row] for row in tokens.row_N.tolist()])
        return self._computing(adapter_B)

    def _sample_tokens(
        self, cache: VerifyingCaches, logits_N_V: Logits, tokens: DraftedTokens, due: NDArray[np.bool_]
    ) -> SampledRows:
        """Sample after every token as plain decoding would if the draft had been sampled; the result is evaluated."""
        table, parameters = self.table, token_parameters(self._row_parameters(), tokens.row_N)
        position_N = table.launched[tokens.row_N] + tokens.index_N
        uniform_N_2 = None if parameters.all_greedy else uniforms(table.seed[tokens.row_N], position_N)
        masks = self._masks(logits_N_V, due) if self._masked is not None else None
        if masks is not None:
            masks = masks._replace(row_R=tokens.first_B[masks.row_R].astype(np.int32))
        sampler = backend().row_sampler(parameters)
        if sampler is not None:
            if isinstance(logits_N_V, mx.array):
                mx.eval(logits_N_V, cache.arrays)
                logits_N_V = np.array(logits_N_V.astype(mx.float32))
            return sampler(logits_N_V, uniform_N_2, parameters, masks=masks)
        uniform = None if uniform_N_2 is None else mx.array(uniform_N_2)
        sampled = sample(mx.array(logits_N_V), uniform, parameters, None, masks=masks)
        mx.eval([a for a in sampled if a is not None], cache.arrays)
        return sampled

    def _count(self, tokens: DraftedTokens, kept_B: NDArray[np.int64]) -> None:
        drafted_B = tokens.length_B - 1
        self._drafts += int(np.count_nonzero(drafted_B))
        self._draft_tokens += int(drafted_B.sum())
        accepted_B = kept_B[drafted_B > 0] - 1
        self._accepted += np.count_nonzero(accepted_B[:, None] > np.arange(self._max_draft), axis=0)


def accepted_tokens(tokens: DraftedTokens, token_N: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return how many tokens of each draft equal what was sampled in their place, up to the first that does not."""
    sampled_B_T, given_B_T = tokens.padded(token_N), tokens.padded(tokens.token_N)
    accepted_B: NDArray[np.int64] = np.cumprod(sampled_B_T[:, :-1] == given_B_T[:, 1:], axis=1).sum(axis=1)
    return accepted_B


def token_parameters(parameters: RowParameters, row_N: NDArray[np.int64]) -> RowParameters:
    """Return the sampling parameters of the tokens of a verification: those of their rows. Rows have no penalties."""
    filters, alternatives, recording, bias = (
        parameters.filters,
        parameters.alternatives,
        parameters.recording,
        parameters.bias,
    )
    if filters is not None:
        index_R, place_R = _tokens_of(filters.row_R, row_N)
        filters = Filters(index_R, *(_taken(values, place_R) for values in filters[1:]))
    if alternatives is not None:
        alternatives = alternatives._replace(row_R=_tokens_of(alternatives.row_R, row_N)[0])
    if recording is not None:
        recording = recording._replace(row_R=_tokens_of(recording.row_R, row_N)[0])
    if bias is not None:
        bias = RowLogitBias(_taken(bias.token_B_K, row_N), _taken(bias.value_B_K, row_N))
    greedy, inverse_temperature = parameters.greedy_B, parameters.inverse_temperature_B
    return RowParameters(
        all_greedy=parameters.all_greedy,
        greedy_B=None if greedy is None else _taken(greedy, row_N),
        inverse_temperature_B=None if inverse_temperature is None else _taken(inverse_temperature, row_N),
        filters=filters,
        bias=bias,
        alternatives=alternatives,
        recording=recording,
    )


def _taken(values: mx.array, index_N: NDArray[np.int64]) -> mx.array:
    return mx.array(np.array(values)[index_N])


def _tokens_of(row_R: mx.array, row_N: NDArray[np.int64]) -> tuple[mx.array, NDArray[np.int64]]:
    """Return the tokens whose row is one of `row_R`, and the index of the row in `row_R` for each."""
    rows = np.array(row_R)
    place_B = np.full(max(int(row_N.max()), int(rows.max())) + 1, -1, dtype=np.int64)
    place_B[rows] = np.arange(len(rows))
    index_R = np.flatnonzero(place_B[row_N] >= 0)
    return mx.array(index_R.astype(np.int32)), place_B[row_N][index_R]


def make_drafter(settings: Drafts, vocabulary: int, cache_tokens: int) -> Drafter:
    """Return the source of drafts. vocabulary: width of the policy's logits. cache_tokens: `engine.kv_cache_tokens`."""
    if isinstance(settings, HistoryDrafts):
        return HistoryDrafter(settings.stored_tokens)
    if not isinstance(settings, ModelDrafts):
        return PromptLookupDrafter()
    model, config, _ = load_base(ModelSection(path=settings.path))
    width = vocabulary_size(config)
    if width != vocabulary:
        raise ModelError(
            f"engine.speculation.path: the draft model {settings.path} has {width} tokens and the policy {vocabulary}; "
            "give a model with the same tokenizer"
        )
    model.eval()
    layout = CacheLayout(model)
    probe_batching(layout)
    make_caches = verifying_caches(layout, backend().row_decoder(model), cache_tokens)
    return ModelDrafter(layout, make_caches, vocabulary=vocabulary, max_draft=settings.max_draft)


def verifying_caches(layout: CacheLayout, decoder: RowDecoder | None, limit: int) -> Callable[[int], VerifyingCaches]:
    """Return what makes the KV caches of a number of rows. limit: maximum number of tokens of all rows.

    Raises ModelError for a model with a sliding window or a fixed-size state, which rejected tokens cannot leave.
    """
    if layout.right_padding_limit is not None:
        raise ModelError(
            "engine.speculation: this model has layers with a sliding window or a fixed-size state, which cannot "
            "discard rejected tokens; set engine.speculation.type to off"
        )
    if decoder is None:
        return lambda rows: VerifyingKVCache(layout, rows, limit)
    return cast("Callable[[int], VerifyingCaches]", decoder.caches)
