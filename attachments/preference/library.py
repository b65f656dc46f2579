"""What preferences add to the library: objectives, and the reference point of one of them."""

from __future__ import annotations

OBJECTIVES = {name: f"attachments.preference.objectives:{name}" for name in ("dpo", "ipo", "kto", "orpo", "simpo")}
REFERENCE_POINTS = {"kto": "attachments.preference.objectives:kto_point"}
