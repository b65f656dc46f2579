"""The public names of `clotho`, and the one policy that the tests of the library share."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import clotho
from clotho.library import settings
from clotho.settings.learner import LearnerSection, Lion
from clotho.settings.objectives import Dapo
from protocols.errors import ClothoError, ModelError, ProfileError


def in_a_new_process(code: str) -> str:
    """Return what a program prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_library_loads_nothing_else() -> None:
    """A name loads its module when it is used. What surrounds later imports is prepared."""
    loaded = in_a_new_process(
        "import sys, clotho; print([m for m in sys.modules if m.startswith(('mlx', 'numpy', 'clotho'))])"
    )
    assert loaded.strip() == "['clotho.imports', 'clotho']"


def test_a_foreign_module_that_hides_the_messages_is_named(tmp_path: Path) -> None:
    """A script in a directory with a module `protocols` would otherwise fail in its midst."""
    (tmp_path / "protocols.py").touch()
    ended = subprocess.run([sys.executable, "-c", "import clotho"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ImportError: clotho needs its own package `protocols`")
    assert str(tmp_path / "protocols.py") in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["Sampling", "GRPO", "LoRA", "AdamW", "Problem", "Completion", "ClothoError"])
def test_structs_load_no_mlx(name: str) -> None:
    """Settings can be made and shown without a device."""
    assert in_a_new_process(f"import sys, clotho; clotho.{name}; print('mlx.core' in sys.modules)") == "False\n"


def test_every_public_name_exists_and_says_what_it_is() -> None:
    """`dir(clotho)` is the whole library."""
    assert dir(clotho) == sorted(clotho.__all__)
    for name in set(clotho.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(clotho, name)), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As for any module, so that `hasattr` works."""
    assert not hasattr(clotho, "Trainer")


def test_public_methods_say_what_they_do() -> None:
    """And each synchronous method that computes has an asynchronous form."""
    for kind in (clotho.Sampler, clotho.Learner, clotho.Policy, clotho.Rewards, clotho.Server):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            assert name.startswith("_") or inspect.getdoc(method), f"{kind.__name__}.{name}"
    for kind, names in (
        (clotho.Sampler, ("sample", "score", "publish")),
        (clotho.Learner, ("forward_backward", "forward", "optim_step", "update")),
    ):
        for name in names:
            own, other = inspect.signature(getattr(kind, name)), inspect.signature(getattr(kind, f"{name}_async"))
            assert own == other


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one BLAS")
def test_mlx_finds_a_fast_blas_whoever_imports_it_after_the_library() -> None:
    """On Linux, the first BLAS that is loaded computes all products."""
    code = "import clotho, mlx.core; from clotho.process import load_blas; print(load_blas())"
    assert in_a_new_process(code) != "as loaded with MLX\n"


def test_settings_are_names_tables_or_structs() -> None:
    """With the keys of a profile."""
    found = settings(
        "learner", LearnerSection, {"objective": "dapo", "optimizer": {"type": "lion", "beta1": 0.8}, "lora_plus": 2}
    )
    assert found.objective == Dapo()
    assert found.optimizer == Lion(beta1=0.8)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"objective": "dapoo"}, "objective"),
        ({"objective": clotho.GRPO(clip_high=-1.0)}, "objective.clip_high"),
        ({"clip_high": 0.3}, "objective.clip_high"),
        ({"lr": 0.3}, "learner.lr"),
        ({"objective": object()}, "settings"),
        ({"max_gradnorm": 1.0}, "max_gradnorm"),
        ({"batch_size": 0}, "batch_size"),
        ({"optimizer": {"type": "adamw", "beta3": 0.1}}, "beta3"),
    ],
)
def test_a_setting_that_is_not_valid_is_refused_with_its_key(values: dict[str, Any], key: str) -> None:
    """Structs are checked too, which msgspec does not do by itself."""
    with pytest.raises(ProfileError) as caught:
        settings("learner", LearnerSection, values)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: clotho.load("/nowhere/model"), ModelError),
        (lambda: clotho.load("profiles/embedded", method="prefix"), ProfileError),
        (lambda: clotho.load("profiles/embedded", method=clotho.LoRA(rank=0)), ProfileError),
        (lambda: clotho.problems("/nowhere/data.jsonl"), ClothoError),
        (lambda: clotho.Rewards(), ProfileError),
        (lambda: clotho.Rewards(math_evil=1.0), ProfileError),
    ],
)
def test_bad_input_is_a_clotho_error(make: Callable[[], object], kind: type[ClothoError]) -> None:
    """Which the user can fix."""
    with pytest.raises(kind):
        make()
