"""What `dialects` adds to the library: the routes of SGLang, vLLM and TRL, /v1/responses, and control of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.dialects.sections import ALLOW_PAUSE
from clotho.extension import Extension

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts


class Dialects(Extension):
    """Routes in the formats of other servers."""

    def server(self, parts: ServerParts) -> None:
        """Add the routes of vLLM, SGLang and TRL, and the control of the engine."""
        from attachments.dialects.endpoints import DialectRoutes

        parts.endpoints += DialectRoutes(parts).endpoints()
        if (access := parts.offered.engine) is not None:
            from attachments.dialects.control import EngineControl
            from attachments.dialects.routes_control import ControlHandlers

            control = EngineControl(access, may_pause=access.may_pause or ALLOW_PAUSE.of(parts.offered.settings))
            parts.pauses.append(control.why_paused)
            parts.endpoints += ControlHandlers(control, parts.bodies).endpoints()


EXTENSION = Dialects()
