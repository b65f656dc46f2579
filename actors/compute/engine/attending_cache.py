"""A column cache that computes attention itself: over its columns, and over prompts that rows share.

For the CPU backend, where mlx-lm's function is made of plain products and a slow softmax anyway.
"""

from __future__ import annotations

import mlx.core as mx

from actors.compute.engine.columns import ColumnCache, ColumnTrack
from actors.compute.engine.partial_attention import attend_to, united


class AttendingCache(ColumnCache):
    """One attention layer's columns and shared prompts.

    attended: whether the layer has ever asked it for attention over just what it returned; only such layers may share.
    """

    def __init__(self, track: ColumnTrack, keys: mx.array, values: mx.array) -> None:
        super().__init__(track, keys, values)
        self.attended = False
        self._returned: tuple[mx.array, mx.array] | None = None
        self._prompt_keys = mx.zeros((0, *keys.shape[1:]), keys.dtype)
        self._prompt_values = mx.zeros((0, *values.shape[1:]), values.dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the newest token of every row and return all visible columns, (B, heads, columns, size)."""
        self._returned = super().update_and_fetch(keys, values)
        return self._returned

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
    ) -> mx.array | None:
        """Attention of one query per row and head, (B, heads, 1, size), over columns and prompt.

        None where the keys are not what this cache returned: the layer changed them, or they are another layer's.
        Raises RuntimeError if prompts are shared then, which `probe_batching` excludes.
        """
        returned, self._returned = self._returned, None
        shared = self.track.shared
        sharing = shared is not None and shared.any
        if returned is None or keys is not returned[0] or values is not returned[1] or not _is_plain(mask):
            if sharing:
                raise RuntimeError("a layer that shares prompts attends to other keys than those of its cache")
            return None
        self.attended = True
        B, heads, _, size = queries.shape
        K = keys.shape[1]
        queries_B_K_R_D = (queries * scale).reshape(B, K, heads // K, size)
        own = attend_to(queries_B_K_R_D, keys, values, self.track.hidden(mask))
        if shared is not None and sharing:
            prompts = shared.arrangement.attend(queries_B_K_R_D, self._prompt_keys, self._prompt_values)
            attended = united(own, prompts)
        else:
            attended = own.sum / own.weight
        return attended.astype(queries.dtype).reshape(B, heads, 1, -1)

    def write_prompt(self, place: int, keys: mx.array, values: mx.array) -> None:
        """Hold a computed prompt, (1, heads, tokens, size), in the place of an unused one or a new place."""
        self._prompt_keys = _put(self._prompt_keys, place, keys)
        self._prompt_values = _put(self._prompt_values, place, values)

    def take_prompts(self, place_F: mx.array) -> None:
        """Keep only these prompts, in this order."""
        self._prompt_keys, self._prompt_values = self._prompt_keys[place_F], self._prompt_values[place_F]

    @property
    def arrays(self) -> list[mx.array]:
        """What must be computed with each step."""
        return [*super().arrays, self._prompt_keys, self._prompt_values]


def _is_plain(mask: mx.array | None) -> bool:
    return mask is None or (isinstance(mask, mx.array) and mask.ndim == 4 and mask.dtype == mx.bool_)


def _put(held_F: mx.array, place: int, new: mx.array) -> mx.array:
    """Pad what is shorter with zeros: what another prompt left there may not be finite."""
    F, longest = held_F.shape[0], max(held_F.shape[2], new.shape[2])
    held_F, new = _widened(held_F, longest), _widened(new, longest)
    if place == F:
        return mx.concatenate([held_F, new])
    held_F[place : place + 1] = new
    return held_F


def _widened(x: mx.array, tokens: int) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (0, tokens - x.shape[2]), (0, 0)]) if x.shape[2] < tokens else x
