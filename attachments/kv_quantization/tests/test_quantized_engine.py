"""An engine with keys and values in 8 bits: its completions, the parity check, and the estimate of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from msgspec.structs import replace

from attachments.adapters.tests.adapter_models import engine_with_adapters, write_mlx_adapter
from attachments.kv_quantization.packed import PackedFormat
from attachments.kv_quantization.sections import KV_QUANTIZATION, EightBits
from attachments.speculation.sections import HistoryDrafts
from clotho.backend import backend
from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.settings.bounds import Off
from protocols.errors import ModelError, ParityError
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.actors.actor_helpers import compute_thread
from tests.actors.test_broadcaster import BroadcasterHarness
from tests.inference.engine_helpers import (
    ENGINE,
    GREEDY,
    SAMPLED,
    full_logits,
    log_softmax,
    make_engine,
    make_prompt,
    run,
    submit_request,
)
from tests.small_models import FixedSource, tiny_source
from tests.training_run.memory.test_estimate import ADAPTER, profile_of, saved
from training_run.forced_decoder import ForcedDecoder
from training_run.memory.estimate import estimate_memory
from training_run.profile.schema import ParityCheck

PACKED: dict[str, Any] = {"kv_quantization": EightBits()}
HEADS: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def source() -> FixedSource:
    """A model with heads of 64 numbers."""
    return tiny_source(head_dim=64)


def completed(engine: DecodeEngine, **options: Any) -> list[Completion]:
    """Complete two groups and a single prompt that join at different times."""
    answers = [submit_request(engine, make_prompt(21), SAMPLED, (1, 2, 3), **options)]
    engine.tick()
    answers.append(submit_request(engine, make_prompt(40, 1), SAMPLED, (4, 5)))
    engine.tick()
    answers.append(submit_request(engine, make_prompt(3, 2), GREEDY))
    run(engine)
    return [one for answer in answers for one in answer.completions]


def forced(engine: DecodeEngine, prompt: tuple[int, ...], completion: Completion) -> np.ndarray[Any, Any]:
    """Return the log-probabilities of a completion's tokens in decode steps of the same engine."""
    steps = ForcedDecoder.of_engine(engine).teacher_forced_logits(prompt, [completion.tokens], rows=2)
    logits = [model_lanes.numpy(logits_B_V)[0].astype(np.float64) for logits_B_V in steps]
    return np.array([log_softmax(one)[token] for one, token in zip(logits, completion.tokens, strict=True)])


def test_recorded_log_probabilities_are_those_of_the_packed_cache(source: FixedSource) -> None:
    """A token is sampled from logits over rounded keys and values, and its log-probability is theirs."""
    engine = make_engine(source, **PACKED)
    assert engine.rounded_by == "engine.kv_quantization"
    answer = submit_request(engine, make_prompt(30), SAMPLED, (1, 2))
    run(engine)
    differences = []
    for one in answer.completions:
        np.testing.assert_allclose(one.logprobs, forced(engine, make_prompt(30), one), atol=model_lanes.atol(1e-4))
        logits_T_V = full_logits(source.model, [*make_prompt(30), *one.tokens])[29:-1]
        exact = [log_softmax(logits_V)[token] for logits_V, token in zip(logits_T_V, one.tokens, strict=True)]
        differences.append(np.abs(np.array(one.logprobs) - exact).mean())
    assert 0 < min(differences) <= max(differences) < model_lanes.atol(0.02)


@pytest.mark.needs_cpu_path
def test_the_compute_line_says_that_mlx_decodes_over_the_packed_cache(source: FixedSource) -> None:
    """NumPy decodes over keys and values in their own type only."""
    found = [make_engine(source, **settings).has_row_decoder for settings in ({}, PACKED)]
    paths = [backend().compute_path("MKL", decodes=decodes) for decodes in found]
    assert paths == ["host: NumPy/BLAS decode, MKL", "host: MLX decode, MKL"]


def test_completions_of_other_rows_do_not_change_a_completion(source: FixedSource) -> None:
    """Rows are rounded one by one."""
    engine = make_engine(source, **PACKED)
    (*_, expected) = completed(engine)
    alone = make_engine(source, **PACKED)
    answer = submit_request(alone, make_prompt(3, 2), GREEDY)
    run(alone)
    np.testing.assert_allclose(answer.completions[0].logprobs, expected.logprobs, atol=model_lanes.atol(1e-4))


def test_the_prefix_cache_returns_what_prefill_computed(source: FixedSource) -> None:
    """Prompts in the prefix cache are not rounded, so that a hit gives the same completion."""
    engine = make_engine(source, **PACKED)
    answers = []
    for _ in range(2):
        answers.append(submit_request(engine, make_prompt(50), SAMPLED, (1,), reuse_prefix=True))
        run(engine)
    assert engine.stats().prefix_hits == 1
    first, second = (answer.completions[0] for answer in answers)
    assert first.tokens == second.tokens
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=model_lanes.atol(1e-4))


