"""Log-probabilities of a prompt under an adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attachments.adapters.tests.adapter_models import adapters_of
from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import RowAdapter
from clotho.models.parameters import flat, nested
from clotho.scoring.prompt_logprobs import PromptScorer
from clotho.settings.engine import EngineSection
from clotho.settings.server import AdaptersSection
from clotho.storage.adapters import write_adapter
from protocols.sampling import PromptLogprobs
from tests import model_lanes
from tests.scoring.test_prompt_logprobs import TOKENS, scored
from tests.small_models import tiny_source
from tests.training.policies_and_groups import tiny_policy


def test_an_adapter_is_scored_like_a_policy_with_its_weights(tmp_path: Path) -> None:
    """In another thread than the one that loaded it, and without an effect on what the policy computes."""
    policy, same_weights = tiny_policy(), tiny_policy()
    moved = nested({name: value + 0.1 for name, value in flat(policy.trainable()).items()})
    same_weights.publish(moved, version=1, step=1, fingerprint="moved")
    write_adapter(tmp_path, moved, policy.adapter_config)
    policy.tokenizer = tiny_source().tokenizer
    engine = DecodeEngine(policy, EngineSection(), AdaptersSection())
    adapters = adapters_of(engine)
    adapters.load_adapter("one", adapters.store.read(tmp_path))
    adapter = engine.row_weights.admit("one")
    assert adapter is not None
    before = scored(policy, TOKENS)
    scorer = PromptScorer(policy.copy_model(), chunk=4, rows=engine.row_weights)

    def score(adapter: RowAdapter | None) -> PromptLogprobs:
        return scorer.score(policy.trainable(), TOKENS, version=policy.version, adapter=adapter)

    with ThreadPoolExecutor(1) as thread:
        found, own = thread.submit(score, adapter).result(), thread.submit(score, None).result()
    assert found.version == adapter.version
    assert found.logprobs == pytest.approx(scored(same_weights, TOKENS).logprobs, abs=model_lanes.atol(1e-4))
    assert found.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    assert own == before == scored(policy, TOKENS)
