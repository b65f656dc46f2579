"""Rows of a group share their prompt in MLX: the results are those of rows with a copy each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bench.contenders.shapes import Shape, configuration
from bench.shapes import make_policy
from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout
from clotho.inference.engine import DecodeEngine
from clotho.inference.kv_cache import BatchKVCache
from clotho.inference.rows import rounded_columns
from clotho.inference.shared_prompts import SharedPrompts
from clotho.settings.engine import EngineSection
from clotho.settings.model import PolicySection
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.cache_rows import Rows, arrival_of
from tests.inference.engine_helpers import (
    base_model,
    make_engine,
    make_prompt,
    reference_logprobs,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import ARCHITECTURES, tiny_source

LIMIT = 65_536
LONG = Sampling(max_tokens=40, ignore_eos=True)

THRESHOLD = "clotho.inference.cache_layout.MIN_SAVED_BYTES"


@pytest.fixture(autouse=True)
def shared_by_two_rows(device_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a GPU, and share every prompt of two rows."""
    monkeypatch.setattr(THRESHOLD, {"cpu": 1, "gpu": 1})


def layout_of(model: Any) -> CacheLayout:
    """Return the layout that an engine finds."""
    layout = CacheLayout(model)
    probe_batching(layout)
    return layout


def device_rows(architecture: str, slots: int, *, limit: int = LIMIT) -> Rows:
    """Return rows of a cache in MLX."""
    layout = layout_of(tiny_source(architecture).model)
    return Rows(layout.model, slots, BatchKVCache(layout, slots, limit))


def shared(rows: Rows) -> SharedPrompts:
    """Return which rows share which prompts."""
    assert isinstance(rows.cache, BatchKVCache)
    assert rows.cache.prompts is not None
    return rows.cache.prompts


SHARING = {
    "qwen3": True, "llama": True, "gemma3_text": True, "qwen3_moe": True, "mixtral": True, "lfm2": True,
    "falcon_h1": True, "gemma2": False, "mamba2": False,
}  # fmt: skip


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_models_share_prompts_if_their_attention_uses_keys_and_masks_as_given(architecture: str) -> None:
    """Gemma 2 computes attention itself, and Mamba 2 has none; rows of these models have a copy each."""
    assert layout_of(tiny_source(architecture).model).shares_prompts == SHARING[architecture]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "falcon_h1"])
def test_groups_beside_single_rows_compute_their_own_logits(architecture: str) -> None:
    """Groups of different sizes and prompts, and rows without a group. Each row equals its own full forward pass."""
    rows = device_rows(architecture, 9)
    rows.enter([0, 1, 2], make_prompt(31))
    rows.enter([3, 4], make_prompt(12, 1))
    rows.check_step()
    rows.enter([5], make_prompt(20, 2))
    rows.enter([6, 7, 8], make_prompt(1, 3))
    rows.check_step()
    rows.check_step()
    assert shared(rows).tokens_B.tolist() == [30, 30, 30, 11, 11, 0, 0, 0, 0]


def test_kept_rows_keep_their_prompts() -> None:
    """For any new order of slots, and if rows of one prompt are separated. Prompts without rows are released."""
    rows = device_rows("qwen3", 8)
    rows.enter([0, 1, 2], make_prompt(31))
    rows.enter([3, 4], make_prompt(41, 1))
    rows.enter([5], make_prompt(10, 2))
    rows.enter([6, 7], make_prompt(21, 3))
    rows.check_step()
    rows.take([7, 0, 5, 2])
    assert shared(rows).tokens_B.tolist() == [20, 30, 0, 30]
    assert shared(rows).tokens == 3 * 30
    rows.check_step()
    rows.cache.grow(2)
    rows.tokens += [(0,), (0,)]
    rows.live_B = np.append(rows.live_B, [False, False])
    rows.enter([4, 5], make_prompt(26, 4))
    rows.check_step()
    rows.check_step()


def test_a_new_prompt_takes_the_place_of_one_without_rows() -> None:
    """Groups that replace each other need no more memory."""
    rows = device_rows("qwen3", 4)
    rows.enter([0, 1], make_prompt(31))
    rows.enter([2, 3], make_prompt(31, 1))
    tokens = shared(rows).tokens
    for salt in range(2, 6):
        rows.enter([0, 1], make_prompt(31 - salt, salt))
        rows.check_step()
    assert shared(rows).tokens == tokens


def test_a_prompt_that_is_not_finite_affects_only_its_own_rows() -> None:
    """Rows of other groups, rows without a group, and later rows of the cleared slots are finite."""
    rows = device_rows("qwen3", 5)
    rows.enter([0, 1], make_prompt(14))
    arrival = arrival_of(rows.layout, make_prompt(15, 1), 2)
    assert arrival.state
    nan = tuple(tuple(array * mx.nan for array in arrays) for arrays in arrival.state)
    rows.put([2, 3], make_prompt(15, 1), arrival._replace(state=nan))
    rows.enter([4], make_prompt(10, 2))
    rows.check_step(but=[2, 3])
    for slot in (2, 3):
        rows.cache.clear(slot)
    rows.enter([2], make_prompt(7, 3))
    rows.enter([3], make_prompt(1, 4))
    rows.check_step()