@pytest.mark.needs_float32
def test_speculation_keeps_the_tokens(source: FixedSource) -> None:
    """Drafts are verified over the packed cache."""
    plain = completed(make_engine(source, **PACKED), background=True)
    engine = make_engine(source, **PACKED, speculation=HistoryDrafts(max_draft=3))
    for _ in range(2):
        assert [one.tokens for one in completed(engine, background=True)] == [one.tokens for one in plain]
    assert sum(engine.stats().speculation.accepted_by_position)


@pytest.mark.needs_float32
def test_rows_compute_with_adapters_of_their_own(source: FixedSource, tmp_path: Path) -> None:
    """A row with an adapter beside rows of the policy: log-probabilities of decode steps with that adapter alone."""
    adapter = write_mlx_adapter(tmp_path / "a", source.model)
    found = []
    for others in (0, 2):
        engine, _ = engine_with_adapters(source, {"a": adapter}, **PACKED)
        answer = submit_request(engine, make_prompt(17), SAMPLED, (1,), weights="a")
        for seed in range(others):
            submit_request(engine, make_prompt(25, seed), SAMPLED, (seed,))
        run(engine)
        found.append(answer.completions[0])
    assert found[0].tokens == found[1].tokens
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=1e-4)
    base = make_engine(source, **PACKED)
    answer = submit_request(base, make_prompt(17), SAMPLED, (1,))
    run(base)
    assert answer.completions[0].logprobs != found[0].logprobs


def test_heads_of_other_sizes_are_refused() -> None:
    """Before anything is sampled, with the name of the setting."""
    with pytest.raises(ModelError, match=r"engine\.kv_quantization"):
        make_engine(tiny_source(head_dim=24), **PACKED)


@pytest.mark.parametrize(("stop_kl", "ends"), [(None, False), (1e-12, True)])
async def test_the_parity_check_states_the_mismatch(stop_kl: float | None, ends: bool, tmp_path: Path) -> None:
    """At the start, once; above the limit the run ends, and the message names the setting."""
    with compute_thread() as compute:
        await check_stated(compute, tmp_path, stop_kl, ends=ends)


async def check_stated(compute: Compute, directory: Path, stop_kl: float | None, *, ends: bool) -> None:
    """Check parity as a run does."""
    settings = ENGINE(max_num_seqs=16, **PACKED)
    parity = ParityCheck(budget=1.0, stop_kl=stop_kl)
    harness = BroadcasterHarness(compute, directory, parity=parity, engine=settings, **HEADS)
    broadcaster = harness.broadcaster(harness.update(step=1, version=1, shift=0.1))
    with structlog.testing.capture_logs() as logs:
        if ends:
            with pytest.raises(ParityError, match=r"engine\.kv_quantization"):
                await broadcaster.run()
        else:
            await broadcaster.run()
    (stated,) = [line for line in logs if line["event"] == "kv_cache_rounded"]
    assert stated["setting"] == "engine.kv_quantization"
    assert 0 < stated["kl"] < 1e-3


def test_the_estimate_counts_packed_caches(tmp_path: Path) -> None:
    """8 of 32 bits, with two scales of 32 bits per group of 64; prompts in the prefix cache are not packed."""
    profile = profile_of(saved(tmp_path, head_dim=64), ADAPTER)

    def estimate(setting: Off | EightBits) -> Any:
        engine = replace(KV_QUANTIZATION.put(profile.engine, setting), prefix_cache_tokens=1000)
        return estimate_memory(profile.model, replace(profile, engine=engine))

    off, packed = estimate(Off()), estimate(EightBits())
    assert packed.caches == off.caches * 9 / 32
    assert packed.prefixes == off.prefixes
    assert (packed.decode, packed.base) == (off.decode, off.base)


@pytest.mark.usefixtures("device_path")
def test_a_packed_engine_holds_less_memory(source: FixedSource) -> None:
    """The arrays of running rows take as many bytes as the layout counts."""

    def held(**settings: Any) -> int:
        engine = make_engine(source, **settings)
        submit_request(engine, make_prompt(30), Sampling(max_tokens=100, ignore_eos=True), (1, 2))
        engine.tick()
        engine.tick()
        caches: Any = engine._short.batch._cache
        return sum(int(array.nbytes) for array in caches.arrays)

    form, dtype = PackedFormat(None), source.model.parameters()["model"]["norm"]["weight"].dtype
    assert held(**PACKED) * 64 * dtype.size == held() * form.bytes(64, dtype)
