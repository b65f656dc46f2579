"""The door of the library: what a folder of `attachments/` adds to it, and how the library finds the folders.

Tables name what an attachment provides, such as a format of files. A row names its functions as text, `module:name`,
and `provided` imports them when they are used.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from clotho.backend import Backend
    from clotho.inference.parts import EngineParts
    from clotho.rewards.registry import BuiltIn
    from clotho.serving.auth import ClientKey
    from clotho.serving.chat_extension import MessageDelta
    from clotho.serving.parts import ServerParts
    from clotho.settings.server import AdaptersSection, HttpServer
    from protocols.constraints import Constraint, Grammar

Entry = TypeVar("Entry")


ReadMessage = Callable[[str, str], "MessageDelta"]
"""Reads the end of a prompt and the text of a completion, special tokens included, as a whole message."""


class ModelFormat(Struct, frozen=True, kw_only=True):
    """A format of model files; the key is their suffix, such as `.gguf`.

    open: called with the path and `read_weights`, as `clotho.models.loading.open_base`, returns the model and its
    configuration. tokenizer: called with the path, returns a tokenizer of transformers.
    """

    open: str
    tokenizer: str


OWNERS: Mapping[str, str] = {
    ".gguf": "files",
    "gguf": "files",
    "npz": "files",
    "peft": "files",
    "judge": "graders",
    "math_verify": "graders",
    "reasoning_gym": "reasoning_gym",
    "reward_model": "reward_model",
}
"""The attachment that each name of the tables below belongs to, so that a name is refused by its attachment."""


class Extension:
    """What one attachment adds to the library. Its `library.py` holds an instance, `EXTENSION`, which has no state.

    A subclass states what it adds; every method adds nothing by default. `library.py` imports no MLX and no web
    framework, and the modules that need them only when they are used, because it is imported at every start.
    """

    def backend(self, kind: mx.DeviceType) -> Backend | None:
        """Return what computes on a kind of device instead of MLX; None if MLX does."""
        return None

    @property
    def attachment(self) -> str:
        """Name of the folder."""
        return type(self).__module__.split(".")[1]

    def install_layers(self) -> None:
        """Replace functions of mlx-lm's model modules by equivalent ones; called after each model is built."""

    def engine(self, parts: EngineParts) -> None:
        """Replace parts of a decode engine; called once per engine, in its thread. Raises ModelError."""

    def adapter_bytes(self, model: nn.Module, limits: AdaptersSection, itemsize: int) -> int:
        """Return the largest number of bytes that adapters of an engine with these limits take.

        model: as mlx-lm builds it, not evaluated. itemsize: bytes per number of the compute type.
        """
        return 0

    def scan_bytes(self, block: nn.Module, state: Sequence[int], *, rows: int, tokens: int) -> int:
        """Return the bytes that the backward pass of a block's recurrent layer works with; 0 if it has none.

        state: heads, and the two sizes of the state of a head. rows, tokens: of the sequences that the layer computes.
        """
        return 0

    def model_formats(self) -> Mapping[str, ModelFormat]:
        """Return formats of model files, by their suffix."""
        return {}

    def adapter_formats(self) -> Mapping[str, str]:
        """Return what reads adapters of each format: `module:name` of a `clotho.models.adapter_reading.ReadAdapter`."""
        return {}

    def rewards(self) -> Mapping[str, BuiltIn]:
        """Return built-in reward functions, by name."""
        return {}

    def grammar_compiler(
        self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int
    ) -> Callable[[Grammar], Constraint] | None:
        """Return what compiles grammars for a tokenizer of transformers and logits of this width; None: nothing does.

        Raises ValueError if the tokenizer permits no constrained decoding. Compilation raises RequestError.
        """
        return None

    def message_reader(self, template: str, tools: Sequence[Mapping[str, Any]]) -> ReadMessage | None:
        """Return what reads the messages of a model whose calls of tools are in the form of its chat template.

        tools: definitions in the format of the OpenAI API. None: messages are texts. Raises ValueError if the form is
        unknown.
        """
        return None

    def client_keys(self, _: HttpServer) -> Sequence[ClientKey]:
        """Return API keys of a server. Raises ProfileError if they are not valid."""
        return ()

    def server(self, parts: ServerParts) -> None:
        """Add to the parts of a server; called once per server. What they share belongs to the parts, not to this."""


def attachment_names() -> list[str]:
    """Return the names of the folders of `attachments/` that are installed, sorted."""
    return sorted(one.name for one in pkgutil.iter_modules(_places()) if one.ispkg)


def attachment_modules(name: str) -> Iterator[ModuleType]:
    """Import the modules of this name in the folders of `attachments/`, by the names of the folders."""
    for folder in attachment_names():
        module = f"attachments.{folder}.{name}"
        if PathFinder.find_spec(module, [os.path.join(place, folder) for place in _places()]):
            yield import_module(module)


def _places() -> list[str]:
    package = find_spec("attachments")
    return list(package.submodule_search_locations or ()) if package else []


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of the attachments that are installed, by the names of their folders.

    An attachment without `library.py` adds nothing to the library.
    """
    return tuple(module.EXTENSION for module in attachment_modules("library"))


def provided(place: str) -> Any:
    """Import what a row names as `module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def absence(name: str) -> str:
    """Return why no table has a name: its attachment is not installed. Empty for names of no attachment."""
    return needs(OWNERS[name]) if name in OWNERS else ""


def needs(attachment: str) -> str:
    """Return the refusal of what an attachment would provide."""
    return f"needs the attachment {attachment!r}, which this installation lacks"


def joined(table: Callable[[Extension], Mapping[str, Entry]]) -> dict[str, Entry]:
    """Return what all attachments provide of one kind, by name. table: of one extension."""
    return {name: entry for one in extensions() for name, entry in table(one).items()}
