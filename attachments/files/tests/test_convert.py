"""Conversions of adapters between the formats of mlx-lm, PEFT, NPZ and llama.cpp, and of GGUF files to directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization
from gguf import GGUFReader
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

from attachments.adapters.tests.adapter_models import write_mlx_adapter
from attachments.files.adapter_writers import alpha_of
from attachments.files.convert import convert
from attachments.files.gguf import half_rotation
from attachments.files.tests import hub_models
from attachments.files.tests.gguf_files import TOKENS_1_T, build, byte_level, write
from attachments.files.tests.hub_models import SHAPES, logits
from clotho.models.policy import load_policy
from clotho.settings.model import ModelSection
from clotho.storage.adapters import write_adapter
from clotho.storage.tensors import read_tensors
from protocols.errors import ArtifactError
from tests.damaged_files import read_damaged
from tests.learner_settings import policy_settings
from tests.training_run.adapters.test_adapters import write_raw
from training_run.__main__ import main
from training_run.adapters.formats import FormatName, quotient

Q = "model.layers.0.self_attn.q_proj"
TENSORS = {"mlx": "adapters.safetensors", "peft": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by architecture."""
    root = tmp_path_factory.mktemp("bases")
    return {name: hub_models.save(root / name, name) for name in (*SHAPES, "qwen3_moe")}


def adapter(directory: Path, base: Path, *, scale: float = 2.5, rank: int = 4) -> Path:
    """Write an adapter for every linear layer of a model, with the name of the model."""
    model, _ = load_model(base)
    write_mlx_adapter(directory, model, rank=rank, scale=scale)
    return set_config(directory, model=str(base))


def set_config(directory: Path, **values: object) -> Path:
    """Change keys of the configuration."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(config(directory) | values))
    return directory


def config(directory: Path) -> dict[str, Any]:
    """The configuration of an adapter."""
    found: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return found


def there_and_back(source: Path, to: FormatName, *, model: str = "") -> Path:
    """Convert an adapter of mlx-lm to a format and back; return the last directory."""
    place = source.with_name(f"{source.name}.{to}.gguf" if to == "gguf" else f"{source.name}-{to}")
    convert(source, place, to, model=model)
    convert(place, source.with_name(f"{source.name}-{to}-back"), "mlx", model=model)
    return source.with_name(f"{source.name}-{to}-back")


@pytest.mark.parametrize("to", ["peft", "npz", "gguf"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_a_conversion_and_its_inverse_keep_every_bit(
    to: FormatName, architecture: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """The scale too, although two of the formats store alpha."""
    source = adapter(tmp_path / "a", bases[architecture], scale=0.1, rank=3)
    back = there_and_back(source, to)
    before, after = load_file(source / TENSORS["mlx"]), load_file(back / TENSORS["mlx"])
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert config(back) == config(source)


@pytest.mark.parametrize("to", ["peft", "npz", "gguf"])
def test_the_adapter_of_a_run_returns_as_the_same_file(to: FormatName, bases: dict[str, Path], tmp_path: Path) -> None:
    """Also with different ranks, which files of mlx-lm pad with zeros; files of llama.cpp do not state the padding."""
    ranks = () if to == "gguf" else ("v_proj=2",)
    settings = policy_settings(kind="lora", ranks=ranks, target_modules=("q_proj", "v_proj"), num_layers=1)
    policy = load_policy(ModelSection(path=str(bases["qwen3"])), settings, seed=0, keep_reference=False)
    write_adapter(tmp_path / "run", policy.trainable(), policy.adapter_config)
    back = there_and_back(tmp_path / "run", to)
    assert (back / TENSORS["mlx"]).read_bytes() == (tmp_path / "run" / TENSORS["mlx"]).read_bytes()
    assert (back / "adapter_config.json").read_bytes() == (tmp_path / "run" / "adapter_config.json").read_bytes()


@pytest.mark.parametrize(("dtype", "to"), [("F16", "npz"), ("F16", "peft"), ("BF16", "peft"), ("BF16", "gguf")])
def test_values_keep_their_type(dtype: str, to: FormatName, bases: dict[str, Path], tmp_path: Path) -> None:
    """A file of 16 bits does not become a file of 32 bits."""
    random = np.random.default_rng(0)
    shapes = {"lora_a": (32, 2), "lora_b": (2, 32)}
    arrays = {f"{Q}.{matrix}": (dtype, random.standard_normal(shape)) for matrix, shape in shapes.items()}
    (tmp_path / "a").mkdir()
    write_raw(tmp_path / "a", arrays)
    back = there_and_back(set_config(tmp_path / "a", model=str(bases["llama"])), to)
    before, after = (read_tensors(place / TENSORS["mlx"]) for place in (tmp_path / "a", back))
    assert {str(array.dtype) for array in after.values()} == {str(array.dtype) for array in before.values()}
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)


def dora(directory: Path, base: Path) -> Path:
    """Write a DoRA adapter."""
    section = ModelSection(path=str(base))
    policy = load_policy(section, policy_settings(kind="dora"), seed=0, keep_reference=False)
    write_adapter(directory, policy.trainable(), policy.adapter_config)
    return directory


@pytest.mark.parametrize("to", ["peft", "npz"])
def test_the_magnitudes_of_dora_are_kept(to: FormatName, bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT names them differently and means the same."""
    source = dora(tmp_path / "a", bases["llama"])
    back = there_and_back(source, to)
    assert (back / TENSORS["mlx"]).read_bytes() == (source / TENSORS["mlx"]).read_bytes()
    assert config(back)["fine_tune_type"] == "dora"


