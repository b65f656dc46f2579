"""The curriculum in a run: when it chooses, what a resumed run chooses, and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.prompter import Prompter
from attachments.curriculum import attachment
from attachments.curriculum.curriculum import NAME, Curriculum, CurriculumChooser, CurriculumHook, take_part
from attachments.curriculum.group_outcomes import SavedCurriculum
from attachments.curriculum.sections import SuccessRateCurriculum
from clotho.lanes.compute_thread import Compute
from pipeline import wire_rollouts
from protocols.rollout import Discarded
from tests.actors.actor_helpers import compute_thread
from tests.training_run.built_context import lost_groups, open_context, tiny_profile
from tests.training_run.simulated_run import PROBLEMS, SimulatedRun, SimulationSettings
from tests.training_run.start.test_startup import write_step
from training_run.attached import Attached
from training_run.groups.order import ProblemOrder
from training_run.run import RunContext
from training_run.supervision.custom_actors import CustomActors


@pytest.fixture(scope="module")
def compute() -> Iterator[Compute]:
    """Yield compute threads."""
    with compute_thread() as running:
        yield running


def attach(attached: Attached) -> None:
    """Let a curriculum choose among the simulated problems."""
    kinds = [problem.type for problem in PROBLEMS]
    order = ProblemOrder(kinds, weights={}, seed=1, shuffle=True)
    saved = attached.parts.saved(NAME, SavedCurriculum)
    settings = SuccessRateCurriculum()
    take_part(attached, Curriculum(kinds, order, settings, seed=1, dataset="", saved=saved.value if saved else None))


@pytest.mark.parametrize("dynamic", [True, False])
async def test_a_synchronous_run_resumed_from_any_batch_chooses_the_same_problems(
    compute: Compute, dynamic: bool
) -> None:
    """Also for replaced groups, whatever had been chosen when it was killed. The evidence is equal bit for bit."""
    settings = SimulationSettings(
        zero_variance=lambda group_id: False, dynamic=dynamic, steps=8, batch_size=4, attach=attach
    )
    whole = SimulatedRun(compute, settings)
    await whole.run()
    assert len({problem.prompt for _, problem in whole.chosen}) > 8
    for after, parts in zip(whole.updates, whole.parts, strict=True):
        prompted = after.ledger.all_ended_below
        resumed = SimulatedRun(compute, settings, after=after, parts=parts, prompted_until=prompted + 2)
        again = await resumed.run()
        assert resumed.chosen == [(group_id, problem) for group_id, problem in whole.chosen if group_id >= prompted]
        if again:
            assert bytes(resumed.parts[-1][NAME].value) == bytes(whole.parts[-1][NAME].value)


@pytest.mark.parametrize("ahead", [0, 2])
async def test_a_problem_is_chosen_when_its_group_may_start(compute: Compute, ahead: int) -> None:
    """Not when the queue has room: the choice uses all groups that have ended. Every group ends once."""
    settings = SimulationSettings(zero_variance=lambda group_id: False, ahead=ahead, steps=8, attach=attach)
    simulated, seen = SimulatedRun(compute, settings), list[int]()
    await simulated.run(lambda update: seen.append(len(simulated.chosen) - simulated.replacements.value))
    assert all(count <= (step + ahead + 1) * settings.batch_size for step, count in enumerate(seen))
    assert simulated.ended() == list(range(simulated.prompter.prompted_until))
    assert simulated.ledger.balance(prompted=simulated.prompter.prompted_until, carried_over=0).holds
    useful = [problem.type == "useful" for _, problem in simulated.chosen]
    assert sum(useful[len(useful) // 2 :]) > sum(useful[: len(useful) // 2])


async def test_every_line_of_metrics_has_what_the_attachment_describes(compute: Compute) -> None:
    """The problems by success rate add up to all problems."""
    simulated = SimulatedRun(compute, SimulationSettings(zero_variance=lambda group_id: False, attach=attach))
    reports = await simulated.run()
    assert all(report.metrics.keys() == attachment.METRICS.keys() for report in reports)
    assert [sum(report.metrics["curriculum/problems"].values()) for report in reports] == [len(PROBLEMS)] * len(reports)


def test_the_displays_show_the_zero_variance_of_a_step() -> None:
    """The measured and the expected share; nothing without a curriculum."""
    line = {"curriculum/zero_variance_expected": 0.2, "curriculum/zero_variance_observed": 0.25}
    assert list(attachment.shown(line)) == ["zero variance 25 % (20 % expected)"]
    assert not list(attachment.shown(dict.fromkeys(line)))


def curriculum_of(run: RunContext) -> Curriculum:
    """Return the curriculum of a run."""
    assert isinstance(run.attached.chooser, CurriculumChooser)
    return run.attached.chooser.curriculum


def end_a_group(run: RunContext) -> None:
    """Let a step end with a group that has both a success and a failure."""
    scored = Discarded(prompt=run.choose_prompt(0), reason="stale", detail="", rewards=(0.0, 1.0))
    (hook,) = (hook for hook in run.attached.hooks if isinstance(hook, CurriculumHook))
    hook.ended([], [scored], version=0)
    hook.metrics()


async def test_a_resumed_run_continues_with_the_success_rates_of_its_checkpoint(tmp_path: Path) -> None:
    """A fork too, if it has the same problems; otherwise it begins without evidence."""
    profile = tiny_profile(tmp_path, data={"curriculum": "success_rate"})
    await write_step(profile, act=end_a_group)
    async with open_context(profile, resume=True) as run:
        curriculum = curriculum_of(run)
        assert curriculum.update().state.highest == 1.0
        assert len(curriculum.outcomes.evidence().completions) == 2
        assert run.choose_prompt(5).problem in run.prompts.problems
        custom = CustomActors((), run.services(), lost_groups())
        rollouts = wire_rollouts(run, custom, custom.channel("scored", 1), run.sampler.client)
        assert isinstance(rollouts.source.actor, Prompter)
        assert rollouts.source.actor._may_start is not None
    (tmp_path / "other.jsonl").write_text("".join(f'{{"prompt": "{i}?", "answer": "1"}}\n' for i in range(9)))
    data = {"curriculum": "success_rate", "train": str(tmp_path / "other.jsonl")}
    other = tiny_profile(tmp_path, run_dir=str(tmp_path / "fork"), data=data)
    async with open_context(other, fork=tmp_path / "run" / "checkpoints" / "step-000003") as run:
        assert curriculum_of(run).outcomes.evidence().problems == b""
