"""What the verbs of the library share: the compute threads of the process, and the loading of a policy."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from clotho.lanes.arbiter import WorkCancelled
from clotho.lanes.compute_thread import Compute
from clotho.models.machine import compute_slots, core_division, limit_mlx_memory, memory_limit
from clotho.models.policy import Policy, load_policy
from clotho.process import configure_malloc
from clotho.settings.keys import Keys, decode_table, flatten_table, implied_types
from clotho.settings.model import Dtype, GradCheckpoint, Method, ModelSection, PolicySection, QuantizeAtLoad
from protocols.errors import ProfileError
from protocols.sampling import Sampling

S = TypeVar("S", bound=Struct)
T = TypeVar("T")

DEFAULT = Sampling()
"""At most 512 tokens from the model's own distribution."""

_sizes: list[int] = []
"""Parameters of the models that were loaded; the largest decides how the cores are divided."""

LABEL = "clotho"
"""Where settings come from, in messages."""

NONE: Mapping[str, Any] = {}

CACHE_BYTES = 512 * 2**20
"""Limit of MLX's cache of freed buffers."""

STOP_SECONDS = 5.0
"""How long the end of the process waits for what the compute threads are doing."""


@cache
def compute() -> Compute:
    """Return the compute threads of this process, which start at the first call and share the device fairly."""
    configure_malloc()
    limit_mlx_memory(memory_limit(), held=0, cache=CACHE_BYTES)
    threads = Compute(decode_share=0.5, slots=compute_slots())
    threads.start()
    atexit.register(threads.stop, timeout=STOP_SECONDS)
    return threads


def result_of(future: Future[T]) -> T:
    """Wait for a result; an interrupt cancels the work. Raises WorkCancelled if the work was cancelled elsewhere."""
    try:
        return future.result()
    except CancelledError:
        raise WorkCancelled("the work was cancelled in its own thread") from None
    except BaseException:
        future.cancel()
        raise


def settings(name: str, kind: type[S], values: Mapping[str, Any], overrides: Mapping[str, Any] = NONE) -> S:
    """Return a section of a profile from keyword arguments; None stands for the default.

    Values are structs, or as in the table `[name]` of a profile: "dapo" is {"type": "dapo"}. overrides: values by key
    path, such as `learner.optimizer.learning_rate`. Raises ProfileError as a profile does, with the key, what is
    allowed, and the nearest valid key.
    """
    try:
        table = msgspec.to_builtins({key: value for key, value in values.items() if value is not None})
    except TypeError as error:
        raise ProfileError(f"{LABEL}: settings are numbers, text, tables and structs of clotho: {error}") from error
    keys, holder = _keys(name, kind)
    given = flatten_table(keys, {name: table}, LABEL)
    given = {key: one for key, one in (given | {**overrides}).items() if one is not None}
    found: S = getattr(
        decode_table(keys, {**dict(implied_types(keys, {}, given)), **given}, holder, lambda _: LABEL), name
    )
    return found


@cache
def _keys(name: str, kind: type[Struct]) -> tuple[Keys, type[Struct]]:
    """The keys of a section, and the struct whose only field it is."""
    holder = msgspec.defstruct("Holder", [(name, kind)], kw_only=True, frozen=True)
    return Keys(holder), holder


def load(
    model: str,
    *,
    method: Method | str | Mapping[str, Any] = "lora",
    dtype: Dtype = "auto",
    dequantize: bool = False,
    quantize: QuantizeAtLoad | Mapping[str, Any] | None = None,
    chat_template: str = "",
    grad_checkpoint: GradCheckpoint = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> Policy:
    """Load a model and make it trainable.

    model: a directory in the format of mlx-lm, a GGUF file, `package:NAME/FILE`, or a repository of the Hugging Face
    hub, which is downloaded. method: what is trained: `LoRA()`, `DoRA()`, `Full()`, or its name and settings as in
    `[policy.method]`; the first weights stay in memory, for new samplers and as a reference. dtype: of computation;
    "auto": float32 on a CPU, that of the files on a GPU. dequantize: expand a quantized model, which is faster on a
    CPU. quantize: pack the weights of a full-precision model, such as `{"type": "at_load", "bits": 4}`: with LoRA this
    is QLoRA. chat_template: file of another template than the model's. grad_checkpoint: less memory and more time for
    gradients; "auto": for models of 100 million parameters or more. trust_remote_code: run the Python code of the
    repository. seed: of a new adapter.

    Raises ModelError if the model cannot be found, read or trained in this way, and ProfileError for a setting that is
    not valid; both are ClothoErrors.
    """
    section = settings(
        "model",
        ModelSection,
        {
            "path": model,
            "dtype": dtype,
            "dequantize": dequantize,
            "quantize": quantize,
            "chat_template": chat_template,
            "trust_remote_code": trust_remote_code,
        },
    )
    chosen = settings("policy", PolicySection, {"method": method, "grad_checkpoint": grad_checkpoint})
    threads = compute()
    policy = threads.learner.submit(lambda: load_policy(section, chosen, seed=seed, keep_reference=True)).result()
    _sizes.append(policy.description.parameters)
    threads.arbiter.divide_cores(core_division(max(_sizes)))
    return policy
