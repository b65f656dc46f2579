"""How the groups of sessions reach the learner, and how their members learn what became of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anyio import to_thread
from prometheus_client.core import Metric

from attachments.sessions.groups import SessionGroup, SessionGroups
from attachments.sessions.rows import common_prefix
from attachments.sessions.sections import HttpSessions
from attachments.sessions.sessions import Sessions
from clotho.serving.metrics import counter, gauge
from clotho.settings.objectives import BatchAdvantage
from protocols.accounting import Balance
from protocols.batches import GroupSupply
from protocols.checkpoint import Part
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.step import TrainedGroup
from training_run.run import RunContext
from training_run.supervision.hooks import UpdateHook

NAME = "sessions"
PATIENCE_SECONDS = 60.0
"""Time without a group until a warning says what the run waits for."""


class SessionSource:
    """Gives complete groups to the fetcher, one at a time."""

    def __init__(self, groups: SessionGroups, describe: Callable[[], str]) -> None:
        """describe: says what the run waits for if there are no groups."""
        self._groups, self._describe = groups, describe

    async def open(self, *, step: int) -> None:
        """Nothing has to be registered."""

    async def batch(self, *, step: int) -> list[SessionGroup] | None:
        """Wait for a group; None after `PATIENCE_SECONDS`."""
        group = await self._groups.next(PATIENCE_SECONDS)
        return None if group is None else [group]

    async def waiting_for(self) -> str:
        """Say what the run waits for."""
        return self._describe()

    async def close(self) -> None:
        """Nothing is connected."""


class SessionReader(UpdateHook):
    """Converts groups to messages for the learner, and tells the members how their groups have ended."""

    def __init__(self, *, decode: Callable[[Sequence[int]], str], temperature: float, across_groups: bool) -> None:
        """temperature: of the run. across_groups: groups with equal rewards have advantages too."""
        self._decode, self._temperature, self._across_groups = decode, temperature, across_groups
        self._in_flight: dict[int, SessionGroup] = {}

    async def read(self, group: SessionGroup, *, group_id: int, version: int) -> GroupOutcome:
        """Return the message of a group, which may have more sequences than members.

        The prompt is the common prefix of all sequences before the first sampled token, as in groups of Atropos.
        """
        self._in_flight[group_id] = group
        return await to_thread.run_sync(self._message, group, group_id)

    def _message(self, group: SessionGroup, group_id: int) -> GroupOutcome:
        found = [(one, member.reward) for member in group.members for one in member.trajectories]
        shared = common_prefix([one for one, _ in found])
        prefix = tuple(found[0][0].tokens[:shared])
        problem = Problem(prompt=self._decode(prefix), answer="", type=group.scenario)
        prompt = Prompt(group_id=group_id, problem=problem, tokens=prefix, seed=0, source=group.scenario)
        completions = tuple(one.completion(shared, decode=self._decode, reward=reward) for one, reward in found)
        rewards = tuple(reward for _, reward in found)
        temperatures = tuple(one.answers[0].row.temperature for one, _ in found)
        scored = ScoredGroup(
            group=RolloutGroup(prompt=prompt, completions=completions),
            rewards=rewards,
            parts={},
            temperatures=temperatures if set(temperatures) != {self._temperature} else (),
        )
        return scored if self._across_groups else scored.unless_equal()

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """End the members of groups that have ended."""
        ends = [(one.scored.group.prompt.group_id, "") for one in trained]
        for group_id, reason in (*ends, *((one.prompt.group_id, str(one.reason)) for one in discarded)):
            if (group := self._in_flight.pop(group_id, None)) is not None:
                for member in group.members:
                    member.ended(reason)


def supply_sessions(run: RunContext, settings: HttpSessions) -> None:
    """Let the server of a run record sessions, and its fetcher take their groups.

    The counts of the checkpoint continue. Sessions that had not ended are gone.
    """
    profile, attached = run.profile, run.attached
    saved = attached.parts.saved(NAME, Balance)
    groups = SessionGroups(size=profile.sampling.group_size, clock=time.monotonic)
    sessions = Sessions(
        settings,
        groups,
        life=secrets.token_hex(4),
        tokenizer=run.policy.tokenizer,
        context_length=run.policy.context_length,
        logit_bias=profile.sampling.logit_bias,
        saved=saved.value if saved else None,
    )
    reader = SessionReader(
        decode=run.policy.tokenizer.decode,
        temperature=profile.sampling.temperature,
        across_groups=isinstance(profile.learner.objective.advantage, BatchAdvantage),
    )
    source = SessionSource(groups, sessions.waiting_for)
    attached.samples = sessions
    attached.groups = GroupSupply(source=source, reader=reader, poll_seconds=1.0, patience_seconds=PATIENCE_SECONDS)
    attached.hooks.append(reader)
    attached.parts.save(NAME, lambda: Part(value=sessions.balance()))
    attached.measures.append(lambda _: measured(sessions))
    attached.metrics.append(lambda: session_metrics(sessions))
    attached.balances[NAME] = sessions.balance


def measured(sessions: Sessions) -> dict[str, Any]:
    """Return the values for the next line of metrics.jsonl."""
    counts = sessions.counts
    return {
        "sessions/open": sessions.open,
        "sessions/rewarded": counts.rewarded,
        "sessions/dropped": sessions.balance().by_reason,
        "sessions/refused": dict(counts.refused),
        "sessions/forked": counts.forked,
        "sessions/untrainable": counts.untrainable,
    }


def session_metrics(sessions: Sessions) -> Iterator[Metric]:
    """Yield the same for /metrics."""
    now, balance = measured(sessions), sessions.balance()
    ends = {"trained": balance.trained, **balance.by_reason}
    yield gauge("clotho_sessions_open", "Sessions without a reward.", now["sessions/open"])
    yield counter("clotho_sessions_ended", "Sessions that have ended.", ends, by="end")
    yield counter("clotho_session_rewards", "Rewards that were accepted.", {"": now["sessions/rewarded"]})
    yield counter("clotho_session_refusals", "Posts and requests refused.", now["sessions/refused"], by="reason")
    yield counter("clotho_session_forks", "Rows beyond the first of a session.", {"": now["sessions/forked"]})
    yield counter("clotho_session_untrainable", "Answers not trained on.", {"": now["sessions/untrainable"]})
