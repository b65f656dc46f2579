"""docs/operating.md explains every number and every reason that a run writes down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from clotho.monitoring.metrics import StepMetrics, evaluation_fields
from protocols.evaluation import EvalReport
from protocols.rollout import DiscardReason

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
MEASURED = EvalReport(
    step=1, version=1, problems=1, accuracy=1.0, by_type={}, completion_tokens=1, seconds=1.0, final=True
)  # fmt: skip


def test_the_table_has_every_key_of_the_metrics_and_no_others() -> None:
    """Those of a consumed batch, and those of a measurement."""
    table = PAGE.partition("| key of metrics.jsonl |")[2].partition("\n\n")[0]
    explained = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition("|")[2].partition("|")[0])
    }
    assert explained == {*StepMetrics.__struct_fields__, *evaluation_fields(MEASURED)}


def test_every_reason_to_discard_a_group_is_explained() -> None:
    """They are the keys of `discarded`."""
    assert [reason for reason in get_args(DiscardReason) if f"`{reason}` (" not in PAGE] == []
