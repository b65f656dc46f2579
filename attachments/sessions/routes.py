"""POST /v1/rewards."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from attachments.sessions.posts import RewardPost
from attachments.sessions.sessions import Sessions
from clotho.serving.auth import client_of
from clotho.serving.bodies import json_object, json_response
from clotho.serving.errors import invalid_field
from clotho.serving.openai_requests import converted
from clotho.serving.parts import ServerParts
from protocols.rollout import MAX_GROUP_REWARD, bounded


class RewardRoutes:
    """The route of rewards."""

    def __init__(self, parts: ServerParts, sessions: Sessions) -> None:
        self._context, self._sessions = parts.context, sessions

    async def rewards(self, http: Request) -> Response:
        """Accept the rewards of a session or of answers."""
        answer = self._sessions.reward(parse_post(await http.body()), client_of(http.scope))
        return json_response(answer, self._context.weights().version)


def parse_post(body: bytes) -> RewardPost:
    """Parse the body of /v1/rewards. Raises ApiError."""
    post = converted(json_object(body), RewardPost)
    if post.session is not None and post.receipts is not None:
        raise invalid_field("receipts", "and session exclude each other; name one of the two")
    if post.session is None and post.receipts is None and (post.amounts or not post.close):
        raise invalid_field("session", "is missing; name a session, or the receipts of answers")
    if post.reward is not None and post.rewards is not None:
        raise invalid_field("rewards", "and reward exclude each other; set one of the two")
    if post.rewards is not None and len(post.rewards) != len(post.receipts or ()):
        count = len(post.receipts or ())
        raise invalid_field(
            "rewards", f"has {len(post.rewards)} entries for {count} receipts; one session has `reward`"
        )
    if not post.amounts and (post.session or post.receipts):
        raise invalid_field("reward", "is missing")
    if not bounded(post.amounts):
        raise invalid_field("reward", f"must be between -{MAX_GROUP_REWARD:g} and {MAX_GROUP_REWARD:g}")
    if post.close and post.group is None:
        raise invalid_field("close", "needs the group that is complete")
    return post
