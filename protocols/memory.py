"""How much memory a run will hold, part by part."""

from __future__ import annotations

from msgspec import Struct


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes of arrays at the moment when most are held, the engine's caches being full.

    base: frozen weights. trained: the adapter, and weights that are trained in full.
    optimizer: its state, float32 copies of narrower weights among it. reference: weights kept for the penalty.
    rollback: the two older versions that a run which collapses may go back to. midway: weights and state between the
    optimizer steps of one update, where it takes several.
    caches: keys, values and states of the running sequences. prefixes: of computed prompts kept for later requests.
    gradients: in float32; twice where an update has several micro-batches.
    activations, logits: of one micro-batch's backward pass, in the blocks and in the head.
    update: a gradient, and the new weights and optimizer state beside the old. decode: what one decoding step computes
    with.
    shipped_shape: whether the model is known only by a configuration that ships with the project.
    """

    base: int
    trained: int
    optimizer: int
    reference: int
    rollback: int
    midway: int
    caches: int
    prefixes: int
    gradients: int
    activations: int
    logits: int
    update: int
    decode: int
    shipped_shape: bool = False

    @property
    def held(self) -> int:
        """What stays from one turn of the compute thread to the next."""
        learning = self.trained + self.optimizer + self.reference + self.rollback + self.midway
        return self.base + learning + self.caches + self.prefixes

    @property
    def total(self) -> int:
        """What is held, and the largest of the three that take turns: backward pass, update, decoding step."""
        return self.held + max(self.gradients + self.activations + self.logits, self.update, self.decode)


class MemoryPart(Struct, frozen=True, kw_only=True):
    """One line of an estimate. change: the settings that make it smaller, or why there are none."""

    component: str
    bytes: int
    change: str
