"""Drafts of long requests of clients, which are decoded in a batch of their own."""

from __future__ import annotations

import pytest

from attachments.speculation.sections import HistoryDrafts, PromptDrafts
from attachments.speculation.speculative_batch import SpeculativeBatch
from protocols.sampling import Sampling
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request

SHORT, MARGIN = 24, 8


@pytest.fixture(autouse=True)
def short_rows_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows become long early."""
    monkeypatch.setattr("clotho.inference.engine.short_tokens", lambda *_: SHORT)
    for module in ("batch", "scheduler"):
        monkeypatch.setattr(f"clotho.inference.{module}.MARGIN", MARGIN)


@pytest.fixture(params=["host", "sampled on the device"])
def path(request: pytest.FixtureRequest) -> None:
    """Decode on the host and as on a GPU."""
    if request.param != "host":
        request.getfixturevalue("mlx_decoder")
        request.getfixturevalue("device_sampler")


@pytest.mark.parametrize("speculation", [HistoryDrafts(), PromptDrafts()])
@pytest.mark.usefixtures("path")
@pytest.mark.needs_batch_invariance
def test_long_rows_have_drafts_too(speculation: HistoryDrafts | PromptDrafts) -> None:
    """From completions that have ended among short rows, or their own. They move while their columns lag."""
    greedy = Sampling(temperature=0.0, max_tokens=70, ignore_eos=True)
    engine = make_engine(speculation=speculation)
    short = [submit_request(engine, make_prompt(5, salt), greedy, background=True) for salt in range(3)]
    run(engine)
    engine._budget.short = SHORT
    long = [submit_request(engine, make_prompt(5, salt), greedy) for salt in range(3)]
    run(engine)
    assert [one.completions[0].tokens for one in long] == [one.completions[0].tokens for one in short]
    assert isinstance(engine._long.batch, SpeculativeBatch)
    assert engine._long.batch._drafts > 0
    assert engine.stats().speculation.drafts > engine._long.batch._drafts
