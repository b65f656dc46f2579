"""What `sessions` adds to the library: the route of rewards, in the server of a run that trains on sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts


def server(parts: ServerParts) -> None:
    """Add the route if the sessions of this server are recorded."""
    from clotho.serving.parts import Endpoint, Handlers

    sessions, here = parts.offered.sample_log, "attachments.sessions"
    if type(sessions).__module__ == f"{here}.sessions":  # an import would load what most servers do not use
        rewards = Handlers(f"{here}.routes:RewardRoutes", parts, sessions).method("rewards")
        post, answer = (f"{here}.posts:RewardPost",), (f"{here}.posts:Rewarded",)
        about = "Reward a session, or answers by their receipts"
        parts.endpoints.append(Endpoint("POST", "/v1/rewards", rewards, about, post, answer, access="own"))
