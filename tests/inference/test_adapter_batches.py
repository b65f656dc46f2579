"""Rows with different adapters in one batch compute what each adapter computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clotho.cpu
from protocols.sampling import BASE, POLICY
from tests.inference.adapter_models import ATTENTION_ONLY, engine_with_adapters, generated, write_mlx_adapter
from tests.inference.engine_helpers import GREEDY, SAMPLED, make_prompt, run, submit_request
from tests.small_models import tiny, tiny_source

ARCHITECTURES = ["qwen3", "llama", "gemma3_text", "qwen3_moe", "lfm2"]
"""Two dense transformers that the CPU backend decodes, a sliding window, a mixture of experts, a convolution."""


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decode in NumPy where the model is supported, or in MLX only."""
    monkeypatch.setattr(clotho.cpu, "KERNELS_ENABLED", request.param == "host")
    return str(request.param)


def directories(root: Path, architecture: str, **overrides: Any) -> dict[str, Path]:
    """Write adapters of different ranks, scales and targets."""
    model = tiny(architecture, vocab_size=257, **overrides)
    return {
        "wide": write_mlx_adapter(root / "wide", model, rank=8, scale=1.5, seed=1),
        "narrow": write_mlx_adapter(root / "narrow", model, rank=4, scale=2.0, seed=2),
        "attention": write_mlx_adapter(root / "attention", model, rank=5, seed=3, modules=ATTENTION_ONLY),
    }


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_of_a_mixed_batch_equals_mlx_lm_with_its_adapter(architecture: str, tmp_path: Path) -> None:
    """Greedy tokens equal those of mlx-lm's own generation with the adapter loaded by mlx-lm, token by token."""
    adapters = directories(tmp_path, architecture)
    engine, _ = engine_with_adapters(tiny_source(architecture), adapters)
    rows = [("wide", 9), ("narrow", 5), (POLICY, 9), ("attention", 12), (BASE, 7), ("wide", 6), ("narrow", 9)]
    prompts = [make_prompt(length, salt) for salt, (_, length) in enumerate(rows)]
    answers = [
        submit_request(engine, prompt, GREEDY, weights=weights)
        for prompt, (weights, _) in zip(prompts, rows, strict=True)
    ]
    run(engine)
    found = {}
    for answer, prompt, (weights, _) in zip(answers, prompts, rows, strict=True):
        expected = generated(architecture, adapters.get(weights), prompt, GREEDY.max_tokens)
        assert list(answer.completions[0].tokens) == expected, weights
        found[weights] = answer.completions[0]
    assert found["wide"].fingerprint != found["narrow"].fingerprint
    assert found["wide"].weights == "wide"
    assert found[POLICY].fingerprint == ""


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_those_of_serving_the_adapter_alone(architecture: str, tmp_path: Path) -> None:
    """Other adapters in the batch change no row beyond rounding."""
    adapters = directories(tmp_path, architecture)
    mixed, _ = engine_with_adapters(tiny_source(architecture), adapters)
    names = [*adapters, POLICY, BASE]
    together = {
        name: submit_request(mixed, make_prompt(8, salt), SAMPLED, seeds=(salt, 9), weights=name)
        for salt, name in enumerate(names)
    }
    run(mixed)
    for salt, name in enumerate(names):
        alone, _ = engine_with_adapters(tiny_source(architecture), adapters)
        answer = submit_request(alone, make_prompt(8, salt), SAMPLED, seeds=(salt, 9), weights=name)
        run(alone)
        for one, other in zip(answer.completions, together[name].completions, strict=True):
            assert one.tokens == other.tokens
            assert np.abs(np.array(one.logprobs) - np.array(other.logprobs)).max() < 1e-4
