"""The weights of the adapter that a run starts from (`policy.adapter`), as the parameters of its policy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from clotho.models.parameters import as_parameters, fingerprint, flat, nested
from clotho.models.policy import Policy
from clotho.storage.adapters import TENSORS, read_adapter_config, tensor_problems, unpad_ranks
from clotho.storage.atomic_files import digest_file
from clotho.storage.tensors import read_tensors
from protocols.checkpoint import AdapterConfig, Origin
from protocols.errors import CheckpointError, ClothoError, ModelError
from training_run.adapters.contents import Adapter, Floats
from training_run.adapters.formats import TENSOR_FILES
from training_run.adapters.reading import listed, read_adapter_of
from training_run.directory.checkpoints import read_state
from training_run.directory.run_directory import read_run_id
from training_run.directory.run_paths import run_of
from training_run.start.adapter_settings import KEY, find_adapter, main_scale, own_config


class InitialAdapter(NamedTuple):
    """An adapter that was read. own: configuration of weights trained in full, whose tensors are read later."""

    path: Path
    origin: Origin
    adapter: Adapter | None
    own: AdapterConfig | None


def read_initial(text: str, model: str) -> InitialAdapter:
    """Read the adapter that `policy.adapter` names, in any thread, before the policy is loaded.

    model: value of `model.path`. Raises an error with exit status 2.
    """
    path = find_adapter(text)
    try:
        own = own_config(path)
        adapter = None if own else read_adapter_of(path, model)
    except ClothoError as error:
        raise ModelError(f"{KEY}: {error}") from error
    file = path if path.is_file() else next(path / name for name in TENSOR_FILES if (path / name).is_file())
    run = run_of(path)
    origin = Origin(
        kind="adapter",
        path=str(path.absolute()),
        sha256=digest_file(file).sha256,
        step=read_state(path).step if run else None,
        run_id=read_run_id(run) if run else _run_id(path),
        format=adapter.format if adapter else "mlx",
        base_model=adapter.base_name if adapter else own.model if own else "",
    )
    return InitialAdapter(path, origin, adapter, own)


def _run_id(path: Path) -> str:
    """Return the id of the run that wrote an adapter of mlx-lm; empty if the configuration states none."""
    try:
        return read_adapter_config(path).run_id
    except CheckpointError:  # another format, or an adapter of mlx-lm without the keys of Clotho
        return ""


def publish_initial(policy: Policy, initial: InitialAdapter) -> None:
    """Serve the weights of an adapter as version 0, in a compute thread.

    Scales that differ between modules are folded into B: the policy computes the same, and trains with one scale.
    Raises ModelError if the adapter has other modules or shapes than the policy.
    """
    expected = flat(policy.trainable())
    if initial.adapter is not None:
        arrays = as_parameters(_matrices(initial.adapter, policy), expected)
    else:
        assert initial.own is not None
        arrays = as_parameters(unpad_ranks(read_tensors(initial.path / TENSORS), initial.own), expected)
    if initial.own is not None and initial.own.fine_tune_type == "full":
        arrays = {**expected, **arrays}
    if problems := tensor_problems(arrays, expected):
        raise ModelError(f"{KEY}: {initial.path} does not fit the policy: {listed(problems)}")
    tree = nested(arrays)
    policy.publish(tree, version=0, step=0, fingerprint=fingerprint(tree))


def _matrices(adapter: Adapter, policy: Policy) -> dict[str, Floats]:
    parameters = policy.adapter_config.lora_parameters
    scale = parameters.scale if parameters else main_scale(adapter)
    arrays: dict[str, Floats] = {}
    for name, values in adapter.arrays.items():
        module, _, matrix = name.rpartition(".")
        own = adapter.scales[module]
        arrays[name] = values * np.float32(own / scale) if matrix == "lora_b" and own != scale else values
    return arrays
