"""The process of a rollout worker: an asynchronous actor of Ray around a decode engine.

This module does not import MLX, because `load_blas` must come first in a new process.
"""

from __future__ import annotations

import msgspec

from attachments.cluster.messages import Published, Turn, worker_settings
from clotho.process import configure_malloc, load_blas
from clotho.serving.struct_types import prepare_struct_types


class RolloutWorker:
    """Samples rollouts with the newest weights that the run has published. All messages are msgpack."""

    def __init__(self, settings: bytes) -> None:
        """Load the model. settings: `EngineWorkerSettings`. Raises ModelError if this machine cannot load it."""
        configure_malloc()
        load_blas()
        from attachments.cluster.rollout_engine import RolloutEngine  # imports MLX

        prepare_struct_types()
        self._engine = RolloutEngine(worker_settings(settings))

    async def served(self) -> bytes:
        """Return the policy that the engine samples from, a `ServedPolicy`."""
        return msgspec.msgpack.encode(self._engine.served())

    async def replace(self, published: bytes, *contents: bytes) -> bytes:
        """Serve published weights; return the policy that the engine samples from now.

        published: `Published`. contents: a safetensors file, or patches. Raises CheckpointError, and changes nothing,
        if the weights are not those of the policy.
        """
        description = msgspec.msgpack.decode(published, type=Published)
        return msgspec.msgpack.encode(await self._engine.replace(description, contents))

    async def submit(self, turn: bytes) -> int:
        """Submit the requests of a `Turn` to the engine at once; return the number of the turn."""
        return self._engine.submit(msgspec.msgpack.decode(turn, type=Turn))

    async def outcome(self, turn: int, position: int) -> bytes:
        """Return the `Outcome` of the request at a position of a turn. Cancellation withdraws the request."""
        return msgspec.msgpack.encode(await self._engine.outcome(turn, position))
