"""Versions of libraries that have known faults (`known_bad.toml`), and settings far from what trains well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct
from packaging.specifiers import SpecifierSet

from clotho.settings.model import AdapterMethod
from protocols.finding import Change, Finding, Remedy
from training_run.profile.schema import Profile

TABLE = Path(__file__).with_name("known_bad.toml")

PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy", "hypercorn", "starlette")
"""Packages whose versions `doctor` shows."""


class KnownBad(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions of a package with a fault. versions: specifier as in PEP 440. source: address of a description."""

    package: str
    versions: str
    consequence: str
    remedy: str
    source: str


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    versions: tuple[KnownBad, ...]


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """Return the rows of the table."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=_Table).versions


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages of `PACKAGES` and of the table, by name."""
    found = {}
    for package in dict.fromkeys((*PACKAGES, *(row.package for row in known_bad()))):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_findings(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for every row of the table that applies. installed: versions by package."""
    for row in known_bad():
        version = installed.get(row.package)
        if version is not None and SpecifierSet(row.versions, prereleases=True).contains(version):
            yield Finding(
                name="version_known_bad",
                severity="error",
                fact=f"{row.package} {version} is installed, a version with a known fault ({row.source})",
                consequence=row.consequence,
                advice=row.remedy,
            )


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
        fact=f"the adapter has the scale {scale:g} ({keys}); usual scales are {low:g} to {high:g}",
        consequence=result,
        advice="set policy.method.alpha to twice the rank, without policy.method.scale",
        remedy=Remedy(action="start", changes=(usual,)),
    )
