"""A run that starts from an adapter has its weights at step 0, whatever the format of the adapter is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from attachments.files.convert import convert
from clotho.models.parameters import flat
from clotho.settings.model import AdapterMethod
from clotho.storage.adapters import write_adapter
from clotho.storage.atomic_files import digest_file
from protocols.errors import ClothoError, ProfileError
from tests.training.policies_and_groups import same_bits
from tests.training_run.built_context import open_context, tiny_profile
from tests.training_run.directory.made_checkpoints import state
from training_run.directory.checkpoints import Snapshot, write_checkpoint
from training_run.directory.run_directory import read_origin
from training_run.profile.load import Layer, load_profile
from training_run.profile.schema import Profile
from training_run.run import RunContext
from training_run.start.adapter_settings import METHOD, with_adapter

pytestmark = pytest.mark.needs_float32
TRAINED: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 4, "scale": 1.5},
    "ranks": {
        "type": "lora",
        "rank": 4,
        "scale": 1.5,
        "ranks": ["q_proj=2"],
        "target_modules": ["q_proj", "down_proj"],
    },
    "last blocks": {"type": "lora", "rank": 4, "scale": 1.5, "num_layers": 1},
    "dora": {"type": "dora", "rank": 4, "scale": 1.5, "target_modules": ["v_proj"]},
    "head": {"type": "lora", "rank": 2, "scale": 1.5, "train_embeddings": True},
    "full": {"type": "full"},
}
"""Methods of runs whose weights other runs start from."""


def tensors(path: Path) -> dict[str, mx.array]:
    """Return the tensors of a safetensors file."""
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    return dict(loaded)


def values(contents: Any) -> Any:
    """Return arrays of the same shapes with other values."""
    mx.random.seed(5)
    changed = tree_map(lambda array: array + 0.1 * mx.random.normal(array.shape), contents)
    mx.eval(changed)
    return changed


async def trained(directory: Path, kind: str) -> tuple[Path, Any]:
    """Return the checkpoint of a run with this method, and its weights."""
    profile = tiny_profile(directory, run_dir=str(directory / "source"), policy={"method": TRAINED[kind]})
    async with open_context(profile) as parts:

        def write() -> tuple[Path, Any]:
            weights = values(parts.policy.trainable())
            snapshot = Snapshot(
                parameters=weights, optimizer={"x": mx.zeros(1)}, state=state(8),
                adapter_config=parts.policy.adapter_config,
            )  # fmt: skip
            path = write_checkpoint(parts.directory.checkpoints, snapshot, keep_last=3)
            write_adapter(parts.directory.adapters, weights, parts.policy.adapter_config)
            return path, weights

        return parts.compute.learner.submit(write).result()


def profile_from(directory: Path, adapter: object, flags: dict[str, Any] | None = None) -> Profile:
    """Return the profile of a new run that starts from an adapter. flags: settings of the command line by key path."""
    tiny_profile(directory)  # writes the base model and the problems
    lines = [
        "steps = 3",
        f'run_dir = "{directory / "run"}"',
        f'[model]\npath = "{directory / "base"}"',
        "[policy.method]\nrank = 16\nscale = 2.0\ntarget_modules = ['o_proj']",
        f'[data]\ntrain = "{directory / "train.jsonl"}"',
        '[[rewards]]\nname = "exact"\ncorrect = true',
        "[sampling]\ngroup_size = 2\nmax_tokens = 4",
        "[learner]\nbatch_size = 2",
        '[server]\ntype = "off"',
        '[monitor]\ndisplay = "none"',
    ]
    (directory / "new.toml").write_text("\n".join(lines))
    return load_profile(
        str(directory / "new.toml"), {"policy.adapter": str(adapter), **(flags or {})}, adjust=with_adapter
    )


@asynccontextmanager
async def started(directory: Path, adapter: object) -> AsyncIterator[RunContext]:
    """Yield the context of a new run that starts from an adapter."""
    async with open_context(profile_from(directory, adapter)) as parts:
        yield parts


@pytest.mark.parametrize("kind", ["ranks", "last blocks", "dora", "head", "full"])
async def test_a_run_starts_with_the_weights_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """Method, rank, scale and layers come from the checkpoint. The first checkpoint and the lineage record it."""
    path, weights = await trained(tmp_path, kind)
    async with started(tmp_path, path) as parts:
        assert same_bits(parts.policy_learner.parameters, weights)
        assert (parts.policy.version, parts.policy.step, parts.start.initial) == (0, 0, None)
        method = parts.profile.policy.method
        assert type(method).__struct_config__.tag == TRAINED[kind]["type"]
        if isinstance(method, AdapterMethod):
            assert (method.rank, method.effective_scale) == (TRAINED[kind]["rank"], 1.5)
        written = parts.directory.checkpoints / "step-000000" / "adapters.safetensors"
        assert same_bits(tensors(written), tensors(path / "adapters.safetensors"))
        origin = read_origin(parts.directory.lineage)
    assert origin is not None
    assert (origin.kind, origin.path, origin.format, origin.step) == ("adapter", str(path), "mlx", 8)
    assert origin.run_id == (tmp_path / "source" / ".run_id").read_text().strip()
    assert origin.sha256 == digest_file(path / "adapters.safetensors").sha256


@pytest.mark.parametrize("form", ["peft", *(pytest.param(form, marks=pytest.mark.slow) for form in ("npz", "gguf"))])
async def test_a_run_starts_with_an_adapter_of_another_format(tmp_path: Path, form: Any) -> None:
    """The values are those of mlx-lm's form."""
    path, weights = await trained(tmp_path, "ranks" if form == "npz" else "lora")
    other = tmp_path / ("other.gguf" if form == "gguf" else "other")
    convert(path, other, form, model=str(tmp_path / "base"))
    async with started(tmp_path, other) as parts:
        assert parts.start.origin is not None
        assert parts.start.origin.format == form
        found, expected = flat(parts.policy_learner.parameters), flat(weights)
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert mx.array_equal(array, expected[name]).item(), name


