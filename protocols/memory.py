"""How much memory a run will hold, part by part."""

from __future__ import annotations

from msgspec import Struct


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes of arrays at the moment when most are held, the engine's caches being full.

    base: frozen weights. trained: the adapter, or all floating weights in full-weight training.
    gradients: in float32; twice where an update has several micro-batches. optimizer: both moments, and float32
    copies of narrower weights. reference: the initial weights, kept for the penalty in full-weight training.
    caches: keys, values and states of the running sequences. prefixes: of computed prompts kept for later requests.
    activations, logits: of one micro-batch's backward pass, in the blocks and in the head.
    update: the new weights and moments, beside the old. decode: what one decoding step computes with.
    """

    base: int
    trained: int
    gradients: int
    optimizer: int
    reference: int
    caches: int
    prefixes: int
    activations: int
    logits: int
    update: int
    decode: int

    @property
    def held(self) -> int:
        """What stays from one turn of the compute thread to the next."""
        return self.base + self.trained + self.gradients + self.optimizer + self.reference + self.caches + self.prefixes

    @property
    def total(self) -> int:
        """What is held, and the largest of the three that take turns: backward pass, update, decoding step."""
        return self.held + max(self.activations + self.logits, self.update, self.decode)


class MemoryPart(Struct, frozen=True, kw_only=True):
    """One line of an estimate. change: the settings that make it smaller, or why there are none."""

    component: str
    bytes: int
    change: str
