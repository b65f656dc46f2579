"""A group in the replay buffer, as a checkpoint keeps it."""

from __future__ import annotations

from msgspec import Struct

from protocols.score import ScoredGroup


class KeptGroup(Struct, frozen=True, kw_only=True):
    """A group that was learnt from, and may be again.

    advantage: mean size of the advantages of its completions, when it was learnt from first.
    version: of the weights that this first update made; its age counts from there.
    """

    scored: ScoredGroup
    advantage: float
    version: int
