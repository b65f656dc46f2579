"""The decode engine: continuous batching over the models and caches of mlx-lm."""

from __future__ import annotations

from clotho.inference.engine import DecodeEngine
from clotho.inference.interface import EngineStats, ServedModel

__all__ = ["DecodeEngine", "EngineStats", "ServedModel"]
