"""Answers and members of groups, without a server."""

from __future__ import annotations

from attachments.sessions.groups import Member
from attachments.sessions.rows import SessionAnswer, SessionRow, trajectories
from protocols.sampling import Completion, ExpertRoutes, SampleRequest, Sampling


def sample(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    *,
    temperature: float = 1.0,
    supports: bool = False,
    route: int = 0,
) -> tuple[SampleRequest, Completion]:
    """Return a request and its completion; token t has the log-probability -t / 10 and the version of its position.

    route: byte of the route of every token; 0: none were recorded.
    """
    experts = bytes([route]) * (len(prompt) + len(tokens) - 1)
    completion = Completion(
        tokens=tokens,
        logprobs=tuple(-token / 10 for token in tokens),
        versions=tuple(range(len(prompt), len(prompt) + len(tokens))),
        text="",
        finish_reason="stop",
        supports=(b"s",) * len(tokens) if supports else (),
        routes=ExpertRoutes(experts=experts, layers=1, per_token=1, number_bytes=1) if route else None,
    )
    return SampleRequest(prompt=prompt, sampling=Sampling(temperature=temperature), seeds=(1,)), completion


def row(*answers: tuple[SampleRequest, Completion]) -> list[SessionAnswer]:
    """Return the answers of one row."""
    found = SessionRow(*answers[0])
    return [found.add(*one) for one in answers]


class Attempt:
    """A member, and the reasons with which it has ended."""

    def __init__(self, reward: float = 1.0, *rows: list[SessionAnswer], prompt: tuple[int, ...] = (1, 2)) -> None:
        self.ends: list[str] = []
        answers = [one for answers in rows or (row(sample(prompt, (3,))),) for one in answers]
        self.member = Member(trajectories=trajectories(answers), reward=reward, ended=self.ends.append)
