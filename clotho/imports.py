"""What happens around the first import of some modules of other packages, whoever imports them.

An optimised BLAS is loaded before MLX, mlx-lm does not import wandb, and transformers reads its models once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Surroundings = Callable[[ModuleType], AbstractContextManager[None]]


@contextmanager
def no_collections(module: ModuleType) -> Iterator[None]:
    """Collect no garbage: modules stay in use, and collections would take a quarter of the time of their import."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def no_wandb(module: ModuleType) -> Iterator[None]:
    """Hide wandb, whose import takes a second, from a callback that is not used. A tracker imports wandb itself."""
    hidden: dict[str, Any] = {"wandb": None} if "wandb" not in sys.modules else {}
    modules: dict[str, Any] = sys.modules
    modules |= hidden
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


@contextmanager
def one_reading(module: ModuleType) -> Iterator[None]:
    """Let transformers read the names of its models once, and only the last lines of each file.

    transformers reads all files of its models twice before the first tokenizer is loaded, which is a third of the start
    of a run. A version without these functions is not changed.
    """
    yield
    for name, changed in (("fetch__all__", _of_last_lines), ("create_import_structure_from_path", _of_folder)):
        if function := getattr(module, name, None):
            setattr(module, name, changed(function))


def _of_last_lines(names_of: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Begin with the last line that begins with `__all__`: the names of a module are those that it lists there."""
    return lambda content: names_of(content[content.rfind("\n__all__") + 1 :])


def _of_folder(structure_of: Callable[[str], object]) -> Callable[[str | os.PathLike[str]], object]:
    """Name the folder by one string, also where a file in it is named: transformers keeps the structure of a string."""
    return lambda place: structure_of(os.path.dirname(place) if os.path.isfile(place) else os.fspath(place))


SURROUNDINGS: dict[str, Surroundings] = {
    "mlx_lm": no_collections,
    "mlx_lm.tuner.callbacks": no_wandb,
    "transformers.utils.import_utils": one_reading,
}


class _Surrounding(Loader):
    """Executes a module in its surroundings, and otherwise is the loader of the module."""

    def __init__(self, loader: Loader, surroundings: Surroundings) -> None:
        self._loader, self._surroundings = loader, surroundings

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, which has its own loader from then on."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with self._surroundings(module):
            self._loader.exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules that have surroundings, and loads an optimised BLAS before `mlx.core`.

    On Linux, the loader of programs binds the products of MLX to the first BLAS. All other imports go on as without it.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module with another loader; None for every module that this finder leaves to others."""
        if name == "mlx.core" and sys.platform == "linux":
            import_module("clotho.process").load_blas()
        surroundings = SURROUNDINGS.get(name)
        spec = PathFinder.find_spec(name, path) if surroundings else None
        if surroundings is None or spec is None or spec.loader is None:
            return None
        spec.loader = _Surrounding(spec.loader, surroundings)
        return spec


def prepare_imports() -> None:
    """Put the finder before all others. Modules that are imported already stay as they are."""
    sys.meta_path.insert(0, _Finder())
