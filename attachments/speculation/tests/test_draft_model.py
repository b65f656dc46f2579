"""Drafts of a smaller model: any model gives exact completions, and a good one few steps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import save_config, save_model

from attachments.speculation.sections import ModelDrafts
from clotho.inference.engine import DecodeEngine
from protocols.errors import ModelError
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request, tick_until
from tests.small_models import FixedSource, tiny, tiny_source

SAMPLINGS = (
    Sampling(max_tokens=15, ignore_eos=True),
    Sampling(temperature=0.0, max_tokens=10, ignore_eos=True),
    Sampling(temperature=0.7, top_k=9, logit_bias=((7, 3.0),), max_tokens=20, ignore_eos=True),
)


@pytest.fixture
def compute_path(request: pytest.FixtureRequest) -> str:
    """Run a test on both compute paths."""
    if request.param == "MLX":
        request.getfixturevalue("device_path")
    return str(request.param)


def sample(engine: DecodeEngine) -> list[Completion]:
    """Sample groups of two rows that join at different times."""
    answers = []
    for i, sampling in enumerate(SAMPLINGS):
        answers.append(submit_request(engine, make_prompt(3 + 11 * i, i), sampling, (i, i + 7)))
        engine.tick()
    run(engine)
    return [completion for answer in answers for completion in answer.completions]


def with_draft_model(source: FixedSource, directory: Path, *, seed: int) -> DecodeEngine:
    """Return an engine whose draft model is that of `source` (seed 0) or another one."""
    model = tiny("qwen3", vocab_size=257, seed=seed)
    save_model(directory, model)
    bits = model_lanes.current().bits
    packed = {"quantization": {"group_size": model_lanes.GROUP_SIZE, "bits": bits}} if bits else {}
    save_config(asdict(model.args) | packed, directory / "config.json")
    return make_engine(source, speculation=ModelDrafts(path=str(directory), max_draft=3))


@pytest.mark.parametrize(("compute_path", "seed"), [("host", 0), ("host", 5), ("MLX", 5)], indirect=["compute_path"])
def test_completions_equal_those_of_plain_decoding(compute_path: str, seed: int, tmp_path: Path) -> None:
    """A draft model with the weights of the policy proposes what the policy samples; any other model is exact too."""
    source = tiny_source()
    plain, engine = make_engine(source), with_draft_model(source, tmp_path, seed=seed)
    for one, other in zip(sample(engine), sample(plain), strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    counts = engine.stats().speculation
    if seed == 0:
        assert counts.accepted_tokens == counts.draft_tokens > 40
        assert engine.stats().decode_steps < 12
    else:
        assert 0 < counts.accepted_tokens < counts.draft_tokens


def test_a_row_that_had_no_drafts_for_a_while_is_prefilled_again(tmp_path: Path) -> None:
    """Rows pause while another row has a penalty; the draft model then has not seen many of their tokens."""
    source = tiny_source()
    engine = with_draft_model(source, tmp_path, seed=0)
    answer = submit_request(engine, make_prompt(9), Sampling(max_tokens=60, ignore_eos=True), (1, 2))
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 8)
    submit_request(engine, make_prompt(4), Sampling(max_tokens=36, presence_penalty=1.0, ignore_eos=True))
    tick_until(engine, lambda: engine.stats().running_rows == 3)
    before = engine.stats().speculation.draft_tokens
    tick_until(engine, lambda: engine.stats().running_rows == 2)
    assert engine.stats().speculation.draft_tokens == before
    run(engine)
    counts = engine.stats().speculation
    assert counts.accepted_tokens == counts.draft_tokens > before
    plain = make_engine(source)
    expected = submit_request(plain, make_prompt(9), Sampling(max_tokens=60, ignore_eos=True), (1, 2))
    run(plain)
    assert [one.tokens for one in answer.completions] == [one.tokens for one in expected.completions]


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """The key is named."""
    with pytest.raises(ModelError, match=r"engine\.speculation\.path"):
        with_draft_model(tiny_source(vocab_size=300), tmp_path, seed=0)
