"""A reference policy that follows the learner at a distance."""

from __future__ import annotations

import mlx.core as mx

Arrays = dict[str, mx.array]


def averaged(reference: Arrays, policy: Arrays, keep: float) -> Arrays:
    """Moving average of parameters: keep times the reference plus 1 - keep times the policy, name by name.

    WARP (arXiv:2406.16768) anchors the KL penalty to such an average. Computed in float32, in the form reference +
    (1 - keep) (policy - reference), which leaves equal parameters bit for bit as they are; the type is the reference's:
    in bfloat16 steps below a 256th of a parameter would be lost, so hold the reference in float32. Raises ValueError
    where the names differ.
    """
    if reference.keys() != policy.keys():
        raise ValueError(f"reference and policy differ in {', '.join(sorted(reference.keys() ^ policy.keys())[:3])}")
    return {name: _between(array, policy[name], 1.0 - keep) for name, array in reference.items()}


def _between(old: mx.array, new: mx.array, share: float) -> mx.array:
    start = old.astype(mx.float32)
    return (start + share * (new.astype(mx.float32) - start)).astype(old.dtype)
