"""Adapters on disk: mlx-lm loads them, and reading checks every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_map
from msgspec.structs import replace

from clotho.models.policy import Policy, load_policy
from clotho.settings.model import ModelSection
from clotho.storage.adapters import (
    CONFIG,
    TENSORS,
    pad_ranks,
    read_adapter,
    read_adapter_config,
    require_own_adapter,
    unpad_ranks,
    write_adapter,
)
from clotho.storage.tensors import named_arrays, read_tensors
from protocols.checkpoint import AdapterConfig, LoRAParameters
from protocols.errors import CheckpointError, RunDirectoryError
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG as DENSE
from tests.saved_models import MIXTURE, TOKENS_1_T, UNTIED, save


def trained(base: Path, **section: Any) -> Policy:
    """Return a policy whose parameters differ from the base."""
    policy = load_policy(ModelSection(path=str(base)), policy_settings(**section), seed=0, keep_reference=False)
    mx.random.seed(5)
    moved = tree_map(lambda array: array + mx.random.normal(array.shape) * 0.1, policy.trainable())
    mx.eval(moved)
    policy.publish(moved, version=1, step=1, fingerprint="")
    return policy


RANKS = {"ranks": ("down_proj=3", "q_proj=16")}


@pytest.mark.parametrize(
    ("config", "bits", "section"),
    [
        (DENSE, 0, {"num_layers": 1, "rank": 3, "alpha": 12.0, "target_modules": ("q_proj", "down_proj")}),
        (DENSE, 4, {"alpha": 12.0, "scaling": "rank_stabilized"}),
        (MIXTURE, 0, {}),
        (DENSE, 0, {"kind": "full"}),
        (DENSE, 4, {"kind": "dora", "num_layers": 1, "rank": 3}),
        (MIXTURE, 0, {"kind": "dora", "target_modules": ("self_attn.q_proj", "mlp.gate")}),
        (DENSE, 4, RANKS),
        (MIXTURE, 0, RANKS),
        (DENSE, 0, {"kind": "dora", **RANKS}),
        (UNTIED, 0, {"train_embeddings": True, "train_head": True, **RANKS}),
        (UNTIED, 0, {"kind": "dora", "train_head": True, "num_layers": 1}),
        (MIXTURE, 0, {"train_embeddings": True}),
    ],
    ids=str,
)
def test_mlx_lm_loads_written_adapters(tmp_path: Path, config: Any, bits: int, section: Any) -> None:
    """`mlx_lm.load(base, adapter_path=...)` computes the logits of the policy, up to rounding of the CPU layers.

    Unequal ranks are padded with zeros; weights beside an adapter are fused into full weights.
    """
    base = save(tmp_path / "base", config, bits=bits)
    policy = trained(base, **section)
    write_adapter(tmp_path / "adapter", *policy.loadable(policy.trainable()))
    loaded = mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))[0]
    untrained = mlx_lm.load(str(base))[0]
    assert mx.allclose(loaded(TOKENS_1_T), policy.model(TOKENS_1_T), rtol=1e-5, atol=2e-5).item()
    assert not mx.allclose(loaded(TOKENS_1_T), untrained(TOKENS_1_T), atol=1e-2).item()


@pytest.mark.parametrize("section", [{"kind": "dora", **RANKS}, {"train_embeddings": True, "train_head": True}])
def test_checkpoints_of_every_method_keep_every_bit(tmp_path: Path, section: Any) -> None:
    """The policy's own tensors: unpadded ranks, and weights beside the adapter."""
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


def test_mlx_lm_refuses_weights_beside_an_adapter(tmp_path: Path) -> None:
    """mlx-lm never loads such a checkpoint without its embeddings."""
    base = save(tmp_path / "base")
    policy = trained(base, train_embeddings=True)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: not an adapter parameter"):
        mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))


