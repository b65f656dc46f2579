"""Control of the decode engine by clients: pause, resume, sleep, and the end of requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import anyio

from clotho.lanes.compute_thread import finish
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.services import EngineAccess

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to requests in progress: they end as aborted, they finish, or they stand still until `resume`."""

ID_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-", "resp_", "msg_")
POLL_SECONDS = 0.01


class EngineControl:
    """Pauses and resumes the engine, and aborts requests. Rollouts of a training run are never aborted."""

    def __init__(self, access: EngineAccess, *, may_pause: bool) -> None:
        """may_pause: whether clients may pause the engine."""
        self._submit, self._engine, self._may_pause = access.submit, access.engine, may_pause
        self.is_paused = self.is_sleeping = False

    def why_paused(self) -> str:
        """Return why requests wait; empty if they do not."""
        return "paused; POST /resume continues" if self.is_paused else ""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Hold the engine: no request begins until `resume`. Raises ApiError with status 403 if that is not permitted.

        clear_cache: empty the prefix cache; with `keep`, it is kept.
        """
        self._require_permission()
        self.is_paused = True

        def hold() -> None:
            self._engine.held = "admission" if mode == "wait" else "everything"
            if mode == "abort":
                self._engine.abort_clients(None)

        await finish(self._submit(hold))
        while mode == "wait" and self.is_paused:
            if not await finish(self._submit(lambda: self._engine.running)):
                break
            await anyio.sleep(POLL_SECONDS)
        if clear_cache and mode != "keep":
            await finish(self._submit(self._engine.release_caches))

    async def resume(self) -> None:
        """Continue. Raises ApiError with status 403 if that is not permitted."""
        self._require_permission()

        def release() -> None:
            self._engine.held = "nothing"

        await finish(self._submit(release))
        self.is_paused = self.is_sleeping = False

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause; level 1 also frees caches. Raises ApiError for other levels: weights stay in unified memory."""
        if level not in (0, 1):
            raise invalid_field("level", "must be 0 or 1: the weights stay in memory")
        await self.pause(mode, clear_cache=level == 1)
        self.is_sleeping = True

    async def abort(self, request_ids: Collection[str] | None, owner: str) -> int:
        """Abort requests by their names; None: all requests of clients. Returns the number of aborted requests.

        owner: only requests of this client; empty: of all.
        """
        names = request_ids and {_bare(name) for name in request_ids}
        return await finish(self._submit(lambda: self._engine.abort_clients(names, owner)))

    async def flush(self) -> None:
        """Empty the prefix cache."""
        await finish(self._submit(self._engine.release_caches))

    def _require_permission(self) -> None:
        if not self._may_pause:
            message = "A training run is not paused by clients; set server.allow_pause."
            raise ApiError(403, message, code="control_disabled")


def _bare(name: str) -> str:
    for prefix in ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name