def heads_and_size() -> tuple[int, int]:
    """Return the number of key heads of the tiny model, and their size; the lane chooses both."""
    arguments: Any = tiny_source("qwen3").model.args
    return arguments.num_key_value_heads, arguments.head_dim


def test_prompts_are_shared_from_a_number_of_saved_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the first x tokens x bytes of a token."""
    rows = device_rows("qwen3", 3)
    heads, size = heads_and_size()
    itemsize = 4 if model_lanes.current().dtype == "float32" else 2
    threshold = 2 * 30 * 2 * heads * size * itemsize  # two rows; keys and values
    monkeypatch.setattr(THRESHOLD, {"cpu": threshold, "gpu": threshold})
    rows.enter([0, 1, 2], make_prompt(30))
    assert rows.cache.prompts is None
    rows.enter([0, 1, 2], make_prompt(31))
    assert shared(rows).tokens_B.tolist() == [30] * 3


def test_all_prompts_are_shared_beside_a_shared_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The additional kernels run in any case, until the last shared prompt has no rows."""
    rows = device_rows("qwen3", 4)
    rows.enter([0, 1], make_prompt(31))
    monkeypatch.setattr(THRESHOLD, {"cpu": 10**9, "gpu": 10**9})
    rows.enter([2, 3], make_prompt(4))
    assert shared(rows).tokens_B.tolist() == [30, 30, 3, 3]
    rows.take([0])
    rows.live_B[:] = False
    rows.enter([0], make_prompt(5))
    assert rows.cache.prompts is None
    rows.check_step()


def test_prompts_are_copied_if_sharing_can_exceed_the_limit() -> None:
    """A single long row needs as many columns in every row, in addition to the shared prompts."""
    tokens = 40
    columns = tokens + 100  # `arrival_of` reserves 100 tokens
    for spare, is_shared in ((0, True), (-1, False)):
        rows = device_rows("qwen3", 3, limit=3 * columns + 2 * tokens + spare)
        rows.enter([0], make_prompt(tokens + 1))
        rows.enter([1, 2], make_prompt(tokens + 1))
        assert (rows.cache.prompts is not None) == is_shared
        rows.check_step()


def test_a_group_stores_its_prompt_once() -> None:
    """The buffers of eight rows with a prompt of 200 tokens hold it once, beside the empty prompt."""
    engine = make_engine()
    submit_request(engine, make_prompt(200), LONG, range(8))
    tick_until(engine, lambda: engine.running == 8)
    assert engine.stats().cache_tokens == 2 * 199 + 8 * rounded_columns(LONG.max_tokens + 1)


SHAPE = Shape(layers=2, width=128, heads=4, key_heads=2, feed_forward=128, vocabulary=256)
"""Quantization groups of 64."""

MISMATCH = {"float32": 1e-5, "4 bits": 0.05}
"""Largest mean absolute difference of log-probabilities, in nats."""


@pytest.mark.parametrize("precision", MISMATCH)
def test_groups_that_join_and_leave_keep_correct_log_probabilities(precision: str) -> None:
    """Groups of different sizes and prompts join at different times. Each row equals one full forward pass."""
    policy = make_policy(base_model(SHAPE, precision), configuration(SHAPE), section=PolicySection())
    engine = DecodeEngine(policy, EngineSection(max_num_seqs=9))
    submitted = []
    for i, (length, rows) in enumerate([(20, 4), (9, 3), (14, 1), (20, 5), (6, 2)]):
        sampling, prompt = Sampling(max_tokens=3 + 4 * (i % 3), ignore_eos=True), make_prompt(length, i)
        submitted.append((prompt, sampling, submit_request(engine, prompt, sampling, range(100 * i, 100 * i + rows))))
        engine.tick()
    run(engine)
    differences: list[float] = []
    for prompt, sampling, answer in submitted:
        for completion in answer.completions:
            reference = reference_logprobs(policy.model, prompt, completion, sampling)
            differences += np.abs(np.array(completion.logprobs) - reference).tolist()
    assert len(differences) > 50
    assert np.mean(differences) < MISMATCH[precision]


def test_the_step_of_a_group_reads_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a shared prompt enter one product per layer, of all of its rows."""
    products: list[Sequence[int]] = []
    usual: Any = mx.addmm

    def recorded(c: mx.array, a: mx.array, b: mx.array, **options: Any) -> mx.array:
        products.append(b.shape)
        result: mx.array = usual(c, a, b, **options)
        return result

    rows = device_rows("qwen3", 6)
    rows.enter([0, 1, 2], make_prompt(31))
    rows.enter([3, 4, 5], make_prompt(31, 1))
    rows.step()
    monkeypatch.setattr(mx, "addmm", recorded)
    rows.step()
    assert [shape for shape in products if shape[-1] == 30] == 2 * [(2, *heads_and_size(), 30)]
