"""Shared prefix layout: a prompt goes through the blocks once, however many completions it has.

Pass 1 computes the prompts; its keys and values stay nodes of the graph. Pass 2 computes the completions, each of which
attends to the keys and values of its prompt. Gradients flow through them into pass 1, where those of all completions
of a prompt add up: they are those of the plain way, for P + G * C instead of G * (P + C) tokens (prompt P, G
completions of length C).

Completions of like lengths go through the blocks together, the others in passes of their own: less padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.head import SplitModel
from clotho.models.layer_keys import AttentionLayers, KeysAndValues, LayerKeys, visible
from clotho.scoring.layouts.packing import bucket

PASS = 256
"""Positions that a further pass over the blocks must save: it has a price of its own, on a GPU as on the CPU."""


class Stretch(NamedTuple):
    """Rows, ascending, that go through the blocks in one pass, and how many columns of each."""

    rows: NDArray[np.intp]
    columns: int

    @property
    def positions(self) -> int:
        """What the blocks compute, padding included."""
        return len(self.rows) * self.columns


def stretches(length_B: NDArray[np.int32]) -> list[Stretch]:
    """Cut rows, by length, where that leaves the fewest positions to compute, `PASS` for each pass counted in."""
    width_B = np.array([bucket(int(length)) for length in length_B], dtype=np.int64)
    widths = sorted(set(width_B.tolist()))
    counts = [int((width_B == width).sum()) for width in widths]
    costs, starts = (
        [0],
        list[int](),
    )  # of the rows of the first so many widths: the least, and where its last pass began
    for end, width in enumerate(widths, 1):
        options = [costs[start] + sum(counts[start:end]) * width + PASS for start in range(end)]
        starts.append(options.index(min(options)))
        costs.append(min(options))
    cut: list[Stretch] = []
    end = len(widths)
    while end:
        start = starts[end - 1]
        cut.append(Stretch(np.flatnonzero(np.isin(width_B, widths[start:end])), widths[end - 1]))
        end = start
    return cut


class SharedInputs(NamedTuple):
    """Prompts and completions, padded with 0 on the right; completions without their last token.

    tokens_F_P, length_F: prompts, each once. tokens_B_C: completions of two tokens or more; those of one token read
    nothing beyond their prompt, and may be all there are (B = 0). prompt_B: the row of their prompt, ascending.
    length_B: tokens that they read.
    """

    tokens_F_P: NDArray[np.int32]
    length_F: NDArray[np.int32]
    tokens_B_C: NDArray[np.int32]
    prompt_B: NDArray[np.int32]
    length_B: NDArray[np.int32]

    def along(self, stretch: Stretch) -> SharedInputs:
        """Some of the completions, and no more columns than they need."""
        return self._replace(
            tokens_B_C=self.tokens_B_C[stretch.rows, : stretch.columns],
            prompt_B=self.prompt_B[stretch.rows],
            length_B=self.length_B[stretch.rows],
        )


class CompletionKeys(LayerKeys):
    """Keys of completions: a query sees those of its prompt, and its own completion up to itself."""

    def __init__(self, prompts: LayerKeys, inputs: SharedInputs, layers: AttentionLayers) -> None:
        self.held = prompts.held
        self.offset = mx.array(inputs.length_F[inputs.prompt_B])
        self._prompt_B = inputs.prompt_B
        self._padded_prompt = inputs.tokens_F_P.shape[1]
        self._layers = layers

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Return keys and values of prompt and completion, (B, heads, P + C, size)."""
        held = [_spread(array, self._prompt_B) for array in self.held]
        self.held = tuple(mx.concatenate([old, new], axis=2) for old, new in zip(held, (keys, values), strict=True))
        return self.held

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which keys each token of a completion sees: not the padding of its prompt, nor beyond the window."""
        length_B_1_1 = mx.array(self.offset)[:, None, None]
        column_P, column_C = mx.arange(self._padded_prompt), mx.arange(tokens)
        of_prompt_B_C_P = visible(length_B_1_1 + column_C[:, None] - column_P, window_size) & (column_P < length_B_1_1)
        own_C_C = visible(column_C[:, None] - column_C, window_size)
        own_B_C_C = mx.broadcast_to(own_C_C, (len(self._prompt_B), tokens, tokens))
        return self._layers.mask(mx.concatenate([of_prompt_B_C_P, own_B_C_C], axis=-1))


def shared_states(split: SplitModel, layers: AttentionLayers, inputs: SharedInputs) -> mx.array:
    """Hidden states of all positions of the prompts, then of the completions: (F * P + B * C, D)."""
    prompts = [LayerKeys() for _ in range(layers.caches)]
    hidden_F_P_D = split.blocks(mx.array(inputs.tokens_F_P), prompts)
    D = hidden_F_P_D.shape[-1]
    if not inputs.tokens_B_C.size:
        return hidden_F_P_D.reshape(-1, D)
    hidden_B_C_D = _completion_states(split, layers, prompts, inputs)
    return mx.concatenate([hidden_F_P_D.reshape(-1, D), hidden_B_C_D.reshape(-1, D)])


def _completion_states(
    split: SplitModel, layers: AttentionLayers, prompts: Sequence[LayerKeys], inputs: SharedInputs
) -> mx.array:
    """Hidden states of completions, (B, C, D), stretch by stretch; 0 beyond the columns of a stretch."""
    cut = stretches(inputs.length_B)
    C = inputs.tokens_B_C.shape[1]
    parts = []
    for stretch in cut:
        own = inputs.along(stretch)
        hidden = split.blocks(mx.array(own.tokens_B_C), [CompletionKeys(keys, own, layers) for keys in prompts])
        parts.append(mx.pad(hidden, [(0, 0), (0, C - stretch.columns), (0, 0)]))
    if len(parts) == 1:
        return parts[0]
    place_B = np.argsort(np.concatenate([stretch.rows for stretch in cut]))
    return mx.concatenate(parts)[mx.array(place_B.astype(np.int32))]


def _spread(array_F: mx.array, prompt_B: NDArray[np.int32]) -> mx.array:
    """Give every completion the array of its prompt; where all have as many, without a scatter on the way back."""
    count_F = np.bincount(prompt_B, minlength=array_F.shape[0])
    if (count_F == count_F[0]).all():
        return mx.repeat(array_F, int(count_F[0]), axis=0)
    return array_F[mx.array(prompt_B)]
