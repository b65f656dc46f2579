"""The replay buffer: groups that were learned from, to learn from again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from clotho.config.schema import ReplaySection
from clotho.config.sections_training import BufferedReplay, PriorityReplay, WeightedReplay
from protocols.rollout import ScoredGroup
from protocols.step import ReplayGroup, TrainedGroup

Numbers = NDArray[np.float64]

STREAM = int.from_bytes(b"replay")
"""Keeps these random numbers apart from others of the same seed and step."""


class ReplayBuffer:
    """Keeps the newest `capacity` groups, none of them older than `max_age` versions.

    What is sampled stays. SampledTokens are a function of (seed, step, contents), not of the draws before, so that a resumed run
    draws the same. The age of a group is the learner's version less that of the weights its first update made.

    Priority of a group: the mean size of its advantages, or its recency 1 / (1 + age).
    """

    def __init__(self, settings: ReplaySection, *, seed: int, kept: Iterable[ReplayGroup] = ()) -> None:
        """kept: what `groups` said in an earlier life of the run; beyond the capacity the oldest go."""
        self._settings, self._seed = settings, seed
        self._kept = deque(kept, maxlen=settings.capacity if isinstance(settings, BufferedReplay) else 0)

    def __len__(self) -> int:
        """Groups kept, those included that are too old for the next draw."""
        return len(self._kept)

    def groups(self) -> tuple[ReplayGroup, ...]:
        """All of it, the oldest first, as a checkpoint keeps it."""
        return tuple(self._kept)

    def add(self, groups: Sequence[TrainedGroup], *, version: int) -> None:
        """Keep groups that were just learned from; version: of the weights that came of it."""
        self._forget(version)
        for group in groups:
            advantage = fmean(abs(value) for value in group.advantages)
            self._kept.append(ReplayGroup(scored=group.scored, advantage=advantage, version=version))

    def clear(self) -> None:
        """Forget everything, as after going back to an earlier policy."""
        self._kept.clear()

    def draw(self, *, version: int, step: int) -> tuple[ScoredGroup, ...]:
        """Return `settings.groups` different groups, fewer if there are fewer, the oldest first.

        version: the learner's; step: batches consumed so far.
        """
        self._forget(version)
        if not self._kept or not isinstance(self._settings, BufferedReplay):
            return ()
        random, sampling = np.random.default_rng((STREAM, self._seed, step)), self._settings.sampling
        match sampling:
            case PriorityReplay():
                key_n = self._priorities(version, sampling)
            case WeightedReplay():
                key_n = weighted_keys(self._priorities(version, sampling), sampling.exponent, random)
            case _:
                key_n = random.random(len(self._kept))
        newest_first_n = np.arange(len(key_n))[::-1]
        sampled = np.lexsort((newest_first_n, -key_n))[: self._settings.groups]
        return tuple(self._kept[index].scored for index in sorted(sampled.tolist()))

    def _priorities(self, version: int, sampling: PriorityReplay | WeightedReplay) -> Numbers:
        if sampling.priority == "recency":
            return np.array([1.0 / (1 + version - kept.version) for kept in self._kept])
        return np.array([kept.advantage for kept in self._kept])

    def _forget(self, version: int) -> None:
        if isinstance(self._settings, BufferedReplay):
            while self._kept and version - self._kept[0].version > self._settings.max_age:
                self._kept.popleft()


def weighted_keys(priority_n: Numbers, exponent: float, random: np.random.Generator) -> Numbers:
    """Keys whose largest are sampled one after another without replacement, in proportion to priority ** exponent.

    The Gumbel-top-k trick (Kool, van Hoof, Welling, arXiv:1903.06059): log weight plus Gumbel noise. A priority of
    zero is one so small that the group comes last.
    """
    log_weight_n = exponent * np.log(np.maximum(priority_n, np.finfo(np.float64).tiny))
    return log_weight_n + random.gumbel(size=len(priority_n))
