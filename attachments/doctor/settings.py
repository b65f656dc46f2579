"""Settings that are valid and far from what trains well."""

from __future__ import annotations

from collections.abc import Iterator

from clotho.settings.model import AdapterMethod
from protocols.finding import Change, Finding, Remedy
from training_run.profile.schema import Profile

SCALES = (0.05, 100.0)
"""Range of usual adapter scales: from alpha / rank = 32 / 512 to several times the 20 of mlx-lm."""


def setting_findings(profile: Profile) -> Iterator[Finding]:
    """Yield the findings about settings."""
    method = profile.policy.method
    if not isinstance(method, AdapterMethod):
        return
    scale, (low, high) = method.effective_scale, SCALES
    if low <= scale <= high:
        return
    keys = "policy.method.alpha and policy.method.rank" if method.scale is None else "policy.method.scale"
    result = (
        "one update changes the policy so much that it collapses"
        if scale > high
        else "updates hardly change the policy, so nothing is learned"
    )
    usual = Change(key="policy.method.alpha", of="policy.method.rank", factor=2.0)
    yield Finding(
        name="lora_scale_unusual",
        severity="warning",
        fact=f"the adapter has the scale {scale:g} ({keys}); usual scales are {low:g} to {high:g}",
        consequence=result,
        advice="set policy.method.alpha to twice the rank, without policy.method.scale",
        remedy=Remedy(action="start", changes=(usual,)),
    )
