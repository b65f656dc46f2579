"""The replay buffer: groups that were trained on and may be trained on again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from attachments.replay.sections import BufferedReplay, PriorityReplay, WeightedReplay
from protocols.checkpoint import Part
from protocols.rollout import Discarded, ScoredGroup
from protocols.step import TrainedGroup
from training_run.supervision.hooks import UpdateHook

Numbers = NDArray[np.float64]

STREAM = int.from_bytes(b"replay")
"""Separates these random numbers from others with the same seed and step."""


class ReplayGroup(Struct, frozen=True, kw_only=True):
    """A group in the replay buffer.

    advantage: mean absolute advantage of its completions when it was first trained on.
    version: policy version of that update; the staleness of the group counts from it.
    """

    scored: ScoredGroup
    advantage: float
    version: int


class ReplayState(Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of a buffer. groups: all of them, oldest first."""

    groups: tuple[ReplayGroup, ...] = ()


class ReplayBuffer:
    """Keeps the newest `capacity` groups that are at most `max_age` versions old.

    Sampling does not remove groups. A sample is a function of (seed, step, contents), so that a resumed run samples the
    same groups. The age of a group is the learner's version minus the version that its first update produced.

    Priority of a group: the mean absolute advantage, or its recency 1 / (1 + age).
    """

    def __init__(self, settings: BufferedReplay, *, seed: int, kept: Iterable[ReplayGroup] = ()) -> None:
        """kept: result of `groups` before a restart; groups beyond the capacity are dropped, oldest first."""
        self._settings, self._seed = settings, seed
        self._kept = deque(kept, maxlen=settings.capacity)

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
        if not self._kept:
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
        while self._kept and version - self._kept[0].version > self._settings.max_age:
            self._kept.popleft()


class Replay(UpdateHook):
    """Adds groups of a buffer to every update."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self._replayed = 0

    def extra(self, *, step: int, version: int) -> tuple[ScoredGroup, ...]:
        """Return a sample of the buffer."""
        sample = self.buffer.sample(version=version, step=step)
        self._replayed = len(sample)
        return sample

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """Put the groups into the buffer that were trained on."""
        self.buffer.add(trained, version=version)

    def metrics(self) -> dict[str, int]:
        """Return how many groups were replayed."""
        replayed, self._replayed = self._replayed, 0
        return {"groups/replayed": replayed}

    def rolled_back(self) -> None:
        """Empty the buffer: an update that was taken back was computed with its groups."""
        self.buffer.clear()

    def part(self) -> Part[ReplayState] | None:
        """Return what a checkpoint keeps; None for an empty buffer."""
        return Part(value=ReplayState(groups=self.buffer.groups())) if len(self.buffer) else None


def weighted_keys(priority_n: Numbers, exponent: float, random: np.random.Generator) -> Numbers:
    """Return keys whose largest are a sample without replacement, in proportion to priority ** exponent.

    The Gumbel-top-k trick (Kool, van Hoof, Welling, arXiv:1903.06059): log weight plus Gumbel noise. A group of
    priority zero comes last.
    """
    log_weight_n = exponent * np.log(np.maximum(priority_n, np.finfo(np.float64).tiny))
    return log_weight_n + random.gumbel(size=len(priority_n))
