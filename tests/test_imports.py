"""What happens around the first import of some modules of other packages."""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm.tuner.callbacks
import pytest
import transformers
import transformers.utils.import_utils

from clotho.imports import SURROUNDINGS, no_collections, no_wandb

MODELS = Path(transformers.__file__).parent / "models"
READING: Any = transformers.utils.import_utils


@pytest.fixture(scope="module")
def unchanged() -> Any:
    """The module of transformers that reads the names of models, without surroundings."""
    spec = spec_from_file_location("transformers.utils.unchanged", READING.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_is_executed_in_its_surroundings() -> None:
    """With its own loader: it looks as if it had none."""
    assert vars(mlx_lm.tuner.callbacks)["wandb"] is None
    assert READING.fetch__all__.__module__ == "clotho.imports"
    for name in SURROUNDINGS:
        module = importlib.import_module(name)
        assert module.__spec__ is not None
        assert module.__spec__.loader is module.__loader__
        assert type(module.__loader__).__module__ != "clotho.imports"


def test_wandb_can_be_imported_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the import fails. A program that has imported wandb keeps it."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ImportError), no_wandb(ModuleType("callbacks")):
        importlib.import_module("wandb")
    assert "wandb" not in sys.modules
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with no_wandb(ModuleType("callbacks")):
        assert importlib.import_module("wandb").__name__ == "wandb"
    assert "wandb" in sys.modules


def test_nothing_is_collected_meanwhile() -> None:
    """Collections are afterwards on if they were on before."""
    for collects in (False, True):
        (gc.enable if collects else gc.disable)()
        with no_collections(ModuleType("mlx_lm")):
            assert not gc.isenabled()
        assert gc.isenabled() is collects


@pytest.mark.parametrize("folder", ["auto", "qwen3", "llama", "gpt2"])
def test_transformers_finds_the_names_that_it_would_find(folder: str, unchanged: Any) -> None:
    """It reads the last lines of each file only."""
    found = READING.create_import_structure_from_path(MODELS / folder)
    assert found == unchanged.create_import_structure_from_path(MODELS / folder)
    assert found


@pytest.mark.parametrize(
    "content",
    [
        "",
        "x = 1",
        '__all__ = ["A", "B"]',
        'a = 1\n__all__ = [\n    "A",\n    "B",\n]\n',
        '__all__ = ["A"]\n\n__all__ = ["B"]\n',
    ],
)
def test_the_names_of_a_file_are_those_of_its_last_list(content: str, unchanged: Any) -> None:
    """Whether it is at the beginning, in the middle or missing, on one line or on several."""
    assert READING.fetch__all__(content) == unchanged.fetch__all__(content)


def test_a_folder_is_read_once() -> None:
    """Whether it is named itself, as at the import of transformers, or by a file in it, as at that of its models."""
    folder = READING.create_import_structure_from_path(str(MODELS / "auto"))
    assert READING.create_import_structure_from_path(MODELS / "auto") is folder
    assert READING.create_import_structure_from_path(MODELS / "auto" / "__init__.py") is folder
