"""The parts of an engine that attachments provide, and an engine without these attachments."""

from __future__ import annotations

from pathlib import Path

import pytest

from clotho.inference.engine import DecodeEngine
from clotho.settings.engine import EngineSection
from clotho.settings.server import AdaptersSection
from protocols.compute import SpeculationCounts
from protocols.errors import ModelError, ProfileError, RequestError
from protocols.sampling import BASE
from tests.absent import without
from tests.inference.engine_helpers import SAMPLED, make_engine, make_prompt, run, submit_request
from tests.small_models import tiny_source

ATTACHMENTS = ("adapters", "files", "graders", "reasoning_gym", "speculation")


@pytest.mark.parametrize("absent", [(name,) for name in ATTACHMENTS] + [ATTACHMENTS], ids="+".join)
def test_an_engine_samples_without_attachments(absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as with them; every row computes with the policy, and samples one token per step."""
    prompt = make_prompt(9)
    whole = make_engine()
    expected = submit_request(whole, prompt, SAMPLED, seeds=range(4))
    run(whole)
    without(monkeypatch, *absent)
    engine = make_engine()
    answer = submit_request(engine, prompt, SAMPLED, seeds=range(4))
    run(engine)
    assert [one.tokens for one in answer.completions] == [one.tokens for one in expected.completions]
    assert engine.stats().speculation == SpeculationCounts()


@pytest.mark.parametrize("weights", [BASE, "mine"])
def test_weights_beside_the_policy_need_the_attachment(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is refused by the name of the attachment, and so are adapters of the operator and their directory."""
    without(monkeypatch, "adapters")
    engine = DecodeEngine(tiny_source(), EngineSection(), AdaptersSection())
    with pytest.raises(RequestError, match="needs the attachment 'adapters'") as caught:
        submit_request(engine, make_prompt(5), weights=weights)
    assert caught.value.param == "model"
    with pytest.raises(ProfileError, match="needs the attachment 'adapters'"):
        engine.row_weights.read(Path("adapter"), "model")
    with pytest.raises(ModelError, match="root needs the attachment 'adapters'"):
        DecodeEngine(tiny_source(), EngineSection(), AdaptersSection(root="adapters"))
    answer = submit_request(engine, make_prompt(5))
    run(engine)
    assert answer.completions
