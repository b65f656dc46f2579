"""Adapters on disk: mlx-lm loads them as they are, and nothing unchecked comes back in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_map

from clotho.config.schema import ModelSection, PolicySection
from clotho.models.policy import Policy, load_policy
from clotho.storage.adapters import CONFIG, TENSORS, read_adapter, write_adapter
from clotho.storage.atomic_files import write_file
from clotho.storage.tensors import named_arrays, read_tensors, tensor_chunks
from protocols.errors import CheckpointError, RunDirectoryError
from tests.saved_models import CONFIG as DENSE
from tests.saved_models import MIXTURE, TOKENS_1_T, UNTIED, save


def trained(base: Path, **section: Any) -> Policy:
    """A policy whose parameters have moved away from the base."""
    policy = load_policy(ModelSection(path=str(base)), PolicySection(**section), seed=0, keep_reference=False)
    mx.random.seed(5)
    moved = tree_map(lambda array: array + mx.random.normal(array.shape) * 0.1, policy.trainable())
    mx.eval(moved)
    policy.publish(moved, version=1, step=1, fingerprint="")
    return policy


@pytest.mark.parametrize(
    ("config", "bits", "section"),
    [
        (DENSE, 0, {}),
        (DENSE, 0, {"num_layers": 1, "rank": 3, "alpha": 12.0, "target_modules": ("q_proj", "down_proj")}),
        (DENSE, 0, {"alpha": 12.0, "scaling": "rank_stabilized"}),
        (DENSE, 4, {"scale": 2.5}),
        (MIXTURE, 0, {}),
        (DENSE, 0, {"kind": "full"}),
        (DENSE, 0, {"kind": "dora", "num_layers": 1, "rank": 3}),
        (DENSE, 4, {"kind": "dora"}),
        (MIXTURE, 0, {"kind": "dora", "target_modules": ("self_attn.q_proj", "mlp.gate")}),
    ],
    ids=[
        "default",
        "some modules",
        "rank stabilised",
        "quantised base",
        "mixture of experts",
        "all weights",
        "dora",
        "dora, quantised base",
        "dora beside experts",
    ],
)
def test_mlx_lm_loads_what_was_written(tmp_path: Path, config: Any, bits: int, section: Any) -> None:
    """`mlx_lm.load(base, adapter_path=...)` computes the policy's logits, but for the rounding of its CPU layers."""
    base = save(tmp_path / "base", config, bits=bits)
    policy = trained(base, **section)
    write_adapter(tmp_path / "adapter", *policy.loadable(policy.trainable()))
    loaded = mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))[0]
    untrained = mlx_lm.load(str(base))[0]
    assert mx.allclose(loaded(TOKENS_1_T), policy.model(TOKENS_1_T), rtol=1e-5, atol=1e-5).item()
    assert not mx.allclose(loaded(TOKENS_1_T), untrained(TOKENS_1_T)).item()


RANKS = {"ranks": ("down_proj=3", "q_proj=16")}


@pytest.mark.parametrize(
    ("config", "bits", "section"),
    [
        (DENSE, 0, RANKS),
        (DENSE, 4, RANKS),
        (MIXTURE, 0, RANKS),
        (DENSE, 0, {"kind": "dora", **RANKS}),
        (DENSE, 0, {"train_embeddings": True}),
        (UNTIED, 0, {"train_embeddings": True, "train_head": True, **RANKS}),
        (UNTIED, 0, {"kind": "dora", "train_head": True, "num_layers": 1}),
        (MIXTURE, 0, {"train_embeddings": True}),
    ],
    ids=[
        "ranks",
        "ranks, quantised base",
        "ranks, mixture of experts",
        "ranks, dora",
        "tied embeddings",
        "embeddings, head and ranks",
        "dora and head",
        "embeddings, mixture of experts",
    ],
)
def test_what_mlx_lm_has_no_form_for_it_loads_as_an_equal_function(
    tmp_path: Path, config: Any, bits: int, section: Any
) -> None:
    """Padded with zeros, or fused into full weights: other sums of the same terms, so equal up to rounding."""
    base = save(tmp_path / "base", config, bits=bits)
    policy = trained(base, **section)
    write_adapter(tmp_path / "adapter", *policy.loadable(policy.trainable()))
    loaded = mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))[0]
    untrained = mlx_lm.load(str(base))[0]
    assert mx.allclose(loaded(TOKENS_1_T), policy.model(TOKENS_1_T), rtol=1e-5, atol=2e-5).item()
    assert not mx.allclose(loaded(TOKENS_1_T), untrained(TOKENS_1_T), atol=1e-2).item()


