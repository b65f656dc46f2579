"""What speculation adds to a run: memory, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attachments.speculation.sections import SPECULATION, Drafts, ModelDrafts
from protocols.compute import SpeculationCounts

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


METRICS: Mapping[str, str] = {
    "speculation/passes": "Forward passes over a sequence since the line before; each samples one token or more. "
    "0 if speculation is off.",
    "speculation/draft_tokens": "Tokens of the drafts that the engine verified since the line before.",
    "speculation/accepted_tokens": "Accepted tokens of these drafts.",
}


def memory(need: MemoryNeed) -> None:
    """Compute several tokens of a row per step, and hold a draft model."""
    settings = SPECULATION.of(need.engine)
    if isinstance(settings, Drafts):
        need.step_tokens += settings.max_draft
    if isinstance(settings, ModelDrafts):
        need.draft_model = settings.path


async def prepare(plan: Plan) -> Attach | None:
    """Measure what is speculated."""

    async def attach(run: RunContext) -> None:
        before = SpeculationCounts()

        def measure(_: float) -> Mapping[str, Any]:
            nonlocal before
            now, earlier = run.sampler.engine.stats().speculation, before
            before = now
            names = (name.removeprefix("speculation/") for name in METRICS)
            return {f"speculation/{name}": getattr(now, name) - getattr(earlier, name) for name in names}

        run.attached.measures.append(measure)

    return attach
