"""What computes: MLX, unless an attachment offers another backend."""

from __future__ import annotations

import mlx.core as mx
import pytest

from clotho.backend import Backend, backend
from tests import model_lanes


def test_a_process_has_one_backend_per_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call returns the same object, which keeps what was chosen; another device may have another one."""
    on_cpu = backend()
    assert all(backend() is on_cpu for _ in range(3))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert type(backend()) is Backend
    monkeypatch.undo()
    assert backend() is on_cpu


def test_the_switch_of_the_environment_leaves_everything_to_mlx() -> None:
    """Whatever attachments offer."""
    with model_lanes.device_path():
        assert type(backend()) is Backend