@pytest.mark.parametrize("section", [{"kind": "dora", **RANKS}, {"train_embeddings": True, "train_head": True}])
def test_a_checkpoint_of_anything_comes_back_bit_for_bit(tmp_path: Path, section: Any) -> None:
    """In the policy's own form: ranks as they are, the adapter apart from the weights beside it."""
    base = save(tmp_path / "base", UNTIED)
    policy = trained(base, **section)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    found = named_arrays(read_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config))
    written = named_arrays(policy.trainable())
    assert found.keys() == written.keys()
    assert all(mx.array_equal(found[name], array).item() for name, array in written.items())
    other = trained(base)
    with pytest.raises(CheckpointError, match=r"(ranks is \{'mlp|trained_weights is \('lm_head\.weight'|kind)"):
        read_adapter(tmp_path / "adapter", other.trainable(), other.adapter_config)


def test_mlx_lm_refuses_rather_than_forgets_weights_beside_an_adapter(tmp_path: Path) -> None:
    """A checkpoint with trained embeddings is never loaded without them."""
    base = save(tmp_path / "base")
    policy = trained(base, train_embeddings=True)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: not an adapter parameter"):
        mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))


def test_the_configuration_is_mlx_lms(tmp_path: Path) -> None:
    """The keys and their nesting are those that mlx-lm documents."""
    policy = trained(save(tmp_path / "base"), target_modules=("q_proj",), rank=4, dropout=0.1)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text()) == {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.1, "keys": ["self_attn.q_proj"]},
        "model": str(tmp_path / "base"),
    }


def test_an_adapter_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Into a fresh policy of the same profile."""
    base = save(tmp_path / "base")
    policy = trained(base)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    fresh = load_policy(ModelSection(path=str(base)), PolicySection(), seed=1, keep_reference=False)
    found = read_adapter(tmp_path / "adapter", fresh.trainable(), fresh.adapter_config)
    fresh.publish(found, version=1, step=1, fingerprint="")
    assert mx.array_equal(fresh.model(TOKENS_1_T), policy.model(TOKENS_1_T)).item()


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    """Missing, extra, misshapen, mistyped and not finite, all in one message."""
    policy = trained(save(tmp_path / "base"))
    arrays = named_arrays(policy.trainable())
    names = list(arrays)
    missing = names[0]
    damaged = dict(arrays)
    del damaged[missing]
    damaged["model.layers.0.other.lora_a"] = mx.zeros((2, 2))
    damaged[names[1]] = mx.zeros((1, 1))
    damaged[names[2]] = arrays[names[2]].astype(mx.float16)
    damaged[names[3]] = mx.full(arrays[names[3]].shape, float("nan"))
    mx.eval(damaged)
    write_adapter(tmp_path / "adapter", damaged, policy.adapter_config)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    for words in (
        f"{missing} is missing",
        "model.layers.0.other.lora_a is not a trained parameter",
        f"{names[1]} has shape (1, 1)",
        f"{names[2]} is mlx.core.float16",
        f"{names[3]} is not finite",
    ):
        assert words in str(caught.value)


def test_an_adapter_of_another_kind_is_refused_with_the_difference(tmp_path: Path) -> None:
    """Another scale fits every shape and would compute something else: the configuration is compared."""
    base = save(tmp_path / "base")
    policy = trained(base, scale=5.0, rank=4)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    other = trained(base)
    with pytest.raises(CheckpointError, match=r"rank is 4, not 8; scale is 5\.0, not 10\.0"):
        read_adapter(tmp_path / "adapter", other.trainable(), other.adapter_config)
    (tmp_path / "adapter" / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_adapter(tmp_path / "adapter", other.trainable(), other.adapter_config)


def test_writing_into_a_directory_keeps_what_else_is_there(tmp_path: Path) -> None:
    """--adapter-path may name a directory with a person's own files."""
    policy = trained(save(tmp_path / "base"))
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep me")
    for _ in range(2):
        write_adapter(target, policy.trainable(), policy.adapter_config)
    assert sorted(path.name for path in target.iterdir()) == [CONFIG, TENSORS, "notes.txt"]
    assert (target / "notes.txt").read_text() == "keep me"


def test_new_tensors_never_stand_beside_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the two files, the directory holds no tensors at all rather than a pair that does not match."""
    base = save(tmp_path / "base")
    small, large = trained(base, scale=1.0), trained(base, scale=2.0)
    write_adapter(tmp_path / "adapter", small.trainable(), small.adapter_config)

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clotho.storage.adapters.tensor_chunks", full)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        write_adapter(tmp_path / "adapter", large.trainable(), large.adapter_config)
    assert not (tmp_path / "adapter" / TENSORS).exists()


def test_tensors_are_read_from_nothing_but_safetensors(tmp_path: Path) -> None:
    """A file written by hand in the same form is read like our own."""
    write_file(tmp_path / "x.safetensors", tensor_chunks({"a": mx.ones((2,))}))
    assert read_tensors(tmp_path / "x.safetensors").keys() == {"a"}