def test_the_files_of_peft_have_its_names_shapes_and_alpha(bases: dict[str, Path], tmp_path: Path) -> None:
    """A is (rank, inputs), B is (outputs, rank), and the scale is alpha / rank."""
    source = adapter(tmp_path / "a", bases["llama"], scale=20.0, rank=8)
    convert(source, tmp_path / "peft", "peft", base_name="owner/name")
    ours, theirs = load_file(source / TENSORS["mlx"]), load_file(tmp_path / "peft" / TENSORS["peft"])
    down = "model.layers.1.mlp.down_proj"
    assert (theirs[f"base_model.model.{down}.lora_A.weight"] == ours[f"{down}.lora_a"].T).all()
    assert (theirs[f"base_model.model.{down}.lora_B.weight"] == ours[f"{down}.lora_b"].T).all()
    found = config(tmp_path / "peft")
    assert (found["r"], found["lora_alpha"], found["base_model_name_or_path"]) == (8, 160, "owner/name")
    assert "self_attn.q_proj" in found["target_modules"]


def test_the_file_of_llama_cpp_has_its_names_and_its_order_of_rows(bases: dict[str, Path], tmp_path: Path) -> None:
    """In the Llama architecture, rows of queries and keys are pairs, and other rows keep their order."""
    source = adapter(tmp_path / "a", bases["llama"], scale=2.0, rank=4)
    convert(source, tmp_path / "a.gguf", "gguf")
    reader = GGUFReader(tmp_path / "a.gguf")
    stated = {key: reader.fields[key].contents() for key in ("general.type", "adapter.type", "adapter.lora.alpha")}
    assert stated == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    theirs = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    ours = load_file(source / TENSORS["mlx"])
    assert (theirs["blk.0.attn_q.weight.lora_a"] == ours[f"{Q}.lora_a"].T).all()
    assert (half_rotation(theirs["blk.0.attn_q.weight.lora_b"], 4) == ours[f"{Q}.lora_b"].T).all()
    assert (theirs["blk.0.attn_q.weight.lora_b"] != ours[f"{Q}.lora_b"].T).any()
    assert (theirs["blk.1.ffn_down.weight.lora_b"] == ours["model.layers.1.mlp.down_proj.lora_b"].T).all()


