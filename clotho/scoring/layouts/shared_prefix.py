"""Shared prefix layout: the prompt of several completions goes through the blocks once.

Pass 1 computes the prompts; their keys and values, and the states of recurrent layers, stay nodes of the graph. Pass 2
computes the completions, each of which attends to the keys and values of its prompt. Gradients flow through them into
pass 1, where those of all completions of a prompt add up. The gradients equal those of padded rows, for P + G * C
instead of G * (P + C) tokens (prompt P, G completions of length C).

Completions of similar length share a pass over the blocks. Other lengths have separate passes, which saves padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from clotho.models.attention import (
    AttentionLayers,
    KeysAndValues,
    LayerCaches,
    LayerKeys,
    LayerState,
    layer_caches,
)
from clotho.models.blocked_attention import VisibleKeys
from clotho.models.head import Blocks
from clotho.scoring.layouts.rows import Placement, bucket
from clotho.scoring.sequences import TrainingSequence

PASS_COST = 256
"""Number of positions that another pass over the blocks must save."""


class PrefixSegment(NamedTuple):
    """Rows, ascending, that go through the blocks in one pass, and their number of columns."""

    rows: NDArray[np.intp]
    columns: int

    @property
    def positions(self) -> int:
        """Number of positions that the blocks compute, padding included."""
        return len(self.rows) * self.columns


def segments(length_B: NDArray[np.int32]) -> list[PrefixSegment]:
    """Group rows by length so that the number of positions plus `PASS_COST` per pass is minimal."""
    width_B = np.array([bucket(int(length)) for length in length_B], dtype=np.int64)
    widths = sorted(set(width_B.tolist()))
    counts = [int((width_B == width).sum()) for width in widths]
    costs, starts = [0], list[int]()  # minimum cost of the first n widths, and the first width of the last pass
    for end, width in enumerate(widths, 1):
        options = [costs[start] + sum(counts[start:end]) * width + PASS_COST for start in range(end)]
        starts.append(options.index(min(options)))
        costs.append(min(options))
    segments_found: list[PrefixSegment] = []
    end = len(widths)
    while end:
        start = starts[end - 1]
        segments_found.append(PrefixSegment(np.flatnonzero(np.isin(width_B, widths[start:end])), widths[end - 1]))
        end = start
    return segments_found


class SharedInputs(NamedTuple):
    """Prompts and completions, padded with 0 on the right; completions without their last token.

    tokens_F_P, length_F: prompts, each once. tokens_B_C: completions of at least two tokens; completions of one token
    need no further positions, so B can be 0. prompt_B: row of the prompt of each completion, ascending. length_B:
    number of tokens that each completion reads.
    """

    tokens_F_P: NDArray[np.int32]
    length_F: NDArray[np.int32]
    tokens_B_C: NDArray[np.int32]
    prompt_B: NDArray[np.int32]
    length_B: NDArray[np.int32]

    def segment(self, segment: PrefixSegment) -> SharedInputs:
        """Return the completions of a segment with the columns that they need."""
        return self._replace(
            tokens_B_C=self.tokens_B_C[segment.rows, : segment.columns],
            prompt_B=self.prompt_B[segment.rows],
            length_B=self.length_B[segment.rows],
        )


PADDING = np.int32(2**31 - 1)
"""Position of keys that nothing attends to."""


class CompletionKeys(LayerKeys):
    """Keys of completions: a query attends to its prompt, and to its own completion up to itself."""

    def __init__(self, prompts: LayerKeys, inputs: SharedInputs, layers: AttentionLayers) -> None:
        super().__init__(layers)
        self.held = prompts.held
        self._length_B = inputs.length_F[inputs.prompt_B]
        self.offset = mx.array(self._length_B)
        self._prompt_B = inputs.prompt_B
        self._padded_prompt = inputs.tokens_F_P.shape[1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Return keys and values of prompt and completion, (B, heads, P + C, size)."""
        held = [_spread(array, self._prompt_B) for array in self.held]
        self.held = tuple(mx.concatenate([old, new], axis=2) for old, new in zip(held, (keys, values), strict=True))
        return self.held

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | VisibleKeys:
        """Return which keys each token attends to: not the padding of the prompt, and only inside the window."""
        length_B_1 = self._length_B[:, None]
        column_P, column_C = (np.arange(columns, dtype=np.int32) for columns in (self._padded_prompt, tokens))
        prompt_B_P = np.where(column_P < length_B_1, column_P, PADDING)
        own_B_C = length_B_1 + column_C
        keys_B_S = np.concatenate([prompt_B_P, own_B_C], axis=1)
        return self._layers.mask(VisibleKeys(own_B_C, keys_B_S, window_size=window_size))


