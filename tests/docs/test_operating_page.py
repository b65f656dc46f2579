"""docs/operating.md describes every metric and every reason of a discarded group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest

from attachments.ranks.attachment import RANK_METRICS
from attachments.remote.sections import REMOTE_METRICS
from protocols.rollout import DiscardReason
from training_run.records.evaluation_history import EVALUATION_METRICS
from training_run.records.metrics import ENVIRONMENT_METRICS, all_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("head", "descriptions"),
    [
        ("key of metrics.jsonl", all_metrics()),
        ("key of an environment", ENVIRONMENT_METRICS),
        ("key of a remote server", REMOTE_METRICS),
        ("key of a rank", RANK_METRICS),
        ("key of evaluations.jsonl", EVALUATION_METRICS),
    ],
)
def test_the_page_has_the_tables_of_metrics(head: str, descriptions: Mapping[str, str]) -> None:
    """One row per key, in the same order, with the same description, and no other rows."""
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in descriptions.items())
    assert PAGE.partition(f"| {head} | meaning |\n|---|---|\n")[2].partition("\n\n")[0] == rows


def test_the_page_has_every_reason_of_a_discarded_group() -> None:
    """One row per reason."""
    assert [reason for reason in get_args(DiscardReason) if f"| `{reason}` | " not in PAGE] == []
