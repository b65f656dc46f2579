"""The replay buffer: groups that were trained on and may be trained on again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from clotho.settings.learner import BufferedReplay, PriorityReplay, ReplaySection, WeightedReplay
from protocols.rollout import ScoredGroup
from protocols.step import ReplayGroup, TrainedGroup

Numbers = NDArray[np.float64]

STREAM = int.from_bytes(b"replay")
"""Separates these random numbers from others with the same seed and step."""


class ReplayBuffer:
    """Keeps the newest `capacity` groups that are at most `max_age` versions old.

    Sampling does not remove groups. A sample is a function of (seed, step, contents), so that a resumed run samples the
    same groups. The age of a group is the learner's version minus the version that its first update produced.

    Priority of a group: the mean absolute advantage, or its recency 1 / (1 + age).
    """

    def __init__(self, settings: ReplaySection, *, seed: int, kept: Iterable[ReplayGroup] = ()) -> None:
        """kept: result of `groups` before a restart; groups beyond the capacity are dropped, oldest first."""
        self._settings, self._seed = settings, seed
        self._kept = deque(kept, maxlen=settings.capacity if isinstance(settings, BufferedReplay) else 0)

    def __len__(self) -> int:
        """Return the number of groups, including groups that are too old for the next sample."""
        return len(self._kept)

    def groups(self) -> tuple[ReplayGroup, ...]:
        """Return all groups, oldest first, for a checkpoint."""
        return tuple(self._kept)

    def add(self, groups: Sequence[TrainedGroup], *, version: int) -> None:
        """Add groups that were just trained on. version: policy version that the update produced."""
        self._forget(version)
        for group in groups:
            advantage = fmean(abs(value) for value in group.advantages)
            self._kept.append(ReplayGroup(scored=group.scored, advantage=advantage, version=version))

    def clear(self) -> None:
        """Remove all groups, for example after a rollback."""
        self._kept.clear()

    def sample(self, *, version: int, step: int) -> tuple[ScoredGroup, ...]:
        """Sample `settings.groups` different groups, or all if there are fewer; returned oldest first.

        version: the learner's. step: number of batches consumed so far.
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
    """Return keys whose largest are a sample without replacement, in proportion to priority ** exponent.

    The Gumbel-top-k trick (Kool, van Hoof, Welling, arXiv:1903.06059): log weight plus Gumbel noise. A group of
    priority zero comes last.
    """
    log_weight_n = exponent * np.log(np.maximum(priority_n, np.finfo(np.float64).tiny))
    return log_weight_n + random.gumbel(size=len(priority_n))
