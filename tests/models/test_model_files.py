"""Hostile model directories are refused with one line; nothing large is built or read before."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clotho.models.loading import open_base
from clotho.models.policy import load_policy
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import ModelSection
from protocols.errors import ModelError
from tests import model_lanes
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small valid model directory."""
    return save(tmp_path_factory.mktemp("saved") / "base")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model directory that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def load(path: Path) -> Any:
    """Load the policy of a directory."""
    return load_policy(ModelSection(path=str(path)), policy_settings(kind="lora"), seed=0, keep_reference=False)


def refusal(path: Path) -> str:
    """Return the error message for the directory."""
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    return message


def rewrite_config(path: Path, **changes: object) -> None:
    """Change keys of `config.json`."""
    (path / "config.json").write_text(json.dumps(CONFIG | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": "x"}, {"rope_theta": 0}, {"rope_theta": float("nan")}, {"rope_theta": [1]},
        {"tie_word_embeddings": "x"}, {"num_hidden_layers": "2"}, {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 9_999}, {"num_attention_heads": 10**9}, {"num_attention_heads": 0},
        {"hidden_size": 10**12}, {"hidden_size": -1}, {"vocab_size": 10**30}, {"vocab_size": None}, {"head_dim": 10**8},
        {"max_position_embeddings": 10**40}, {"quantization": {"group_size": 32, "bits": 99}},
        {"quantization": {"group_size": 32, "bits": 4}}, {"quantization": {"bits": 4}},
        {"quantization": {"group_size": 10**9, "bits": 4}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "x"}}, {"quantization": 4}, {"quantization": []},
        {"model_type": "../../etc"}, {"model_type": 5}, {"rope_scaling": {"type": "linear"}}, {"rope_scaling": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_hostile_configurations_are_refused(directory: Path, changes: dict[str, object]) -> None:
    """Wrong types, absurd sizes, and quantization that the weights do not have."""
    if "quantization" in changes:
        model_lanes.skip_quantized()
    rewrite_config(directory, **changes)
    refusal(directory)


def test_deeply_nested_configurations_are_refused(directory: Path) -> None:
    """The parser's error is no traceback; in every JSON file of the directory."""
    for name in ("tokenizer_config.json", "tokenizer.json", "config.json"):
        (directory / name).write_text("[" * 200_000)
        assert str(directory) in refusal(directory)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(
            ("config.json", "model.safetensors"),
            ("link to itself", "pipe", "device", "directory", "broken link", "too large"),
        ),
        ("tokenizer.json", "pipe"),
        ("tokenizer_config.json", "too large"),
    ],
)
def test_only_regular_files_of_bounded_size_are_read(directory: Path, name: str, kind: str) -> None:
    """Opening a pipe would wait for ever, and /dev/zero has no end."""
    path = directory / name
    path.unlink()
    match kind:
        case "link to itself":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "broken link":
            path.symlink_to(directory / "absent")
        case _:
            path.touch()
            os.truncate(path, 2**31)
    assert name in refusal(directory)


