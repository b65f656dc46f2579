"""What `remote` adds to the library: routes for training runs that sample their rollouts on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.remote.sections import WEIGHTS_ROOT
from clotho.extension import Extension

if TYPE_CHECKING:
    from attachments.remote.routes import PolicyReceiver
    from clotho.serving.parts import ServerParts


class RemoteExtension(Extension):
    """Routes of rollouts and weights."""

    def server(self, parts: ServerParts) -> None:
        """Add the routes through which another process reads and replaces the weights."""
        from attachments.remote.routes import NullPolicyReceiver, PolicyRoutes

        replaceable = parts.offered.replaceable
        receiver: PolicyReceiver = NullPolicyReceiver()
        if replaceable is not None:
            from attachments.remote.policy_receiver import SwappingReceiver

            receiver = SwappingReceiver(replaceable, root=WEIGHTS_ROOT.of(parts.offered.settings))
        parts.endpoints += PolicyRoutes(parts, receiver, parts.bodies.seconds).endpoints()


EXTENSION = RemoteExtension()