async def test_scales_that_differ_are_folded_into_b(tmp_path: Path) -> None:
    """PEFT states alpha for all modules and for some by name; rsLoRA divides by the root of the rank."""
    path, weights = await trained(tmp_path, "lora")
    peft = tmp_path / "peft"
    convert(path, peft, "peft", model=str(tmp_path / "base"))
    config = json.loads((peft / "adapter_config.json").read_text())
    config |= {"use_rslora": True, "lora_alpha": 8, "alpha_pattern": {"q_proj": 32}}
    (peft / "adapter_config.json").write_text(json.dumps(config))
    async with started(tmp_path, peft) as parts:
        method = parts.profile.policy.method
        assert isinstance(method, AdapterMethod)
        assert method.effective_scale == 8 / np.sqrt(4)
        found, expected = flat(parts.policy_learner.parameters), flat(weights)
        for name, array in found.items():
            factor = 4.0 if name.endswith("q_proj.lora_b") else 1.0
            assert mx.array_equal(array, factor * expected[name]).item(), name


async def test_a_resumed_run_has_the_initial_weights_although_the_adapter_is_gone(tmp_path: Path) -> None:
    """They are in the first checkpoint of the run, so a base policy without an evaluation can be evaluated."""
    path, weights = await trained(tmp_path, "lora")
    async with started(tmp_path, path) as parts:
        (tmp_path / "source").rename(tmp_path / "elsewhere")
        profile = parts.profile
    async with open_context(profile, resume=True) as parts:
        assert same_bits(parts.policy_learner.parameters, weights)
        assert parts.start.initial is not None
        assert same_bits(parts.start.initial, weights)
        assert parts.directory.lineage.exists()


async def test_a_run_is_named_by_its_directory_and_step(tmp_path: Path) -> None:
    """The final adapter of a run, or the checkpoint of a step."""
    path, weights = await trained(tmp_path, "lora")
    for number, name in enumerate((tmp_path / "source", f"{tmp_path / 'source'}@8")):
        profile = profile_from(tmp_path, name, {"run_dir": str(tmp_path / f"run{number}")})
        async with open_context(profile) as parts:
            assert same_bits(parts.policy_learner.parameters, weights)
            assert parts.start.origin is not None
            assert parts.start.origin.path == str(path if number else tmp_path / "source" / "adapters")


