"""Routes of drafted tokens: those that are kept have the experts that computed them."""

from __future__ import annotations

import pytest

from attachments.speculation.sections import PromptDrafts
from protocols.sampling import Sampling
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request
from tests.inference.test_engine_routes import check_routes
from tests.small_models import tiny_source


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_verified_drafts_have_the_routes_of_the_tokens_that_are_kept(architecture: str) -> None:
    """On the host and in MLX, with drafts from the prompt, of which some are accepted and others are not."""
    source = tiny_source(architecture)
    greedy = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = make_engine(source, speculation=PromptDrafts())
    prompts = [make_prompt(6, i) * 3 for i in range(3)]
    answers = [submit_request(engine, prompt, greedy, record_routes=True) for prompt in prompts]
    run(engine)
    counts = engine.stats().speculation
    assert 0 < sum(counts.accepted_by_position) < counts.draft_tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        check_routes(source, prompt, answer.completions[0])
