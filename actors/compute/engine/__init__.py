"""The decode engine: continuous batching on mlx-lm's models and caches."""

from __future__ import annotations

from actors.compute.engine.engine import DecodeEngine, Source
from actors.compute.engine.stats import EngineStats

__all__ = ["DecodeEngine", "EngineStats", "Source"]
