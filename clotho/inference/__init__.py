"""The decode engine: continuous batching on mlx-lm's models and caches."""

from __future__ import annotations

from clotho.inference.engine import DecodeEngine, EngineStats, Source

__all__ = ["DecodeEngine", "EngineStats", "Source"]
