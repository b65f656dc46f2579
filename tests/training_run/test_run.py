"""What a run offers to its actors and attachments."""

from __future__ import annotations

from pathlib import Path

from clotho.scoring.token_scores import SamplingDistribution
from tests.training_run.built_context import open_context, tiny_profile


async def test_log_probabilities_are_recomputed_under_the_distribution_of_the_run(tmp_path: Path) -> None:
    """At the temperature of the tokens, with the bias of the run."""
    profile = tiny_profile(tmp_path, sampling={"logit_bias": [[5, 2.0]]})
    async with open_context(profile) as run:
        expected = SamplingDistribution(0.5, ((5, 2.0),))
        found = await run.recompute_logprobs((3, 5, 7), 0.5)
        assert found == await run.sampler.prompt_logprobs((3, 5, 7), distribution=expected)
        assert found != await run.sampler.prompt_logprobs((3, 5, 7))
