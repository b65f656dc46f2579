"""Decode steps with keys and values in 8 bits: those of a cache whose keys and values were rounded when they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attachments.kv_quantization import packed
from attachments.kv_quantization.packed import PackedFormat
from attachments.speculation.verification import VerifyingKVCache
from clotho.backend import Backend, backend
from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import AttentionLeaf, CacheLayout
from clotho.inference.kv_cache import BatchKVCache
from clotho.inference.kv_format import KVFormat
from clotho.inference.rows import DraftedTokens, PromptState, undivided
from protocols.errors import ModelError
from tests import model_lanes
from tests.inference.cache_rows import Rows
from tests.inference.engine_helpers import make_prompt
from tests.small_models import tiny

pytestmark = pytest.mark.usefixtures("device_path")

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
}
"""Families: plain attention, windows, attention that a model computes itself, and routes of experts."""


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does."""
    assert type(backend()) is Backend


class RoundedFormat(KVFormat):
    """The reference: keys and values are quantized and dequantized when they come, and held in their own type."""

    def packed(self, vectors: mx.array) -> tuple[mx.array, ...]:
        """Round."""
        return (PackedFormat(32).unpacked(PackedFormat(32).packed(vectors)),)


@pytest.fixture(params=["expanded", pytest.param("packed products", marks=pytest.mark.needs_float32)])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute attention as on a CPU, or as on a GPU; MLX's quantized products on a CPU add in 16 bits."""
    found: str = request.param
    monkeypatch.setattr(packed, "_on_gpu", lambda: found == "packed products")
    return found


@pytest.fixture(params=[1, 10**9], ids=["prompts shared", "prompts copied"])
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store prompts of several rows once, or once per row."""
    monkeypatch.setattr("clotho.inference.cache_layout.MIN_SAVED_BYTES", {"cpu": request.param, "gpu": request.param})


def layout_of(architecture: str, form: KVFormat, **overrides: Any) -> CacheLayout:
    """Return the layout of a tiny model whose running rows hold keys and values in a format."""
    layout = CacheLayout(tiny(architecture, vocab_size=256, **(SHAPES[architecture] | overrides)))
    probe_batching(layout)
    layout.hold(form)
    return layout


def both(architecture: str, slots: int) -> tuple[Rows, Rows]:
    """Return rows of a packed cache, and rows of the reference."""
    layouts = [layout_of(architecture, form) for form in (PackedFormat(32), RoundedFormat())]
    packed_rows, reference = (Rows(one.model, slots, BatchKVCache(one, slots, 65_536)) for one in layouts)
    return packed_rows, reference


def check_equal(found: Rows, expected: Rows) -> None:
    """Step both, and compare the live rows."""
    live_B = found.live_B
    np.testing.assert_allclose(found.step()[live_B], expected.step()[live_B], atol=model_lanes.atol(1e-4))


@pytest.mark.parametrize("architecture", list(SHAPES))
def test_rows_that_join_and_leave_equal_the_reference(architecture: str, products: str, sharing: None) -> None:
    """Groups and single rows of different lengths, slots in another order, more slots, and a cleared one."""
    pair = both(architecture, 5)

    def on_both(change: Callable[[Rows], None]) -> None:
        for rows in pair:
            change(rows)

    on_both(lambda rows: rows.enter([0, 1, 2], make_prompt(31)))
    on_both(lambda rows: rows.enter([3], make_prompt(12, 1)))
    check_equal(*pair)
    on_both(lambda rows: rows.enter([4], make_prompt(7, 2)))
    check_equal(*pair)
    on_both(lambda rows: rows.take([3, 0, 2]))
    check_equal(*pair)

    def grow(rows: Rows) -> None:
        rows.cache.grow(1)
        rows.tokens.append((0,))
        rows.live_B = np.append(rows.live_B, [False])
        rows.cache.clear(3)
        rows.enter([3], make_prompt(40, 3))

    on_both(grow)
    for _ in range(3):
        check_equal(*pair)


def test_rows_of_different_length_equal_the_reference(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is computed by runs of rows."""
    monkeypatch.setattr("clotho.inference.kv_cache.min_saved_scores", lambda token_bytes: 1)
    pair = both("qwen3", 4)
    for rows in pair:
        for slot, length in enumerate((200, 150, 20, 5)):
            rows.enter([slot], make_prompt(length, slot))
    check_equal(*pair)
    assert len(pair[0].cache.columns[None].runs) > 1
    check_equal(*pair)


