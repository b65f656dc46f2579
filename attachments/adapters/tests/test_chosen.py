"""Adapters that an operator serves: every form from which a run can start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attachments.adapters.adapter_store import AdapterStore
from attachments.adapters.adapter_weights import read_chosen
from attachments.files.convert import convert
from clotho.models.policy import BaseModel
from clotho.settings.model import ModelSection
from clotho.settings.server import AdaptersSection
from protocols.errors import ClothoError
from tests.training_run.start.test_initial_adapter import trained

pytestmark = pytest.mark.needs_float32


async def forms(directory: Path) -> dict[str, Path]:
    """The same adapter in every form, by the name of the form."""
    checkpoint, _ = await trained(directory, "lora")
    run, base = directory / "source", str(directory / "base")
    found = {"directory": run / "adapters", "run": run, "checkpoint": checkpoint}
    found["file"] = run / "adapters" / "adapters.safetensors"
    for form in ("peft", "npz", "gguf"):
        found[form] = directory / ("other.gguf" if form == "gguf" else form)
        convert(checkpoint, found[form], form, model=base)
    return {**found, "npz file": found["npz"] / "adapter.npz"}


def store_of(directory: Path, **limits: Any) -> AdapterStore:
    """The store of a server of the base model."""
    return AdapterStore(BaseModel(ModelSection(path=str(directory / "base"))).model, AdaptersSection(**limits))


async def test_an_operator_serves_an_adapter_in_every_form(tmp_path: Path) -> None:
    """All of them have the values that a client's directory of mlx-lm has; none needs a name of its own."""
    found = await forms(tmp_path)
    store = store_of(tmp_path)
    expected = store.read(found["directory"])
    assert len(found) == 8
    for form, path in found.items():
        contents = read_chosen(path, str(tmp_path / "base"), store)
        assert contents.arrays.keys() == expected.arrays.keys(), form
        for name, values in contents.arrays.items():
            assert np.array_equal(values, expected.arrays[name]), (form, name)
        assert contents.scales == pytest.approx(expected.scales), form
        assert store.load(form.replace(" ", "-"), contents).rank == expected.rank


@pytest.mark.parametrize("kind", ["dora", "head", "full"])
async def test_what_cannot_be_served_beside_other_adapters_is_refused(tmp_path: Path, kind: str) -> None:
    """With one line and exit status 2: DoRA, adapters of embeddings, and weights in full."""
    checkpoint, _ = await trained(tmp_path, kind)
    with pytest.raises(ClothoError) as caught:
        read_chosen(checkpoint, str(tmp_path / "base"), store_of(tmp_path))
    assert caught.value.exit_status == 2
    assert str(checkpoint) in str(caught.value)


@pytest.mark.parametrize("limits", [{"max_rank": 1}, {"max_bytes": 64}])
async def test_the_limits_of_the_server_apply(tmp_path: Path, limits: dict[str, int]) -> None:
    """As to adapters that clients load."""
    checkpoint, _ = await trained(tmp_path, "lora")
    with pytest.raises(ClothoError, match=next(iter(limits))):
        read_chosen(checkpoint, str(tmp_path / "base"), store_of(tmp_path, **limits))
