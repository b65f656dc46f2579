"""Rows with different adapters in one batch compute what each adapter computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters

from attachments.adapters.tests.adapter_models import (
    ATTENTION_ONLY,
    check_greedy,
    engine_with_adapters,
    write_mlx_adapter,
)
from bench.contenders.shapes import Shape, quantized_model, random_model
from protocols.sampling import BASE, POLICY
from tests.inference.engine_helpers import GREEDY, SAMPLED, make_prompt, run, submit_request
from tests.small_models import FixedSource, byte_tokenizer, tiny, tiny_source

PAIRS = pytest.mark.parametrize(
    ("path", "architecture"),
    [
        *(("host", name) for name in ("qwen3", "qwen3_moe", "qwen3_5")),
        *(("device", name) for name in ("gemma3_text", "qwen3_moe", "lfm2")),
    ],
    indirect=["path"],
)
"""Models that the CPU backend decodes, a sliding window, a mixture of experts, a convolution."""


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest) -> str:
    """Decode in NumPy where the model is supported, or in MLX only."""
    if request.param != "host":
        request.getfixturevalue("device_path")
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
@PAIRS
def test_every_row_of_a_mixed_batch_equals_mlx_lm_with_its_adapter(architecture: str, tmp_path: Path) -> None:
    """Greedy tokens are the most probable ones of mlx-lm's own layers with the adapter loaded by mlx-lm."""
    adapters = directories(tmp_path, architecture)
    engine, _ = engine_with_adapters(tiny_source(architecture), adapters)
    rows = [("wide", 9), ("narrow", 5), (POLICY, 9), ("attention", 12), (BASE, 7), ("wide", 6)]
    prompts = [make_prompt(length, salt) for salt, (_, length) in enumerate(rows)]
    answers = [
        submit_request(engine, prompt, GREEDY, weights=weights)
        for prompt, (weights, _) in zip(prompts, rows, strict=True)
    ]
    run(engine)
    found = {}
    for answer, prompt, (weights, _) in zip(answers, prompts, rows, strict=True):
        check_greedy(answer.completions[0], architecture, adapters.get(weights), prompt)
        found[weights] = answer.completions[0]
    assert found["wide"].fingerprint != found["narrow"].fingerprint
    assert found["wide"].weights == "wide"
    assert found[POLICY].fingerprint == ""


@pytest.mark.parametrize(
    ("path", "architecture"), [("host", "qwen3"), ("device", "gemma3_text"), ("device", "lfm2")], indirect=["path"]
)
@pytest.mark.usefixtures("path")
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
    alone, _ = engine_with_adapters(tiny_source(architecture), adapters)
    for salt, name in enumerate(names):
        answer = submit_request(alone, make_prompt(8, salt), SAMPLED, seeds=(salt, 9), weights=name)
        run(alone)
        for one, other in zip(answer.completions, together[name].completions, strict=True):
            assert one.tokens == other.tokens
            assert np.abs(np.array(one.logprobs) - np.array(other.logprobs)).max() < 1e-4


@pytest.mark.usefixtures("path")
def test_an_adapter_may_change_the_output_head(tmp_path: Path) -> None:
    """Only the rows of that adapter get other logits."""
    model = tiny("llama", vocab_size=257)
    head = write_mlx_adapter(tmp_path / "head", model, rank=6, seed=1, modules=("lm_head", "q_proj"))
    plain = write_mlx_adapter(tmp_path / "plain", model, rank=3, seed=2)
    adapters = {"head": head, "plain": plain}
    engine, loaded = engine_with_adapters(tiny_source("llama"), adapters)
    assert any(info.targets[0] == "lm_head" for info in loaded.loaded_adapters())
    names = ["plain", BASE, "head", "plain"]
    answers = [submit_request(engine, make_prompt(7, salt), GREEDY, weights=name) for salt, name in enumerate(names)]
    run(engine)
    for salt, (name, answer) in enumerate(zip(names, answers, strict=True)):
        check_greedy(answer.completions[0], "llama", adapters.get(name), make_prompt(7, salt))


MISMATCH = {"bfloat16": 0.05, "4 bits": 0.05}
"""Largest mean absolute difference of log-probabilities, in nats."""

SHAPE = Shape(layers=2, width=128, heads=2, key_heads=1, feed_forward=128, vocabulary=257)
"""Heads and quantization groups of 64."""


def low_precision(kind: str) -> Any:
    """Return the model in bfloat16, or with 4-bit weights."""
    if kind == "4 bits":
        return quantized_model(SHAPE)
    model = random_model(SHAPE)
    model.set_dtype(mx.bfloat16)
    return model


@pytest.mark.usefixtures("device_path")
@pytest.mark.parametrize("kind", MISMATCH)
def test_models_of_low_precision_compute_every_row_with_its_adapter(kind: str, tmp_path: Path) -> None:
    """As on a GPU: for the same tokens, the log-probabilities are those of mlx-lm's layers in one pass."""
    adapters = {
        name: write_mlx_adapter(tmp_path / name, low_precision(kind), rank=rank, seed=rank, size=0.05)
        for name, rank in (("wide", 8), ("narrow", 4))
    }
    source = FixedSource(low_precision(kind), byte_tokenizer(), SHAPE.vocabulary)
    engine, _ = engine_with_adapters(source, adapters)
    prompt = make_prompt(9)
    answers = {name: submit_request(engine, prompt, SAMPLED, weights=name) for name in (*adapters, POLICY, BASE)}
    run(engine)
    different = {}
    for name, answer in answers.items():
        usual = low_precision(kind)
        if name in adapters:
            load_adapters(usual, str(adapters[name]))
        usual.eval()
        completion = answer.completions[0]
        logits_T_V = usual(mx.array([[*prompt, *completion.tokens]]))[0, len(prompt) - 1 : -1].astype(mx.float32)
        logp_T_V = np.array(logits_T_V - mx.logsumexp(logits_T_V, axis=-1, keepdims=True))
        expected_T = logp_T_V[np.arange(len(completion.tokens)), list(completion.tokens)]
        assert np.abs(np.array(completion.logprobs) - expected_T).mean() < MISMATCH[kind], name
        different[name] = expected_T
    assert np.abs(different["wide"] - different[BASE]).mean() > MISMATCH[kind]