def test_mlx_lm_computes_the_same_after_a_conversion_from_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    """With blocks that have no adapter, and rsLoRA, whose scale is alpha / sqrt(rank)."""
    source = adapter(tmp_path / "a", bases["qwen3"], scale=2.0, rank=4)
    tensors = load_file(source / TENSORS["mlx"])
    save_file({name: array for name, array in tensors.items() if ".0." in name}, source / TENSORS["mlx"])
    convert(source, tmp_path / "peft", "peft")
    set_config(tmp_path / "peft", use_rslora=True, lora_alpha=4.0)
    convert(tmp_path / "peft", tmp_path / "back", "mlx")
    model, _ = load_model(bases["qwen3"])
    expected, found = (
        logits(load_adapters(load_model(bases["qwen3"])[0], str(d))) for d in (source, tmp_path / "back")
    )
    assert np.abs(expected - logits(model)).max() > 1e-2
    assert np.abs(expected - found).max() <= 1e-6


def test_a_base_model_translates_names_that_hugging_face_has(bases: dict[str, Path], tmp_path: Path) -> None:
    """Without it, such names are refused."""
    convert(adapter(tmp_path / "a", bases["llama"]), tmp_path / "peft", "peft")
    file = tmp_path / "peft" / TENSORS["peft"]
    save_file(
        {name.replace("model.model", "model.model.language_model"): a for name, a in load_file(file).items()}, file
    )
    set_config(tmp_path / "peft", base_model_name_or_path="owner/elsewhere")
    with pytest.raises(ArtifactError) as error:
        convert(tmp_path / "peft", tmp_path / "b", "mlx")
    assert error.value.reason == "base"
    convert(tmp_path / "peft", tmp_path / "b", "mlx", model=str(bases["llama"]))
    ours, theirs = (load_file(tmp_path / name / TENSORS["mlx"]) for name in ("a", "b"))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def other_rank(source: Path) -> None:
    """Give a layer of one block another rank, as PEFT's rank_pattern does."""
    convert(source, source.with_name("peft"), "peft")
    file = source.with_name("peft") / TENSORS["peft"]
    tensors = load_file(file)
    prefix = f"base_model.model.{Q}"
    tensors[f"{prefix}.lora_A.weight"] = tensors[f"{prefix}.lora_A.weight"][:2].copy()
    tensors[f"{prefix}.lora_B.weight"] = tensors[f"{prefix}.lora_B.weight"][:, :2].copy()
    save_file(tensors, file)
    set_config(file.parent, rank_pattern={Q: 2}, alpha_pattern={Q: 5.0})


def other_scale(source: Path) -> None:
    """Give a layer another scale."""
    convert(source, source.with_name("peft"), "peft")
    set_config(source.with_name("peft"), alpha_pattern={"q_proj": 3.0})


def embedding(source: Path) -> None:
    """Add an adapter of the embeddings."""
    tensors = load_file(source / TENSORS["mlx"])
    name = "model.embed_tokens"
    tensors |= {f"{name}.lora_a": np.ones((64, 4), np.float32), f"{name}.lora_b": np.ones((4, 32), np.float32)}
    save_file(tensors, source / TENSORS["mlx"])


def unknown_base(source: Path) -> None:
    """Add an adapter of the embeddings. Whether they are also the head is unknown."""
    embedding(source)
    set_config(source, model="owner/elsewhere")


def half(source: Path) -> None:
    """Store bfloat16."""
    arrays = {name: mx.array(array).astype(mx.bfloat16) for name, array in load_file(source / TENSORS["mlx"]).items()}
    mx.save_safetensors(str(source / TENSORS["mlx"]), arrays)