def shared_states(blocks: Blocks, layers: AttentionLayers, inputs: SharedInputs) -> mx.array:
    """Compute the hidden states of the prompts, then of the completions, (F * P + B * C, D)."""
    prompts = layer_caches(layers, mx.array(inputs.length_F))
    hidden_F_P_D = blocks(mx.array(inputs.tokens_F_P), prompts)
    D = hidden_F_P_D.shape[-1]
    if not inputs.tokens_B_C.size:
        return hidden_F_P_D.reshape(-1, D)
    hidden_B_C_D = _completion_states(blocks, layers, prompts, inputs)
    return mx.concatenate([hidden_F_P_D.reshape(-1, D), hidden_B_C_D.reshape(-1, D)])


def _completion_states(blocks: Blocks, layers: AttentionLayers, prompts: LayerCaches, inputs: SharedInputs) -> mx.array:
    """Compute the hidden states of completions, (B, C, D), by segment; 0 beyond the columns of a segment."""
    segments_found = segments(inputs.length_B)
    C = inputs.tokens_B_C.shape[1]
    parts = []
    for segment in segments_found:
        own = inputs.segment(segment)
        caches = tree_map(partial(_continued, inputs=own, layers=layers), prompts)
        hidden = blocks(mx.array(own.tokens_B_C), caches)
        parts.append(mx.pad(hidden, [(0, 0), (0, C - segment.columns), (0, 0)]))
    if len(parts) == 1:
        return parts[0]
    place_B = np.argsort(np.concatenate([segment.rows for segment in segments_found]))
    return mx.concatenate(parts)[mx.array(place_B.astype(np.int32))]


def _continued(prompts: LayerKeys, inputs: SharedInputs, layers: AttentionLayers) -> LayerKeys:
    """Return what replaces the cache of a layer while completions go through it, after their prompts."""
    if not isinstance(prompts, LayerState):
        return CompletionKeys(prompts, inputs, layers)
    return LayerState(len(prompts.held)).holding(tuple(_spread(array, inputs.prompt_B) for array in prompts.held))


def _spread(array_F: mx.array, prompt_B: NDArray[np.int32]) -> mx.array:
    """Return the array of its prompt for every completion; equal counts avoid a scatter in the backward pass."""
    count_F = np.bincount(prompt_B, minlength=array_F.shape[0])
    if (count_F == count_F[0]).all():
        return mx.repeat(array_F, int(count_F[0]), axis=0)
    return array_F[mx.array(prompt_B)]


KEYS_PER_TOKEN = 8
"""Maximum number of keys, counted per completion, that the completions of a micro-batch attend to, per budgeted token.

A key needs much less memory than a token, but a long prompt has one copy of its keys per completion.
"""


class PromptGroup(NamedTuple):
    """Sequences with the same prompt, longest first. prompt, completion: maximum lengths in both passes, in buckets.

    rows: number of completions of at least two tokens, which are those with inputs.
    """

    members: tuple[int, ...]
    prompt: int
    completion: int
    rows: int