def test_the_configuration_has_the_keys_of_mlx_lm(tmp_path: Path) -> None:
    """Keys and nesting follow the documentation of mlx-lm."""
    policy = trained(save(tmp_path / "base"), target_modules=("q_proj",), rank=4, dropout=0.1)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text()) == {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": 4, "scale": 8.0, "dropout": 0.1, "keys": ["self_attn.q_proj"]},
        "model": str(tmp_path / "base"),
    }


def test_every_unexpected_tensor_is_listed(tmp_path: Path) -> None:
    """Missing, unexpected, not finite, or of another shape or dtype: all in one message."""
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


def test_an_adapter_with_other_settings_is_refused(tmp_path: Path) -> None:
    """A different scale has the same shapes, therefore the configuration is compared."""
    base = save(tmp_path / "base")
    policy = trained(base, scale=5.0, rank=4)
    write_adapter(tmp_path / "adapter", policy.trainable(), policy.adapter_config)
    other = trained(base)
    with pytest.raises(CheckpointError, match=r"rank is 4, not 16; scale is 5\.0, not 2\.0"):
        read_adapter(tmp_path / "adapter", other.trainable(), other.adapter_config)
    (tmp_path / "adapter" / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_adapter(tmp_path / "adapter", other.trainable(), other.adapter_config)


@pytest.mark.parametrize("text", [b'{"fine_tune_type": "\xff"}', b'{"model": "' + b"\xff" * 4000 + b'"}', b"\x00"])
def test_a_configuration_that_is_no_text_is_refused_in_a_short_line(tmp_path: Path, text: bytes) -> None:
    """A checkpoint whose manifest was written again for such a file passes the comparison of digests."""
    (tmp_path / CONFIG).write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(tmp_path)
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 300


def test_writing_into_a_directory_keeps_other_files(tmp_path: Path) -> None:
    """--adapter-path may name a directory with other files."""
    policy = trained(save(tmp_path / "base"))
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep me")
    for _ in range(2):
        write_adapter(target, policy.trainable(), policy.adapter_config)
    assert sorted(path.name for path in target.iterdir()) == [CONFIG, TENSORS, "notes.txt"]
    assert (target / "notes.txt").read_text() == "keep me"


def test_new_tensors_never_appear_beside_an_old_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure between the two files, the directory has no tensors instead of a mismatched pair."""
    base = save(tmp_path / "base")
    small, large = trained(base, scale=1.0), trained(base, scale=2.0)
    write_adapter(tmp_path / "adapter", small.trainable(), small.adapter_config)

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clotho.storage.adapters.write_tensors", full)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        write_adapter(tmp_path / "adapter", large.trainable(), large.adapter_config)
    assert not (tmp_path / "adapter" / TENSORS).exists()


def test_tensors_of_other_writers_are_read(tmp_path: Path) -> None:
    """Any safetensors file is read."""
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a": mx.ones((2,))})
    assert read_tensors(tmp_path / "x.safetensors").keys() == {"a"}


PADDED = AdapterConfig(
    fine_tune_type="lora",
    num_layers=-1,
    lora_parameters=LoRAParameters(rank=4, scale=1.0, dropout=0.0, keys=("mlp.up", "experts.mlp.up", "attn.q")),
    ranks={"mlp.up": 2, "experts.mlp.up": 3},
)


def low_rank_arrays() -> dict[str, mx.array]:
    """Return a dense layer of rank 2, five experts of rank 3, a layer of rank 4, and an embedding."""
    shapes = {
        "model.layers.0.mlp.up.lora_a": (6, 2), "model.layers.0.mlp.up.lora_b": (2, 7), "model.layers.0.mlp.up.m": (7,),
        "model.layers.0.experts.mlp.up.lora_a": (5, 3, 6), "model.layers.0.experts.mlp.up.lora_b": (5, 7, 3),
        "model.layers.0.attn.q.lora_a": (6, 4), "model.embed.weight": (9, 6),
    }  # fmt: skip
    made = {name: mx.random.normal(shape, key=mx.random.key(1)) for name, shape in shapes.items()}
    mx.eval(made)
    return made


def test_padding_extends_the_rank_axis_and_keeps_the_product() -> None:
    """The longest matching key determines the rank; other arrays are unchanged."""
    given, wide = low_rank_arrays(), pad_ranks(low_rank_arrays(), PADDED)
    assert {name.removeprefix("model.").removeprefix("layers.0."): array.shape for name, array in wide.items()} == {
        "mlp.up.lora_a": (6, 4), "mlp.up.lora_b": (4, 7), "mlp.up.m": (7,), "experts.mlp.up.lora_a": (5, 4, 6),
        "experts.mlp.up.lora_b": (5, 7, 4), "attn.q.lora_a": (6, 4), "embed.weight": (9, 6),
    }  # fmt: skip
    for layer in ("mlp.up", "experts.mlp.up"):
        a, b = f"model.layers.0.{layer}.lora_a", f"model.layers.0.{layer}.lora_b"
        if layer == "mlp.up":
            narrow_product, wide_product = given[a] @ given[b], wide[a] @ wide[b]
        else:
            narrow_product, wide_product = given[b] @ given[a], wide[b] @ wide[a]
        np.testing.assert_allclose(np.array(wide_product), np.array(narrow_product), rtol=1e-5, atol=1e-6)


def test_unpadding_restores_every_bit() -> None:
    """Arrays without the padded shape are unchanged; the caller reports them."""
    given = low_rank_arrays()
    restored = unpad_ranks(pad_ranks(given, PADDED), PADDED)
    assert all(mx.array_equal(restored[name], array).item() for name, array in given.items())
    assert unpad_ranks(given, PADDED)["model.layers.0.mlp.up.lora_a"].shape == (6, 2)


def test_unpadding_refuses_nonzero_padding() -> None:
    """The tensor has a larger rank than its configuration."""
    wide = pad_ranks(low_rank_arrays(), PADDED)
    name = "model.layers.0.mlp.up.lora_b"
    wide[name] = wide[name] + 1e-8
    with pytest.raises(CheckpointError, match=rf"{name} has a larger rank than 2"):
        unpad_ranks(wide, PADDED)


def test_a_single_rank_is_not_padded() -> None:
    """The arrays are not copied."""
    given = low_rank_arrays()
    config = AdapterConfig(fine_tune_type="lora", num_layers=-1, lora_parameters=PADDED.lora_parameters)
    assert all(pad_ranks(given, config)[name] is array for name, array in given.items())


def run_adapter(directory: Path, run_id: str) -> None:
    """Write an adapter of a run."""
    config = replace(PADDED, ranks={}, run_id=run_id)
    write_adapter(directory, {"layers": [{"lora_a": mx.ones((3, 4))}]}, config)


def test_an_adapter_of_another_run_is_never_overwritten(tmp_path: Path) -> None:
    """Also an adapter of mlx-lm, which has no run id, and tensors without a configuration."""
    target = tmp_path / "adapter"
    require_own_adapter(target, "one")
    run_adapter(target, "one")
    require_own_adapter(target, "one")
    run_adapter(target, "one")
    for with_config in (True, False):
        if not with_config:
            (target / CONFIG).unlink()
        before = (target / TENSORS).read_bytes()
        with pytest.raises(RunDirectoryError, match="that this run did not write"):
            require_own_adapter(target, "two")
        with pytest.raises(RunDirectoryError):
            run_adapter(target, "two")
        assert (target / TENSORS).read_bytes() == before


def test_a_file_is_not_an_adapter_directory(tmp_path: Path) -> None:
    """The message names the key."""
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"checkpoint\.adapter_path"):
        require_own_adapter(tmp_path / "file", "one")


def test_fused_weights_name_their_base_model(tmp_path: Path) -> None:
    """As an adapter does: mlx-lm and `merge` find the model by this name."""
    policy = trained(save(tmp_path / "base", UNTIED), train_head=True)
    _, config = policy.loadable(policy.trainable())
    assert config.fine_tune_type == "full"
    assert config.model == policy.adapter_config.model == str(tmp_path / "base")