def test_verifications_of_drafts_equal_the_reference(products: str, sharing: None) -> None:
    """Rows keep different numbers of tokens, so that they lag, and columns are aligned again."""
    layouts = [layout_of("qwen3", form) for form in (PackedFormat(32), RoundedFormat())]
    pair = [Rows(one.model, 3, VerifyingKVCache(one, 3, 65_536)) for one in layouts]
    due_B = np.ones(3, dtype=np.bool_)
    drafted = DraftedTokens.of(np.array([5, 8, 3], dtype=np.int32), {0: (6, 7), 1: (9,)})
    found: list[list[NDArray[np.float32]]] = []
    for rows in pair:
        rows.enter([0, 1], make_prompt(20))
        rows.enter([2], make_prompt(9, 1))
        positions_B = rows.positions_B
        verified_N_V = model_lanes.numpy(mx.array(rows.cache.verify(drafted, positions_B, due_B)))
        rows.cache.keep(np.array([3, 1, 1]))
        positions_B = positions_B + np.array([3, 1, 1], dtype=np.int32)
        parts = rows.cache.parts(np.array([4, 4, 4], dtype=np.int32), positions_B, due_B, divided=False)
        found.append([verified_N_V, model_lanes.numpy(mx.array(undivided(parts)))])
    for some, others in zip(*found, strict=True):
        np.testing.assert_allclose(some, others, atol=model_lanes.atol(1e-4))


def as_numpy(state: PromptState) -> Sequence[NDArray[np.float32]]:
    """Return the arrays of a state."""
    return [model_lanes.numpy(array) for arrays in state for array in arrays]


@pytest.mark.needs_float32
def test_what_leaves_the_cache_is_in_its_own_type() -> None:
    """The state of a row is the rounded keys and values as prefill returns them; routes of experts are not rounded."""
    layout = layout_of("qwen3_moe", PackedFormat(32))
    rows = Rows(layout.model, 1, BatchKVCache(layout, 1, 1000))
    rows.enter([0], make_prompt(9))
    cache = layout.fresh()
    layout.compute(mx.array([list(make_prompt(9)[:-1])]), cache)
    computed, held = as_numpy(layout.extract(cache, 0, 8)), as_numpy(rows.cache.state(0, 8))
    assert [one.shape for one in computed] == [one.shape for one in held]
    for one, other in zip(computed[:-2], held[:-2], strict=True):
        step = (one.max(-1) - one.min(-1)).max() / 255
        assert 0 < np.abs(one - other).max() <= 1.01 * step
    assert np.array_equal(computed[-2], held[-2])


def test_keys_are_rounded_to_256_values_of_their_group() -> None:
    """As MLX rounds weights: x = scale q + bias with q of 8 bits, a scale and a bias per group, per head and token."""
    numbers = np.random.default_rng(0).standard_normal((2, 3, 5, 64)).astype(np.float32)
    words, scales, biases = (np.array(one) for one in PackedFormat(32).packed(mx.array(numbers)))
    assert (words.shape, scales.shape, biases.shape) == ((2, 3, 5, 16), (2, 3, 5, 2), (2, 3, 5, 2))
    q = words.view(np.uint8).reshape(2, 3, 5, 2, 32)
    expected = (scales[..., None] * q + biases[..., None]).reshape(numbers.shape)
    held = PackedFormat(32).unpacked(PackedFormat(32).packed(mx.array(numbers)))
    np.testing.assert_allclose(np.array(held), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("group_size", "size", "expected"),
    [(None, 64, 68), (None, 128, 136), (None, 96, 108), (32, 64, 72), (128, 128, 132)],
)
def test_bytes_are_those_of_the_arrays(group_size: int | None, size: int, expected: int) -> None:
    """8 bits per number, and a scale and a bias of 16 bits per group: 0.53 of 16 bits with groups of 64."""
    form = PackedFormat(group_size)
    held = form.packed(mx.zeros((1, 1, 1, size), mx.bfloat16))
    assert sum(array.nbytes for array in held) == form.bytes(size, mx.bfloat16) == expected
    assert [one.shape[-1] for one in form.empty(1, 1, size, mx.bfloat16)] == [one.shape[-1] for one in held]


@pytest.mark.parametrize(("architecture", "head"), [("qwen3", 16), ("mamba2", None)])
def test_models_without_whole_groups_are_refused(architecture: str, head: int | None) -> None:
    """Heads that are no multiple of the group size, and models without keys."""
    layout = CacheLayout(tiny(architecture, **({"head_dim": head} if head else {})))
    before = layout.leaves
    with pytest.raises(ModelError, match=r"engine\.kv_quantization"):
        layout.hold(PackedFormat(None))
    assert layout.leaves == before


def test_the_layout_counts_packed_bytes() -> None:
    """Of running rows; prompts in the prefix cache are in their own type."""
    layout = layout_of("qwen3", PackedFormat(None), head_dim=64)
    (leaf, *_) = layout.leaves
    assert isinstance(leaf, AttentionLeaf)
    assert leaf.held_bytes == leaf.token_bytes * (8 + 2 * 8 * leaf.dtype.size / 64) / (8 * leaf.dtype.size)