def place_shared(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Put the sequences, longest first, into micro-batches of at most `budget` positions in both passes together.

    Their completions attend to at most `KEYS_PER_TOKEN` times as many keys. Sequences with the same prompt stay
    together unless they exceed the budget; then their prompt is computed once per micro-batch. Prompt groups are
    sorted by the length of completions or of prompts, whichever needs less padding.
    """
    groups = [part for group in _prompt_groups(sequences, order) for part in _split_to_budget(sequences, group, budget)]
    candidates = [
        _split_into_batches(sorted(groups, key=lambda group: (-group.completion, -group.prompt)), budget),
        _split_into_batches(sorted(groups, key=lambda group: (-group.prompt, -group.completion)), budget),
    ]
    for part in min(candidates, key=lambda candidate: sum(map(_tokens, candidate))):
        yield _placed(sequences, part)


def _prompt_groups(sequences: Sequence[TrainingSequence], order: Sequence[int]) -> list[PromptGroup]:
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for member in order:
        by_prompt.setdefault(sequences[member].prompt, []).append(member)
    return [_prompt_group(sequences, members) for members in by_prompt.values()]


def _prompt_group(sequences: Sequence[TrainingSequence], members: Sequence[int]) -> PromptGroup:
    first = sequences[members[0]]
    longer = sum(len(sequences[member].tokens) > 1 for member in members)
    return PromptGroup(
        tuple(members), bucket(len(first.prompt)), bucket(len(first.tokens) - 1) if longer else 0, longer
    )


def _split_to_budget(sequences: Sequence[TrainingSequence], group: PromptGroup, budget: int) -> list[PromptGroup]:
    """Split a prompt group that exceeds the budget into parts that fit, of at least one row each."""
    if _within_budget([group], budget):
        return [group]
    by_tokens = (budget - group.prompt) // max(1, group.completion)
    rows = max(1, min(by_tokens, KEYS_PER_TOKEN * budget // (group.prompt + group.completion)))
    longer, short = group.members[: group.rows], group.members[group.rows :]
    parts = [longer[start : start + rows] for start in range(0, len(longer), rows)] or [()]
    return [_prompt_group(sequences, part) for part in [*parts[:-1], parts[-1] + short]]


def _split_into_batches(groups: Sequence[PromptGroup], budget: int) -> list[list[PromptGroup]]:
    """Split prompt groups into runs that fit the budget."""
    runs: list[list[PromptGroup]] = [[]]
    for group in groups:
        if runs[-1] and not _within_budget([*runs[-1], group], budget):
            runs.append([])
        runs[-1].append(group)
    return runs


def _longest(groups: Sequence[PromptGroup]) -> tuple[int, int]:
    return max(group.prompt for group in groups), max(group.completion for group in groups)


def _tokens(groups: Sequence[PromptGroup]) -> int:
    """Return the number of positions of both passes, padding included."""
    P, C = _longest(groups)
    return len(groups) * P + sum(group.rows for group in groups) * C


def _within_budget(groups: Sequence[PromptGroup], budget: int) -> bool:
    keys = sum(group.rows for group in groups) * sum(_longest(groups))
    return _tokens(groups) <= budget and keys <= KEYS_PER_TOKEN * budget


def _placed(sequences: Sequence[TrainingSequence], groups: Sequence[PromptGroup]) -> Placement:
    P, C = _longest(groups)
    members = tuple(member for group in groups for member in group.members)
    rows = sum(group.rows for group in groups)
    inputs = SharedInputs(
        tokens_F_P=np.zeros((len(groups), P), dtype=np.int32),
        length_F=np.zeros(len(groups), dtype=np.int32),
        tokens_B_C=np.zeros((rows, C), dtype=np.int32),
        prompt_B=np.repeat(np.arange(len(groups), dtype=np.int32), [group.rows for group in groups]),
        length_B=np.zeros(rows, dtype=np.int32),
    )
    positions = []
    row = 0
    for f, group in enumerate(groups):
        prompt = sequences[group.members[0]].prompt
        inputs.tokens_F_P[f, : len(prompt)] = prompt
        inputs.length_F[f] = len(prompt)
        for member in group.members:
            read = sequences[member].tokens[:-1]
            inputs.tokens_B_C[row : row + 1, : len(read)] = read
            inputs.length_B[row : row + 1] = len(read)
            first = len(groups) * P + row * C
            own = np.arange(first, first + len(read), dtype=np.int32)
            positions.append(np.concatenate([[f * P + len(prompt) - 1], own], dtype=np.int32))
            row += bool(read)
    computed = inputs.tokens_F_P.size + sum(segment.positions for segment in segments(inputs.length_B))
    return Placement(members, inputs, positions, computed)
