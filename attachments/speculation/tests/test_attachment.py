"""Metrics of speculation in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.speculation import attachment
from protocols.compute import SpeculationCounts
from tests.training_run.built_context import open_context, tiny_profile


async def test_speculation_is_counted_since_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine counts since it was created."""
    async with open_context(tiny_profile(tmp_path)) as run:
        measure = next(one for one in run.attached.measures if one(1.0).keys() == attachment.METRICS.keys())
        stats = run.sampler.engine.stats()
        counts = iter(((4, 10, (3, 1)), (9, 25, (8, 5))))

        def counted() -> object:
            passes, drafted, accepted = next(counts)
            now = SpeculationCounts(passes=passes, draft_tokens=drafted, accepted_by_position=accepted)
            return replace(stats, speculation=now)

        monkeypatch.setattr(run.sampler.engine, "stats", counted)
        assert list(measure(1.0).values()) == [4, 10, 4]
        assert list(measure(1.0).values()) == [5, 15, 9]