def refusal(directory: Path, adapter: object, flags: dict[str, Any] | None = None) -> str:
    """Return the message of a refused start, which is one line."""
    with pytest.raises(ClothoError) as caught:
        profile_from(directory, adapter, flags)
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_settings_that_contradict_the_adapter_are_refused_by_name(tmp_path: Path) -> None:
    """With the key, its value and that of the adapter. Settings of lower layers are overridden; equal ones agree."""
    path, _ = await trained(tmp_path, "ranks")
    agreeing: list[dict[str, Any]] = [
        {"policy.method.rank": 4}, {"policy.method.scale": 1.5}, {"policy.method.alpha": 6.0},
        {"policy.method.target_modules": ["self_attn.q_proj", "down_proj"]}, {"policy.method.ranks": ["q_proj=2"]},
        {"policy.method": "lora"}, {"policy.method.dropout": 0.25},
    ]  # fmt: skip
    for flags in agreeing:
        method = profile_from(tmp_path, path, flags).policy.method
        assert isinstance(method, AdapterMethod)
        assert (method.rank, method.scale, len(method.target_modules), method.ranks) == (
            4, 1.5, 2, ("self_attn.q_proj=2",),
        )  # fmt: skip
    contradicting: list[tuple[str, Any, str]] = [
        ("rank", 8, "rank = 4"), ("scale", 2.0, "scale = 1.5"), ("alpha", 12.0, "the scale 1.5 and the rank 4"),
        ("target_modules", ["q_proj"], "down_proj"), ("ranks", ["down_proj=2"], "q_proj=2"),
        ("num_layers", 1, "num_layers = -1"), ("type", "dora", '"lora"'), ("train_embeddings", True, "= false"),
    ]  # fmt: skip
    for key, value, found in contradicting:
        message = refusal(tmp_path, path, {f"{METHOD}{key}" if key != "type" else "policy.method": value})
        assert f"policy.method{'' if key == 'type' else f'.{key}'} = " in message
        assert found in message
        assert str(path) in message


async def test_what_a_run_cannot_train_is_refused_by_name(tmp_path: Path) -> None:
    """Other weights of PEFT, ranks and layers that differ between blocks, and modules outside of the blocks."""
    path, _ = await trained(tmp_path, "lora")
    peft = tmp_path / "peft"
    convert(path, peft, "peft", model=str(tmp_path / "base"))
    config = json.loads((peft / "adapter_config.json").read_text())
    for key, value in (("modules_to_save", ["lm_head"]), ("bias", "all"), ("peft_type", "IA3")):
        (peft / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        assert key in refusal(tmp_path, peft)
    arrays = tensors(path / "adapters.safetensors")
    name = "model.layers.1.self_attn.q_proj.lora_"
    narrow = {f"{name}a": arrays[f"{name}a"][:, :2], f"{name}b": arrays[f"{name}b"][:2]}
    for changed, expected in (
        (arrays | narrow, "q_proj has rank 4 in block 0 and rank 2 in block 1"),
        ({key: array for key, array in arrays.items() if name not in key}, "none in block 1"),
    ):
        mx.save_safetensors(str(path / "adapters.safetensors"), changed)
        assert expected in refusal(tmp_path, path)
    assert "does not exist" in refusal(tmp_path, tmp_path / "nothing")
    assert "has no adapter_config.json" in refusal(tmp_path, tmp_path / "base")


async def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """Before the run directory changes."""
    path, _ = await trained(tmp_path, "head")
    profile = profile_from(tmp_path, path)
    arrays = tensors(path / "adapters.safetensors")
    arrays["model.embed_tokens.weight"] = mx.zeros((8, 8))
    mx.save_safetensors(str(path / "adapters.safetensors"), arrays)
    with pytest.raises(ClothoError) as caught:
        async with open_context(profile):
            raise AssertionError("it was assembled")
    assert "model.embed_tokens.weight" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_layers_without_an_adapter_stay_as_they_are() -> None:
    """An empty value disables the adapter of a lower layer."""
    layers = [Layer("file", {"policy.adapter": "/a"}), Layer("command line", {"policy.adapter": ""})]
    assert with_adapter(layers) == layers
    with pytest.raises(ProfileError):
        with_adapter(layers[:1])
