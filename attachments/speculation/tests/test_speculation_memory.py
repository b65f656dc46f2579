"""Drafts in the estimate of memory."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from attachments.speculation.sections import SPECULATION, HistoryDrafts, ModelDrafts
from clotho.settings.bounds import Off
from protocols.summary import MemoryEstimate
from tests.training_run.memory.test_estimate import ADAPTER, profile_of, saved
from training_run.memory.estimate import estimate_memory


def test_speculation_computes_several_tokens_per_row(tmp_path: Path) -> None:
    """Logits of all tokens of a draft; a draft model adds its weights and its caches."""
    profile = profile_of(saved(tmp_path / "policy"), ADAPTER)
    draft = saved(tmp_path / "draft", num_hidden_layers=1)

    def estimate(speculation: Off | HistoryDrafts | ModelDrafts) -> MemoryEstimate:
        engine = SPECULATION.put(profile.engine, speculation)
        return estimate_memory(profile.model, replace(profile, engine=engine))

    off, history = estimate(Off()), estimate(HistoryDrafts(max_draft=3))
    model = estimate(ModelDrafts(path=str(draft), max_draft=3))
    assert (history.decode, model.decode) == (4 * off.decode, 4 * off.decode)
    assert (history.base, history.caches) == (off.base, off.caches)
    assert off.base < model.base < 2 * off.base
    assert off.caches < model.caches < 2 * off.caches
