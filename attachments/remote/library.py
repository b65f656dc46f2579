"""What `remote` adds to the library: routes for training runs that sample their rollouts on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts

MESSAGES = "attachments.remote.messages"


class RemoteExtension(Extension):
    """Routes of rollouts and weights."""

    def server(self, parts: ServerParts) -> None:
        """Add the routes through which another process reads and replaces the weights."""
        from clotho.serving.parts import Endpoint, Handlers

        routes, policy = Handlers("attachments.remote.routes:routes_of", parts), (f"{MESSAGES}:ServedPolicy",)
        parts.endpoints += (
            Endpoint(
                "POST",
                "/v1/rollouts",
                routes.method("rollouts"),
                "Sample a group of a training run",
                (f"{MESSAGES}:RolloutCall",),
                (f"{MESSAGES}:RolloutAnswer",),
            ),
            Endpoint(
                "GET",
                "/v1/policy",
                routes.method("get"),
                "The policy that a training run of another process sends",
                responses=policy,
            ),
            Endpoint(
                "PUT",
                "/v1/policy/weights",
                routes.method("put"),
                "Replace the weights of the policy",
                responses=policy,
                binary=True,
                access="admin",
            ),
        )


EXTENSION = RemoteExtension()