def test_links_to_regular_files_are_followed(directory: Path, tmp_path: Path) -> None:
    """The cache of the hub consists of links."""
    for path in list(directory.iterdir()):
        shutil.move(path, tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert load(directory).vocab_size == 64


def rewrite_header(path: Path, change: Any) -> None:
    """Apply `change` to the header of a safetensors file."""
    contents = path.read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    header = json.loads(contents[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(shape=[2**40, 2**40]), lambda entry: entry.update(shape=[-1, 4]),
        lambda entry: entry.update(shape="x"), lambda entry: entry.update(shape=[float("inf")]),
        lambda entry: entry.update(dtype="X9"), lambda entry: entry.update(dtype=None),
        lambda entry: entry.update(data_offsets=[0, 2**62]), lambda entry: entry.update(data_offsets=[8, 0]),
        lambda entry: entry.update(data_offsets=None), lambda entry: entry.clear(),
    ],
)  # fmt: skip
def test_hostile_headers_are_refused(directory: Path, change: Any) -> None:
    """Shapes, types and offsets of tensors that the file does not contain."""
    rewrite_header(directory / "model.safetensors", lambda header: change(header["model.norm.weight"]))
    refusal(directory)


def test_a_header_longer_than_its_file_is_refused(directory: Path) -> None:
    """The length is checked before memory is allocated."""
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "model.safetensors" in refusal(directory)


@pytest.mark.needs_float32
@pytest.mark.parametrize(
    ("dtype", "value"), [(mx.float32, float("nan")), (mx.bfloat16, float("inf")), (mx.float16, float("-inf"))]
)
def test_weights_that_are_not_finite_are_named(directory: Path, value: float, dtype: mx.Dtype) -> None:
    """One value of one tensor is enough."""
    path = directory / "model.safetensors"
    arrays: Any = mx.load(str(path))
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    name = "model.layers.1.mlp.up_proj.weight"
    arrays[name][3, 5] = value
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    message = refusal(directory)
    assert "not finite" in message
    assert name in message


def test_large_finite_weights_are_accepted(directory: Path) -> None:
    """Their sum overflows, and they do not."""
    path = directory / "model.safetensors"
    arrays: Any = mx.load(str(path))
    arrays["model.norm.weight"] = mx.full((64,), 3e38)
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    assert load(directory).vocab_size == 64


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 2, 3, 7, 64, 2**31, 2**63, 10**30, float("nan"), float("inf"), -0.5, 1e308])
    | st.text(max_size=8)
    | st.sampled_from(["llama", "mamba2", "../x", "yarn", "llama3", "float16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
MORE_KEYS = ["rope_scaling", "quantization", "quantization_config", "text_config", "layer_types", "architectures", "x"]
TOKENIZER_KEYS = [
    "tokenizer_class", "chat_template", "eos_token", "added_tokens_decoder", "chat_template_type",
    "extra_special_tokens",
]  # fmt: skip


def mutate_and_load(saved: Path, target: Path, data: st.DataObject) -> None:
    """Damage one file of a model directory; loading it succeeds or is refused with one line."""
    shutil.rmtree(target, ignore_errors=True)
    directory = Path(shutil.copytree(saved, target))
    match data.draw(st.sampled_from(["config", "tokenizer config", "header", "bytes"])):
        case "config":
            keys = st.sampled_from([*CONFIG, *MORE_KEYS])
            rewrite_config(directory, **data.draw(st.dictionaries(keys, JSON_VALUES, min_size=1, max_size=3)))
        case "tokenizer config":
            path = directory / "tokenizer_config.json"
            changes = data.draw(st.dictionaries(st.sampled_from(TOKENIZER_KEYS), JSON_VALUES, min_size=1, max_size=3))
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        case "header":
            keys = st.sampled_from(["dtype", "shape", "data_offsets"])
            changes = data.draw(st.dictionaries(keys, JSON_VALUES, min_size=1, max_size=2))
            rewrite_header(
                directory / "model.safetensors",
                lambda header: header["lm_head.weight" if "lm_head.weight" in header else "model.norm.weight"].update(
                    changes
                ),
            )
        case _:
            path = directory / data.draw(
                st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
            )
            contents = bytearray(path.read_bytes())
            chance = random.Random(data.draw(st.integers(0, 2**32)))
            for _ in range(chance.randint(1, 4)):
                contents[chance.randrange(min(len(contents), 3000))] = chance.randrange(256)
            path.write_bytes(bytes(contents[: chance.choice([len(contents), chance.randrange(len(contents))])]))
    try:
        open_base(directory, ModelSection(path=str(directory)))
        ChatTokenizer.from_files(directory)
    except ModelError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert len(message) < 1000


@settings(max_examples=50)
@given(data=st.data())
def test_damaged_directories_load_or_are_refused(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Mutations of the configuration, of the tokenizer, of headers and of bytes raise `ModelError` or nothing."""
    mutate_and_load(saved, tmp_path_factory.getbasetemp() / "damaged", data)


@pytest.mark.slow
@settings.get_profile("many")
@given(data=st.data())
def test_many_damaged_directories_load_or_are_refused(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The same with 20,000 mutations."""
    mutate_and_load(saved, tmp_path_factory.getbasetemp() / "damaged-slow", data)
