"""What attachments add to the library, and how the library refuses what an absent one would add."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from clotho.extension import TableDoor, attachment_modules, found, provided
from clotho.models.loading import MODEL_FORMATS, find_model, is_local
from clotho.models.tokenizer import ChatTokenizer
from clotho.rewards.registry import REWARDS, load_reward
from clotho.rewards.weighted_sum import Rewards
from clotho.settings.objectives import Dpo
from clotho.training.objectives.functions import ATTACHED as OBJECTIVES
from clotho.training.objectives.functions import objective
from protocols.errors import ArtifactError, ModelError, ProfileError
from tests.absent import without
from tests.small_models import tiny_source
from tests.training.policies_and_groups import BigramPolicy, learner, scored_group
from training_run.adapters.reading import ADAPTER_FORMATS, read_adapter_of

ROOT, RINGS = Path(__file__).parents[1], ("attachments", "clotho", "training_run")
SOURCES = (path.read_text(encoding="utf-8") for ring in RINGS for path in sorted(ROOT.glob(f"{ring}/**/*.py")))
DOORS = {
    match[2]: match[1]
    for source in SOURCES
    if ": Door[" in source
    for node in ast.parse(source).body
    if isinstance(node, ast.AnnAssign)
    if (match := re.fullmatch(r"\w+: Door\[(.*)\] = Door\('(.*)'\)", ast.unparse(node)))
}
"""Types of the parameters and of the result of every door, by its place."""


@pytest.mark.parametrize("table", [ADAPTER_FORMATS, MODEL_FORMATS, OBJECTIVES, REWARDS])
def test_every_name_of_a_table_is_known_with_its_attachment(table: TableDoor[Any]) -> None:
    """Whether or not the attachment is installed."""
    assert table.owners == {name: folder for folder, rows in found(table.place).items() for name in rows}


def test_every_row_names_something_that_can_be_imported() -> None:
    """As text, so that nothing is imported before it is used."""
    places = [row.load for row in REWARDS().values() if row.function is None]
    places += [place for row in MODEL_FORMATS().values() for place in row] + [
        *ADAPTER_FORMATS().values(),
        *OBJECTIVES().values(),
    ]
    assert all(callable(provided(place)) for place in places)


def test_functions_of_attachments_have_the_types_of_their_doors() -> None:
    """A function that no door asks for would never be called."""
    for file in ("library", "attachment"):
        for module in attachment_modules(file).values():
            for node in ast.parse(inspect.getsource(module)).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                    asked = ", ".join(ast.unparse(one.annotation or one) for one in node.args.args)
                    answer = ast.unparse(node.returns or node)
                    answer = f"Awaitable[{answer}]" if isinstance(node, ast.AsyncFunctionDef) else answer
                    assert DOORS[f"{file}.{node.name}"] == f"[{asked}], {answer}", module.__name__


def test_the_doors_of_the_library_load_neither_mlx_nor_the_server() -> None:
    """They are imported at every start; what they add is imported when it is used."""
    heavy = ["mlx", "starlette", "anyio", "transformers", "clotho.serving", "clotho.inference"]
    code = f"import sys; from clotho.extension import found; found('library.'); print(set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "attachment"), [("judge", "graders"), ("math_verify", "graders"), ("reasoning_gym", "reasoning_gym")]
)
def test_a_reward_of_an_absent_attachment_is_refused_by_its_name(
    name: str, attachment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of no attachment are unknown; the functions of the library are there."""
    without(monkeypatch, attachment)
    with pytest.raises(ProfileError) as caught:
        load_reward(name)
    assert REWARDS.absence(name) in str(caught.value)
    assert f"'{attachment}'" in REWARDS.absence(name)
    assert REWARDS.absence("zzz") == ""
    assert callable(load_reward("exact"))


def test_a_sum_of_rewards_refuses_names_of_absent_attachments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profile does."""
    without(monkeypatch, "graders")
    with pytest.raises(ProfileError, match="needs the attachment 'graders'"):
        Rewards(math_verify=1.0)


def test_an_objective_of_an_absent_attachment_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings are read, because rules between settings name them."""
    without(monkeypatch, "preference")
    with pytest.raises(ProfileError, match=r"dpo.* needs the attachment 'preference'"):
        objective(Dpo())


def test_routes_are_not_replayed_without_their_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that has to replay them is refused; any other passes over a model with experts as before."""
    source = tiny_source("qwen3_moe")
    policy = BigramPolicy(source.model, source.vocab_size)
    without(monkeypatch, "router_replay")
    with pytest.raises(ModelError, match="needs the attachment 'router_replay'"):
        learner(policy, router_replay="on")
    assert learner(policy, router_replay="auto").update([scored_group([[1, 2], [3]], [0.0, 1.0])]).applied


def test_a_model_file_of_an_absent_attachment_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name is still that of a file, and of no repository of the hub. Other files are no models."""
    file, other = tmp_path / "model.gguf", tmp_path / "model.bin"
    file.write_bytes(b"GGUF")
    other.write_bytes(b"")
    without(monkeypatch, "files")
    with pytest.raises(ModelError, match="needs the attachment 'files'"):
        find_model(str(file))
    with pytest.raises(ModelError, match="needs the attachment 'files'"):
        ChatTokenizer.from_files(file)
    with pytest.raises(ModelError, match="is expected"):
        find_model(str(other))
    assert is_local("model.gguf")


@pytest.mark.parametrize("name", ["adapter.gguf", "adapter.npz", "peft"])
def test_an_adapter_of_another_program_is_refused_without_its_attachment(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Adapters of mlx-lm, which a run writes, are read by the library."""
    path = tmp_path / name
    config = {"peft_type": "LORA"} if name == "peft" else {"lora_parameters": {"scale": 1.0}}
    (path if name == "peft" else tmp_path).mkdir(exist_ok=True)
    ((path if name == "peft" else tmp_path) / "adapter_config.json").write_text(json.dumps(config))
    without(monkeypatch, "files")
    with pytest.raises(ArtifactError, match="needs the attachment 'files'"):
        read_adapter_of(path)
    layer = "model.layers.0.mlp.down_proj"
    matrices = {f"{layer}.lora_a": mx.zeros((4, 2)), f"{layer}.lora_b": mx.zeros((2, 4))}
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 1.0}}))
    mx.save_safetensors(str(own / "adapters.safetensors"), matrices)
    assert read_adapter_of(own).ranks == {layer: 2}
