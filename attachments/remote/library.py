"""What `remote` adds to the library: routes for training runs that sample their rollouts on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts

MESSAGES = "attachments.remote.messages"


def server(parts: ServerParts) -> None:
    """Add the routes through which another process reads and replaces the weights."""
    from clotho.serving.parts import Endpoint, Handlers

    routes, policy = Handlers("attachments.remote.routes:routes_of", parts), (f"{MESSAGES}:ServedPolicy",)
    call, answer = (f"{MESSAGES}:RolloutCall",), (f"{MESSAGES}:RolloutAnswer",)
    about, seen = "Sample a group of a training run", "The policy that a training run of another process sends"
    put, replace = routes.method("put"), "Replace the weights of the policy"
    parts.endpoints += (
        Endpoint("POST", "/v1/rollouts", routes.method("rollouts"), about, call, answer),
        Endpoint("GET", "/v1/policy", routes.method("get"), seen, responses=policy),
        Endpoint("PUT", "/v1/policy/weights", put, replace, responses=policy, binary=True, access="admin"),
    )
