"""What the learner of a run waits for."""

from __future__ import annotations

from pathlib import Path

from anyio import to_thread

from tests.training_run.built_context import open_context, tiny_profile
from training_run.profile.load import load_profile
from training_run.records.waiting import GroupsInFlight, GroupStages, waits_for
from training_run.supervision.queues import Queue


async def test_groups_are_where_they_were_sent_last(tmp_path: Path) -> None:
    """The queues of stages count once, and copies for taps do not. Other threads, such as the display's, may ask."""
    queues = {name: Queue[int](name, capacity=8) for name in ("prompts", "rollouts", "scored", "updates.broadcaster")}
    async with open_context(tiny_profile(tmp_path)) as run:
        groups = GroupsInFlight(run, list(queues.values()))
        for name, sent, received in (("prompts", 5, 4), ("rollouts", 2, 2), ("scored", 1, 1)):
            outbox, inbox = queues[name].outbox(), queues[name].inbox()
            for number in range(sent):
                await outbox.send(number)
            for _ in range(received):
                await inbox.receive()
        assert groups.stages() == GroupStages(queued=1, decoding=2, scoring=1, waiting=1)
        assert await to_thread.run_sync(groups.waiting_for) == "groups that are decoded"


def test_the_text_says_what_the_learner_waits_for() -> None:
    """The place of the groups that are missing, or the receiver that holds the learner up."""
    profile = load_profile("local-m3", {"learner.batch_size": 4, "steps": 10})
    texts = [
        waits_for(profile, step, groups, receiver)
        for step, groups, receiver in (
            (1, GroupStages(decoding=2, scoring=1), ""),
            (1, GroupStages(scoring=1), ""),
            (1, GroupStages(queued=1), ""),
            (1, GroupStages(), ""),
            (1, GroupStages(waiting=4), "checkpointer"),
            (10, GroupStages(), ""),
        )
    ]
    assert len(set(texts)) == 6
    assert "checkpointer" in texts[4]
