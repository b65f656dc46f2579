"""Split a language model into its blocks and its head, so that the head computes chosen positions only.

Every model of mlx-lm ends in `head(blocks(tokens))`, with differences in the head (tied embeddings, soft caps, scales).
The model's own code computes the head: for one call, an object that returns the known hidden states replaces the
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from clotho.models.module_calls import watched_calls
from clotho.models.parameters import flat, nested


class _KnownOutput:
    """Replaces the blocks: a call returns known hidden states; every other attribute is that of the blocks.

    borrowed: names of attributes of the blocks that the head used, such as tied embeddings.
    """

    def __init__(self, blocks: nn.Module, output: mx.array) -> None:
        self._blocks, self._output = blocks, output
        self.borrowed: set[str] = set()

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._output

    def __getattr__(self, name: str) -> Any:
        self.borrowed.add(name)
        return getattr(self._blocks, name)

    def __getitem__(self, name: str) -> Any:
        self.borrowed.add(name)
        return self._blocks[name]


Blocks = Callable[[mx.array, Sequence[Any] | None], mx.array]
"""blocks(right-padded tokens (B, S), caches of mlx-lm or what replaces them) -> hidden states (B, S, D)."""


class SplitModel:
    """A model in two parts: `blocks` computes hidden states, and `head` computes logits from hidden states."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self._owner = owner
        self._name = name
        self._borrowed: set[str] = set()

    def blocks(self, tokens_B_S: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Compute hidden states (B, S, D) of right-padded tokens (B, S), in the model's type. cache: as in mlx-lm."""
        blocks = self._owner[self._name]
        hidden: mx.array = blocks(tokens_B_S) if cache is None else blocks(tokens_B_S, cache=cache)
        return hidden

    def head(self, hidden_N_D: mx.array) -> mx.array:
        """Compute logits (N, V) of hidden states (N, D), in the type of the model."""
        tokens_1_N = mx.zeros((1, hidden_N_D.shape[0]), dtype=mx.int32)
        blocks = self._owner[self._name]
        known = _KnownOutput(blocks, hidden_N_D[None])
        dict.__setitem__(self._owner, self._name, known)
        try:
            logits_1_N_V: mx.array = self._owner(tokens_1_N)
        finally:
            dict.__setitem__(self._owner, self._name, blocks)
        self._borrowed |= known.borrowed
        return mx.squeeze(logits_1_N_V, 0)  # indexing would copy the logits and scatter their gradient

    def head_weights(self) -> dict[str, mx.array]:
        """Return the trainable weights that `head` uses, by name: outside the blocks, or borrowed from them."""
        within = len(self._name) + 1

        def used(name: str) -> bool:
            return not name.startswith(f"{self._name}.") or name[within:].partition(".")[0] in self._borrowed

        return {name: array for name, array in flat(self._owner.trainable_parameters()).items() if used(name)}

    @contextmanager
    def using(self, weights: dict[str, mx.array]) -> Iterator[None]:
        """Let `head` use other arrays for some of `head_weights` inside the context."""
        outer = self.head_weights()
        self._owner.update(nested(weights))
        try:
            yield
        finally:
            self._owner.update(nested(outer))


def split_model(model: nn.Module, vocab_size: int) -> SplitModel | None:
    """Find the two parts of a model, and check on four tokens that together they compute the model's logits.

    Returns None if no submodule is called once with the tokens and leaves only row-wise work to the head; then only the
    whole model computes logits. Wrappers, such as a vision model around its language model, are unwrapped.
    """
    probe_1_4 = mx.arange(1, 5)[None] % vocab_size
    logits_1_4_V = model(probe_1_4)
    for name, child in list(model.items()):
        if not isinstance(child, nn.Module):
            continue
        hidden = _recorded(model, name, probe_1_4)
        if hidden is None:
            continue
        if _equal(hidden, logits_1_4_V):
            return split_model(child, vocab_size)
        candidate = SplitModel(model, name)
        if _agrees(candidate, probe_1_4, hidden, logits_1_4_V):
            return candidate
    return None


def _recorded(model: nn.Module, name: str, tokens_1_S: mx.array) -> mx.array | None:
    with watched_calls([model[name]]) as calls:
        model(tokens_1_S)
    if len(calls) != 1 or calls[0].given is not tokens_1_S or not isinstance(calls[0].result, mx.array):
        return None
    hidden = calls[0].result
    return hidden if hidden.ndim == 3 and hidden.shape[:2] == tokens_1_S.shape else None


def _agrees(candidate: SplitModel, tokens_1_4: mx.array, hidden_1_4_D: mx.array, logits_1_4_V: mx.array) -> bool:
    """Whether the parts give the model's logits, also for positions in another order: the head must work row by row."""
    if not _equal(candidate.blocks(tokens_1_4), hidden_1_4_D):
        return False
    order = mx.array([3, 1, 2])
    return _equal(candidate.head(hidden_1_4_D[0, order]), logits_1_4_V[0, order])


def _equal(first: mx.array, second: mx.array) -> bool:
    """Whether two results are equal up to rounding in the type of the model."""
    if first.shape != second.shape:
        return False
    tolerance = 1e-4 if second.dtype == mx.float32 else 2e-2
    scale = mx.max(mx.abs(second.astype(mx.float32)))
    difference = mx.max(mx.abs(first.astype(mx.float32) - second.astype(mx.float32)))
    return bool((difference <= tolerance * scale).item())
