"""Split a language model into its blocks and its head, so that the head computes chosen positions only.

Every model of mlx-lm ends in `head(blocks(tokens))`, with differences in the head (tied embeddings, soft caps, scales).
The model's own code computes the head: for one call, an object that returns the known hidden states replaces the
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from clotho.models.parameters import flat, nested


class _BlocksProxy:
    """Replaces the blocks: subclasses define calls; every other attribute is that of the blocks.

    borrowed: names of attributes of the blocks that the head used, such as tied embeddings.
    """

    def __init__(self, blocks: nn.Module) -> None:
        self._blocks = blocks
        self.borrowed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.borrowed.add(name)
        return getattr(self._blocks, name)

    def __getitem__(self, name: str) -> Any:
        self.borrowed.add(name)
        return self._blocks[name]


class _KnownOutput(_BlocksProxy):
    """A call returns the known hidden states."""

    def __init__(self, blocks: nn.Module, output: mx.array) -> None:
        super().__init__(blocks)
        self._output = output

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._output


class _Recorder(_BlocksProxy):
    """A call runs the blocks and records their first argument and their output."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__(blocks)
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._blocks(*args, **kwargs)
        self.calls.append((args[0] if args else None, output))
        return output


@contextmanager
def _replaced(owner: nn.Module, name: str, stand_in: _BlocksProxy) -> Iterator[None]:
    blocks = owner[name]
    dict.__setitem__(owner, name, stand_in)
    try:
        yield
    finally:
        dict.__setitem__(owner, name, blocks)


class Blocks(Protocol):
    """What computes hidden states."""

    def blocks(self, tokens_B_S: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Compute hidden states (B, S, D) of right-padded tokens (B, S). cache: as in mlx-lm."""


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
        known = _KnownOutput(self._owner[self._name], hidden_N_D[None])
        with _replaced(self._owner, self._name, known):
            logits_1_N_V: mx.array = self._owner(tokens_1_N)
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
    recorder = _Recorder(model[name])
    with _replaced(model, name, recorder):
        model(tokens_1_S)
    if len(recorder.calls) != 1:
        return None
    given, hidden = recorder.calls[0]
    if given is not tokens_1_S or not isinstance(hidden, mx.array):
        return None
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
