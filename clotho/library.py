"""What the verbs of the library share: the compute threads of the process, and the loading of a policy."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from clotho.config.schema import Dtype, Method, ModelSection, MonitorSection, PolicySection, QuantizeAtLoad
from clotho.cpu import configure_malloc
from clotho.models.machine import compute_slots, core_division, limit_mlx_memory, memory_limit
from clotho.models.policy import Policy, load_policy
from clotho.runtime.compute_thread import Compute
from protocols.errors import ProfileError

S = TypeVar("S", bound=Struct)

STOP_SECONDS = 5.0
"""How long the end of the process waits for what the compute threads are doing."""


@cache
def compute() -> Compute:
    """Return the compute threads of this process, which start at the first call and share the device fairly."""
    configure_malloc()
    limit_mlx_memory(memory_limit(), held=0, cache=MonitorSection().cache_limit_mb * 2**20)
    threads = Compute(decode_share=0.5, slots=compute_slots())
    threads.start()
    atexit.register(threads.stop, timeout=STOP_SECONDS)
    return threads


def settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return a section of a profile from keyword arguments. A text names a type: "dapo" is {"type": "dapo"}.

    Values are structs, or mappings with the keys of docs/configuration.md. Raises ProfileError for an unknown key, and
    for a value of another type or out of range.
    """
    written = {name: value for name, value in values.items() if value is not None}
    tables = {
        name: {"type": one} if isinstance(one, str) and name in _unions(kind) else one for name, one in written.items()
    }
    try:
        return msgspec.convert(msgspec.to_builtins(tables), kind)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{error} (docs/configuration.md lists keys and values)") from error
    except TypeError as error:
        raise ProfileError(f"settings are numbers, text, mappings and structs of clotho: {error}") from error


@cache
def _unions(kind: type[Struct]) -> frozenset[str]:
    """Return the keys of a section whose tables have a type."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)

    def has_type(one: Any) -> bool:
        inner = getattr(one, "type", None) if isinstance(one, msgspec.inspect.Metadata) else one
        parts = inner.types if isinstance(inner, msgspec.inspect.UnionType) else (inner,)
        return any(isinstance(part, msgspec.inspect.StructType) and part.tag_field == "type" for part in parts)

    return frozenset(field.encode_name for field in info.fields if has_type(field.type))


def load(
    model: str,
    *,
    method: Method | str | Mapping[str, Any] = "lora",
    dtype: Dtype = "auto",
    quantize: QuantizeAtLoad | Mapping[str, Any] | None = None,
    chat_template: str = "",
    grad_checkpoint: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> Policy:
    """Load a model and make it trainable.

    model: a directory in the format of mlx-lm, a GGUF file, `package:NAME/FILE`, or a repository of the Hugging Face
    hub, which is downloaded. method: what is trained: `LoRA()`, `DoRA()`, `Full()`, or its name and settings as in
    `[policy.method]`. dtype: type of computation; "auto": float32 on a CPU, that of the files on a GPU. quantize: pack
    the weights of a full-precision model, such as `{"type": "at_load", "bits": 4}`: with LoRA this is QLoRA.
    chat_template: file of another template than the model's. grad_checkpoint: less memory and more time for gradients.
    seed: of a new adapter.

    Raises ModelError if the model cannot be found, read or trained in this way, and ProfileError for a setting that is
    not valid; both are ClothoErrors.
    """
    section = settings(
        ModelSection,
        {
            "path": model,
            "dtype": dtype,
            "quantize": quantize,
            "chat_template": chat_template,
            "trust_remote_code": trust_remote_code,
        },
    )
    chosen = settings(PolicySection, {"method": method, "grad_checkpoint": grad_checkpoint})
    threads = compute()
    policy = threads.learner.submit(lambda: load_policy(section, chosen, seed=seed, keep_reference=True)).result()
    threads.arbiter.divide_cores(core_division(policy.description.parameters))
    return policy
