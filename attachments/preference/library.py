"""What preferences add to the library: objectives."""

from __future__ import annotations

OBJECTIVES = {name: f"attachments.preference.objectives:{name}" for name in ("dpo", "ipo", "kto", "orpo", "simpo")}
