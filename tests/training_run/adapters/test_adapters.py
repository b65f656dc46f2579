"""Adapter directories of mlx-lm and PEFT: what is read, and what is refused before memory is allocated."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from attachments.adapters.tests.adapter_models import random_matrices, write_mlx_adapter
from clotho.settings.server import AdaptersSection
from protocols.errors import AdapterRequestError
from tests.saved_models import save
from tests.small_models import tiny
from training_run.adapters.contents import Adapter, adapter_targets, recorded_base
from training_run.adapters.formats import Target, place_of
from training_run.adapters.reading import read_adapter

LIMITS = AdaptersSection(max_bytes=2**24, max_rank=16)
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    """Return the layers of a tiny Qwen3."""
    return adapter_targets(tiny("qwen3"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write a valid adapter of rank 4."""
    return write_mlx_adapter(tmp_path / "adapter", tiny("qwen3"), rank=4, scale=2.5)


def write_peft(
    directory: Path, arrays: dict[str, np.ndarray[Any, Any]], *, rank: int, alpha: float, **settings: object
) -> Path:
    """Write matrices of mlx-lm's layout as PEFT does: transposed, with alpha."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    tensors = {}
    for name, array in arrays.items():
        module, _, matrix = name.rpartition(".")
        tensors[f"base_model.model.{module}.{names[matrix]}"] = np.ascontiguousarray(array.T)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def refusal(directory: Path, targets: dict[str, Target], limits: AdaptersSection = LIMITS) -> AdapterRequestError:
    """Return the error that reading raises."""
    with pytest.raises(AdapterRequestError) as error:
        read_adapter(directory, targets, limits)
    return error.value


def test_an_adapter_of_mlx_lm_keeps_its_matrices_and_its_absolute_scale(
    directory: Path, targets: dict[str, Target]
) -> None:
    """The scale of mlx-lm is not divided by the rank."""
    contents = read_adapter(directory, targets, LIMITS)
    assert set(contents.scales.values()) == {2.5}
    assert contents.rank == 4
    name = "model.layers.0.self_attn.q_proj"
    assert contents.arrays[f"{name}.lora_a"].shape == (targets[name].inputs, 4)
    assert contents.arrays[f"{name}.lora_b"].shape == (4, targets[name].outputs)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 4), (True, 16 / 2)])
def test_an_adapter_of_peft_is_transposed_and_scaled_by_alpha(
    tmp_path: Path, targets: dict[str, Target], rslora: bool, scale: float
) -> None:
    """The scale is alpha / rank, and alpha / sqrt(rank) for rsLoRA."""
    arrays = random_matrices(targets, 4, seed=0)
    contents = read_adapter(write_peft(tmp_path, arrays, rank=4, alpha=16, use_rslora=rslora), targets, LIMITS)
    assert set(contents.scales.values()) == {scale}
    assert contents.arrays.keys() == arrays.keys()
    assert all((contents.arrays[name] == arrays[name]).all() for name in arrays)


def test_an_alpha_pattern_of_peft_applies_to_its_modules_only(tmp_path: Path, targets: dict[str, Target]) -> None:
    """Modules of other names keep `lora_alpha`; the first pattern that matches counts."""
    arrays = random_matrices(targets, 4, seed=0, modules=("q_proj", "v_proj"))
    contents = read_adapter(
        write_peft(tmp_path, arrays, rank=4, alpha=8, alpha_pattern={"q_proj": 20, "self_attn.q_proj": 40}),
        targets,
        LIMITS,
    )
    assert contents.scales["model.layers.0.self_attn.q_proj"] == 5.0
    assert contents.scales["model.layers.0.self_attn.v_proj"] == 2.0


def test_experts_of_peft_are_stacked(tmp_path: Path) -> None:
    """The Hugging Face model has a linear layer per expert, mlx-lm one layer for all experts."""
    targets = adapter_targets(tiny("qwen3_moe"))
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    random = np.random.default_rng(0)
    arrays = {
        f"model.layers.0.mlp.experts.{expert}.up_proj.{matrix}": random.standard_normal(shape).astype(np.float32)
        for expert in range(targets[name].experts)
        for matrix, shape in (("lora_a", (targets[name].inputs, 4)), ("lora_b", (4, targets[name].outputs)))
    }
    contents = read_adapter(write_peft(tmp_path, arrays, rank=4, alpha=4), targets, LIMITS)
    assert contents.arrays.keys() == {f"{name}.lora_a", f"{name}.lora_b"}
    for expert in range(targets[name].experts):
        own = f"model.layers.0.mlp.experts.{expert}.up_proj"
        assert (contents.arrays[f"{name}.lora_a"][expert] == arrays[f"{own}.lora_a"].T).all()
        assert (contents.arrays[f"{name}.lora_b"][expert] == arrays[f"{own}.lora_b"].T).all()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_becomes_float32(tmp_path: Path, targets: dict[str, Target], dtype: str) -> None:
    """Both 16-bit types keep their values."""
    name = "model.layers.0.self_attn.q_proj"
    arrays = {}
    for matrix, shape in (("lora_a", (targets[name].inputs, 2)), ("lora_b", (2, targets[name].outputs))):
        arrays[f"{name}.{matrix}"] = np.arange(np.prod(shape)).reshape(shape).astype(np.float32) % 64
    write_raw(tmp_path, {key: (dtype, array) for key, array in arrays.items()})
    contents = read_adapter(tmp_path, targets, LIMITS)
    assert all((contents.arrays[key] == arrays[key]).all() for key in arrays)


def write_raw(directory: Path, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]], **entry: object) -> None:
    """Write a safetensors file by hand. entry: fields that replace those of every tensor in the header."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        half = (array.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        raw = {"F32": array.astype("<f4"), "F16": array.astype("<f2"), "BF16": half}.get(dtype, array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets, **entry}
        data += raw
    text = json.dumps(header).encode()
    (directory / "adapters.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0}}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def set_config(**values: object) -> Change:
    """Return a change of the configuration."""

    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def set_tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Return a change of the tensors."""

    def apply(directory: Path) -> None:
        from safetensors.numpy import load_file

        path = directory / "adapters.safetensors"
        save_file(change(load_file(path)), path)

    return apply


def first(change: Callable[[Any], Any]) -> Change:
    """Return a change of the first tensor."""

    def apply(tensors: dict[str, Any]) -> dict[str, Any]:
        name = min(tensors)
        return {**tensors, name: np.ascontiguousarray(change(tensors[name]))}

    return set_tensors(apply)


def not_finite(array: Any) -> Any:
    """Return the array with one NaN."""
    changed = array.copy()
    changed.flat[-1] = np.nan
    return changed


def overlap(directory: Path) -> None:
    """Let the last tensor begin one byte before its data."""
    path = directory / "adapters.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    header[last]["data_offsets"] = [position - 4 for position in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def make_link(path: Path) -> None:
    """Replace a file by a link to it."""
    path.symlink_to(path.rename(path.with_name("other")))


def make_directory(path: Path) -> None:
    """Replace a file by an empty directory."""
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    """Replace a file by a pipe without writer."""
    path.unlink()
    os.mkfifo(path)


INVALID: dict[str, Change] = {
    "dora": set_config(fine_tune_type="dora"),
    "full": set_config(fine_tune_type="full"),
    "a list of methods": set_config(fine_tune_type=["lora"]),
    "no scale": set_config(lora_parameters={"rank": 4, "alpha": 8}),
    "infinite scale": lambda d: (d / "adapter_config.json").write_text('{"lora_parameters": {"scale": 1e999}}'),
    "enormous scale": set_config(lora_parameters={"rank": 4, "scale": 1e308, "dropout": 0.0}),
    "negative enormous scale": set_config(lora_parameters={"rank": 4, "scale": -1e30, "dropout": 0.0}),
    "overlapping tensors": overlap,
    "trained weights": set_config(trained_weights=["lm_head.weight"]),
    "configuration is a list": lambda d: (d / "adapter_config.json").write_text("[]"),
    "configuration is not JSON": lambda d: (d / "adapter_config.json").write_bytes(b"\xff\xfe"),
    "deep configuration": lambda d: (d / "adapter_config.json").write_text("[" * 100_000),
    "empty file": lambda d: (d / "adapters.safetensors").write_bytes(b""),
    "pickle": lambda d: (d / "adapters.safetensors").write_bytes(b"\x80\x04K\x01."),
    "endless header": lambda d: (d / "adapters.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    "header is a list": lambda d: (d / "adapters.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
    "truncated": lambda d: os.truncate(d / "adapters.safetensors", (d / "adapters.safetensors").stat().st_size - 4),
    "link": lambda d: make_link(d / "adapters.safetensors"),
    "pipe": lambda d: make_pipe(d / "adapters.safetensors"),
    "directory": lambda d: make_directory(d / "adapters.safetensors"),
    "unknown tensor": set_tensors(lambda t: {**t, "model.layers.9.self_attn.q_proj.lora_a": t[min(t)]}),
    "weight beside": set_tensors(lambda t: {**t, "lm_head.weight": t[min(t)]}),
    "dora magnitude": set_tensors(lambda t: {**t, f"{min(t).removesuffix('.lora_a')}.m": np.ones(4, np.float32)}),
    "no tensors": set_tensors(lambda _: {}),
    "only A": set_tensors(lambda t: {name: t[name] for name in t if name.endswith("lora_a")}),
    "not finite": first(not_finite),
    "transposed": first(lambda a: a.T),
    "one axis": first(lambda a: a.reshape(-1)),
    "rank 0": set_tensors(lambda t: {n: a[:, :0] if n.endswith("lora_a") else a[:0] for n, a in t.items()}),
    "other ranks": first(lambda a: a[:, :2]),
    "integers": first(lambda a: a.astype(np.int32)),
}


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID)
def test_a_hostile_adapter_is_refused(change: Change, directory: Path, targets: dict[str, Target]) -> None:
    """Each is one AdapterRequestError of one line; the unchanged directory is accepted."""
    assert isinstance(read_adapter(directory, targets, LIMITS), Adapter)
    change(directory)
    error = refusal(directory, targets)
    assert error.reason == "invalid"
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2**40, 2**40]}, {"shape": [-32, -2]}, {"shape": [32.5, 2]}, {"shape": ["a"]},
        {"data_offsets": [0, 2**60]}, {"data_offsets": [-8, 0]}, {"data_offsets": [0, 4]}, {"data_offsets": None},
        {"dtype": "F64"}, {"dtype": None},
    ],
)  # fmt: skip
def test_a_header_that_contradicts_the_file_or_the_model_is_refused(
    entry: dict[str, object], tmp_path: Path, targets: dict[str, Target]
) -> None:
    """Sizes come from the header, which is compared with the model before memory is allocated."""
    name = "model.layers.0.self_attn.q_proj"
    a, b = np.ones((targets[name].inputs, 2)), np.ones((2, targets[name].outputs))
    tensors = {f"{name}.lora_a": ("F32", a), f"{name}.lora_b": ("F32", b)}
    write_raw(tmp_path, tensors)
    read_adapter(tmp_path, targets, LIMITS)
    write_raw(tmp_path, tensors, **entry)
    assert refusal(tmp_path, targets).reason == "invalid"


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
def test_a_missing_file_is_named_as_missing(name: str, directory: Path, targets: dict[str, Target]) -> None:
    """The reason differs from that of an invalid file, because the API reports another status."""
    (directory / name).unlink()
    assert refusal(directory, targets).reason == "missing"


@pytest.mark.parametrize("limits", [replace(LIMITS, max_rank=3), replace(LIMITS, max_bytes=1000)])
def test_rank_and_size_are_limited(limits: AdaptersSection, directory: Path, targets: dict[str, Target]) -> None:
    """An adapter of rank 4 with a few kilobytes exceeds each limit."""
    assert refusal(directory, targets, limits).reason == "invalid"


PEFT_SETTINGS: dict[str, dict[str, object]] = {
    "dora": {"use_dora": True}, "bias": {"bias": "all"}, "saved modules": {"modules_to_save": ["lm_head"]},
    "another method": {"peft_type": "IA3"}, "bias of matrices": {"lora_bias": True},
    "trained tokens": {"trainable_token_indices": [3]}, "changed base weights": {"init_lora_weights": "pissa_niter_4"},
}  # fmt: skip


@pytest.mark.parametrize("settings", PEFT_SETTINGS.values(), ids=PEFT_SETTINGS)
def test_what_plain_lora_cannot_compute_is_refused_by_name(
    settings: dict[str, object], tmp_path: Path, targets: dict[str, Target]
) -> None:
    """The message names the key of PEFT's configuration."""
    arrays = random_matrices(targets, 4, seed=0)
    error = refusal(write_peft(tmp_path, arrays, rank=4, alpha=8, **settings), targets)
    assert error.reason == "invalid"
    assert next(iter(settings)) in str(error)


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.layers.12.mlp.up_proj", (12, "mlp.up_proj")),
        ("transformer.h.0.attn.c_attn", (0, "attn.c_attn")),
        ("lm_head", (None, "lm_head")),
    ],
)
def test_a_module_has_a_block_and_a_name_in_it(module: str, place: tuple[int | None, str]) -> None:
    """Whatever the architecture calls its blocks; a module outside of them has its full name."""
    assert place_of(module) == place


def test_a_base_model_that_an_adapter_names_is_found_beside_it(tmp_path: Path) -> None:
    """A name that could be one of the hub is looked for in every place; nothing is downloaded."""
    save(tmp_path / "models" / "base")
    assert recorded_base("models/base", tmp_path / "adapter", tmp_path) is not None
    assert recorded_base("models/base", tmp_path / "adapter") is None
