"""Pipeline -> screen: what came of a run."""

from __future__ import annotations

from msgspec import Struct

from protocols.evaluation import EvalReport
from protocols.gauges import RunGauges
from protocols.ledger import Balance


class RunSummary(Struct, frozen=True, kw_only=True):
    """The end of a run. before, after: None where nothing was measured.

    training_seconds: from the first prompt to the last update; update_seconds: of it, inside updates, all lives of the
    run; evaluation_seconds: before, in between and after; total_seconds: of this process.
    base_model: directory or repository; adapter: the directory beside it that mlx-lm loads.
    """

    steps: int
    version: int
    before: EvalReport | None
    after: EvalReport | None
    balance: Balance
    gauges: RunGauges
    training_seconds: float
    update_seconds: float
    evaluation_seconds: float
    total_seconds: float
    base_model: str
    adapter: str
