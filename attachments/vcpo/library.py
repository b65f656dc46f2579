"""What VCPO adds to the library: an advantage."""

from __future__ import annotations

ADVANTAGES = {"optimal_baseline": "attachments.vcpo.baseline:of_update"}
