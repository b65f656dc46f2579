"""What is remembered from one group to the next, within bounds: who sends them, and which came of late."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

import numpy as np

from clotho.atropos.wire import WireGroup

MOST_NAMES = 64
REMEMBERED = 4096
LARGEST_NUMBER = 2**31


class EnvironmentNames:
    """Names of environments: at most `MOST_NAMES` are ever given out, and further ones are all `other`.

    The best name is the label with which an environment asks the engine; it is remembered by the environment's number
    for groups that do not show it.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._labels: dict[int, str] = {}

    def name(self, env_id: int | None, asker: str = "") -> str:
        """Return the name of the environment with this number, which asked under this label, if it is known."""
        number = env_id if env_id is not None and 0 <= env_id < LARGEST_NUMBER else None
        if asker and number is not None and (number in self._labels or len(self._labels) < MOST_NAMES):
            self._labels[number] = asker
        label = asker or (self._labels.get(number, "") if number is not None else "")
        name = label or ("environment" if number is None else f"environment {number}")
        if name not in self._given and len(self._given) >= MOST_NAMES:
            return "other"
        self._given.add(name)
        return name


class RecentGroups:
    """Fingerprints of the latest `REMEMBERED` groups."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def saw(self, group: WireGroup) -> bool:
        """Tell whether the same group came before, and remember it.

        The same are tokens, masks, scores and the log-probabilities that came with them: two draws of the same few
        tokens from different weights are not the same group.
        """
        key = _fingerprint(group)
        if key in self._known:
            return True
        if len(self._order) == REMEMBERED:
            self._known.remove(self._order.popleft())
        self._order.append(key)
        self._known.add(key)
        return False


def _fingerprint(group: WireGroup) -> bytes:
    """128 bits of BLAKE2b over the rows, each after its length."""
    digest = blake2b(digest_size=16)
    for integers in (*group.tokens, *group.masks):
        digest.update(len(integers).to_bytes(8, "little") + np.array(integers, dtype=np.int32).tobytes())
    for numbers in (group.scores, *(group.inference_logprobs or ())):
        digest.update(len(numbers).to_bytes(8, "little") + np.array(numbers, dtype=np.float64).tobytes())
    return digest.digest()