@pytest.mark.parametrize("form", ["mlx", "npz"])
def test_ranks_that_differ_between_blocks_are_padded_and_recorded(
    form: FormatName, bases: dict[str, Path], tmp_path: Path
) -> None:
    """By the whole name of the module, so that the way back has the same matrices."""
    other_rank(adapter(tmp_path / "a", bases["llama"]))
    convert(tmp_path / "peft", tmp_path / "ours", form)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["ranks"] == {Q: 2}
    convert(tmp_path / "ours", tmp_path / "again", "peft")
    before, after = (load_file(tmp_path / name / TENSORS["peft"]) for name in ("peft", "again"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


INEXPRESSIBLE: dict[str, tuple[Callable[[Path], object] | None, str, FormatName, str]] = {
    "differing scales": (other_scale, "peft", "mlx", "0.75"),
    "differing scales in GGUF": (other_scale, "peft", "gguf", "alpha"),
    "embeddings without the base model": (unknown_base, "a", "peft", "model.embed_tokens"),
    "embeddings in GGUF": (embedding, "a", "gguf", "model.embed_tokens"),
    "bfloat16 in NPZ": (half, "a", "npz", "bfloat16"),
}


@pytest.mark.parametrize(("change", "place", "to", "named"), INEXPRESSIBLE.values(), ids=INEXPRESSIBLE)
def test_what_a_format_cannot_express_is_refused_by_name(
    change: Callable[[Path], object], place: str, to: FormatName, named: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing is written."""
    change(adapter(tmp_path / "a", bases["llama"]))
    with pytest.raises(ArtifactError, match=named) as error:
        convert(tmp_path / place, tmp_path / ("b.gguf" if to == "gguf" else "b"), to)
    assert error.value.reason == "inexpressible"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "b"))) == []


def test_llama_cpp_has_no_magnitudes_and_not_every_architecture(bases: dict[str, Path], tmp_path: Path) -> None:
    """The error names both."""
    source = dora(tmp_path / "a", bases["llama"])
    other = hub_models.save(tmp_path / "lfm2", "lfm2")
    plain = adapter(tmp_path / "c", other)
    for path, named in ((source, "DoRA"), (plain, "lfm2")):
        with pytest.raises(ArtifactError, match=named) as error:
            convert(path, tmp_path / "b.gguf", "gguf")
        assert error.value.reason == "inexpressible"


def test_peft_adapts_embeddings_that_are_not_the_head(bases: dict[str, Path], tmp_path: Path) -> None:
    """Back, the file has the same bits. PEFT does not adapt a head that shares the weights, so this is refused."""
    source = adapter(tmp_path / "a", bases["llama"])
    embedding(source)
    back = there_and_back(source, "peft")
    names = load_file(tmp_path / "a-peft" / TENSORS["peft"])
    assert names["base_model.model.model.embed_tokens.lora_embedding_A"].shape == (4, 64)
    assert names["base_model.model.model.embed_tokens.lora_embedding_B"].shape == (32, 4)
    assert "model.embed_tokens" in config(tmp_path / "a-peft")["target_modules"]
    before, after = load_file(source / TENSORS["mlx"]), load_file(back / TENSORS["mlx"])
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    for words in ((source, tmp_path / "b", "peft"), (tmp_path / "a-peft", tmp_path / "b", "mlx")):
        with pytest.raises(ArtifactError, match=r"model\.embed_tokens") as error:
            convert(*words, model=str(bases["gemma2"]))
        assert error.value.reason == "inexpressible"


def test_nothing_is_overwritten_and_errors_are_one_line(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2: an existing destination, a source that is none, another base model, a wrong suffix, no format."""
    source = adapter(tmp_path / "a", bases["llama"])
    (tmp_path / "old").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    a, new = str(source), str(tmp_path / "new")
    for words in (
        [a, str(tmp_path / "old"), "--to", "peft"],
        [str(tmp_path / "nothing"), new, "--to", "peft"],
        [str(tmp_path / "bad.gguf"), new, "--to", "peft"],
        [a, new, "--to", "peft", "--model", str(bases["qwen3_moe"])],
        [a, new, "--to", "gguf"],
        [a, new],
        [a, new, "--to", "pickle"],
        [a, new, "--to", "peft", "--bits", "4"],
    ):
        assert main(["convert", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list((tmp_path / "old").iterdir()) == []
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_read_and_wrote(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help goes to standard output too."""
    source = adapter(tmp_path / "a", bases["llama"])
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "peft", "--base_name", "owner/name"]) == 0
    shown = capsys.readouterr().out
    assert "rank 4" in shown
    assert "owner/name" in shown
    assert main(["convert", "--help"]) == 0
    assert "--base-name" in capsys.readouterr().out


@pytest.mark.parametrize(("scale", "rank"), [(0.1, 3), (20.0, 8), (16 / 3, 3), (2.5, 6), (1e-3, 7)])
def test_alpha_divided_by_the_rank_is_the_scale(scale: float, rank: int) -> None:
    """Bit for bit, although the quotient of two decimal numbers is rounded."""
    assert quotient(alpha_of(scale, rank), rank) == scale


def file_and_directory(tmp_path: Path, quantization: Quantization) -> tuple[Path, Path]:
    """A GGUF file with a model, and the directory that the command writes."""
    metadata = {"tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    file = write(
        tmp_path / "m.gguf", build(), quantization=quantization, tokenizer=byte_level("smollm"), metadata=metadata
    )
    assert main(["convert", str(file), str(tmp_path / "new" / "model"), "--to", "mlx"]) == 0
    return file, tmp_path / "new" / "model"


@pytest.mark.parametrize("quantization", [Quantization.Q4_1, Quantization.Q8_0, Quantization.F16], ids=str)
def test_mlx_lm_computes_with_the_directory_of_a_gguf_file(tmp_path: Path, quantization: Quantization) -> None:
    """What Clotho computes with the file, with the adapter of a policy of it. Quantized weights stay quantized."""
    file, directory = file_and_directory(tmp_path, quantization)
    section = ModelSection(path=str(file))
    policy = load_policy(section, policy_settings(kind="lora"), seed=0, keep_reference=False)
    write_adapter(tmp_path / "adapters", policy.trainable(), policy.adapter_config)
    model, tokenizer, *_ = mlx_lm.load(str(directory), adapter_path=str(tmp_path / "adapters"))
    model.set_dtype(mx.float32)
    assert mx.allclose(model(TOKENS_1_T), policy.model(TOKENS_1_T), atol=1e-4).item()
    assert tuple(tokenizer.encode("the policy<|end|>")) == policy.tokenizer.encode("the policy<|end|>")
    assert tokenizer.eos_token_ids == policy.tokenizer.eos_ids
    render: Any = tokenizer.apply_chat_template  # unannotated
    assert render([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_a_model_that_is_no_gguf_file_is_a_matter_of_mlx_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command of the same name converts models."""
    assert main(["convert", str(tmp_path), str(tmp_path / "new"), "--to", "mlx"]) == 2
    assert "mlx_lm.convert converts models" in capsys.readouterr().err


def test_a_model_becomes_a_new_directory_of_mlx_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and one line for an existing directory, another format, flags of adapters, and a missing file."""
    file = write(tmp_path / "m.gguf", build(), tokenizer=byte_level("smollm"))
    (tmp_path / "old").mkdir()
    new = str(tmp_path / "new")
    for arguments in (
        [str(file), str(tmp_path / "old"), "--to", "mlx"],
        [str(file), new, "--to", "peft"],
        [str(file), new, "--to", "mlx", "--base-name", "owner/name"],
        [str(tmp_path / "x.gguf"), new, "--to", "mlx"],
        ["package:nowhere/x.gguf", new, "--to", "mlx"],
    ):
        assert main(["convert", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list((tmp_path / "old").iterdir()) == []
    assert not (tmp_path / "new").exists()


def damaged_outcomes(base: Path, directory: Path, count: int) -> None:
    """Damage the tensors of adapters so many times; each is refused in one line, or read."""
    plain = set_config(adapter(directory / "mlx", base), model="")
    files = [plain / TENSORS["mlx"]]
    names: dict[FormatName, str] = {"peft": TENSORS["peft"], "npz": "adapter.npz"}
    for form, name in names.items():
        convert(plain, directory / form, form)
        files.append(directory / form / name)
    assert sorted(read_damaged("adapter", files, count, seed=0)) == ["loaded", "refused"]


def test_damaged_adapters_are_read_or_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """In the formats of mlx-lm, PEFT and NPZ: bytes change, move, are lost, or become numbers at limits."""
    damaged_outcomes(bases["llama"], tmp_path, 30)


@pytest.mark.slow
def test_a_thousand_damaged_adapters_are_read_or_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """As above."""
    damaged_outcomes(bases["llama"], tmp_path, 1000)
