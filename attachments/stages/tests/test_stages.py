"""Training in stages: the whole program, first with demonstrations and then with rewards."""

from __future__ import annotations

import json
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from protocols.errors import ProfileError
from tests.e2e.pipeline_process import (
    PROBLEMS,
    Run,
    RunResult,
    adapter,
    continued,
    killed_and_continued,
    lines,
    metrics,
    run,
)
from training_run.directory.run_directory import RunStage, open_run
from training_run.profile.flags import parse_flags
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile
from training_run.stages import planned_steps, remaining, stages_of

TEXT = """
extends = "local-m3"
async = false
server = "off"

[data]
train = "PROBLEMS/train.jsonl"
heldout = "PROBLEMS/heldout.jsonl"

[sampling]
group_size = 4

[learner]
batch_size = 4
schedule = "linear"

[checkpoint]
interval = 1
keep_last = 9

[eval]
problems = 4
interval = 0

[[stages]]
kind = "sft"
steps = 3
data = "DEMONSTRATIONS"

[stages.settings.learner]
batch_size = 6

[[stages]]
kind = "rl"
steps = 2
"""


def write_profile(directory: Path) -> str:
    """Write demonstrations, and the profile of a run that learns them first."""
    written = []
    for line in (PROBLEMS / "train.jsonl").read_text().splitlines()[:20]:
        one = json.loads(line)
        written.append(json.dumps({**one, "completion": f"<think></think><answer>{one['answer']}</answer>"}))
    (directory / "demonstrations.jsonl").write_text("\n".join(written), encoding="utf-8")
    text = TEXT.replace("PROBLEMS", str(PROBLEMS)).replace("DEMONSTRATIONS", str(directory / "demonstrations.jsonl"))
    (directory / "stages.toml").write_text(text, encoding="utf-8")
    return str(directory / "stages.toml")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A profile that a test may change."""
    return write_profile(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of both stages."""
    directory = tmp_path_factory.mktemp("stages")
    result = train(directory / "whole", write_profile(directory))
    assert result.status == 0, result.err
    return directory / "whole"


def train(run_dir: Path, profile: str, *flags: str) -> RunResult:
    """Run to the end."""
    return run(run_dir, "--profile", profile, *flags, small=())


def test_a_run_goes_from_stage_to_stage_and_resumes_bit_for_bit_in_and_between_them(
    whole: Path, tmp_path: Path
) -> None:
    """One directory, adapter and count of groups. The schedule begins anew, evaluations keep their problems."""
    found = metrics(whole)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert [line["stages/stage"] for line in found] == [1, 1, 1, 2, 2]
    assert [line["groups/trained"] for line in found[:3]] == [6, 6, 6]
    assert [line["sft/epochs"] is None for line in found] == [False, False, False, True, True]
    rates = [line["learning_rate"] for line in found]
    assert rates[3:] == rates[:2], "both begin with the same warm-up"
    evaluations = lines(whole / "evaluations.jsonl")
    assert [one["step"] for one in evaluations] == [0, 3, 5]
    assert {one["problems"] for one in evaluations} == {4}
    assert sorted(line["group_id"] for line in lines(whole / "rollouts.jsonl")) == list(range(26))
    for step in (2, 3):
        flags = ("--profile", str(whole.with_name("stages.toml")))
        assert continued(whole, tmp_path / f"from-{step}", *flags, step=step) == adapter(whole)


@pytest.mark.slow  # three runs in processes of their own
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_killed_run_resumes_bit_for_bit(step: int, profile: str, whole: Path, tmp_path: Path) -> None:
    """After a step of a stage, and between the stages."""
    assert killed_and_continued(tmp_path / "run", "--profile", profile, step=step) == adapter(whole)


def test_one_kind_of_stage_runs_alone(profile: str, tmp_path: Path) -> None:
    """From the first step on; a resumed run with all stages is another run, and is refused."""
    assert train(tmp_path / "run", profile, "--stage", "rl", "--eval", "off").status == 0
    found = metrics(tmp_path / "run")
    assert [line["sft/epochs"] for line in found] == [None, None]
    refused = train(tmp_path / "run", profile, "--resume", "--eval", "off")
    assert refused.status == 2
    assert "stage" in refused.err


def test_a_dry_run_shows_the_settings_of_each_stage(profile: str, tmp_path: Path) -> None:
    """Under its number; a stage trains as many steps as it adds to those of the stages before."""
    shown = train(tmp_path / "run", profile, "--dry-run").out.split("# stage ")[1:]
    assert [text.splitlines()[0] for text in shown] == ["1 of 2", "2 of 2"]
    settings = [text.partition("\n")[2].partition("\nestimated memory")[0] for text in shown]
    assert [tomllib.loads(text)["steps"] for text in settings] == [3, 5]


def test_the_last_stage_of_a_run_can_be_made_longer(profile: str, whole: Path, tmp_path: Path) -> None:
    """A resumed run trains the further steps of it."""
    shutil.copytree(whole, tmp_path / "run")
    text = whole.with_name("stages.toml").read_text(encoding="utf-8").replace("steps = 2", "steps = 3")
    Path(profile).write_text(text, encoding="utf-8")
    assert train(tmp_path / "run", profile, "--resume").status == 0
    assert [line["stages/stage"] for line in metrics(tmp_path / "run")] == [1, 1, 1, 2, 2, 2]


def test_a_drain_ends_the_run_in_its_stage(profile: str, tmp_path: Path) -> None:
    """Ctrl-C does not begin the next stage, also if its dataset is another one; `--resume` continues the stage."""
    text = Path(profile).read_text(encoding="utf-8").replace("steps = 3", "steps = 5000")
    Path(profile).write_text(text, encoding="utf-8")
    with Run(tmp_path / "run", "--profile", profile, "--eval", "off", small=()) as running:
        running.wait_for("perplexity")
        running.send(signal.SIGINT)
        result = running.finish()
    assert (result.status, result.err) == (0, ""), result
    found = metrics(tmp_path / "run")
    assert {line["stages/stage"] for line in found} == {1}
    directory = open_run(tmp_path / "run", resume=True, clean=False)
    try:
        assert [one.number for one in remaining(stages(profile), directory)] == [1, 2]
    finally:
        directory.close()


def test_the_steps_of_a_run_are_those_of_its_chosen_stages(profile: str) -> None:
    """Its own `steps` have no effect."""
    assert planned_steps(load_profile(profile)) == 5
    assert planned_steps(load_profile(profile, {"stage": "rl"})) == 2
    assert planned_steps(load_profile("local-m3", {"steps": 7})) == 7


def test_the_temperature_of_a_profile_returns_to_1_in_a_stage_of_demonstrations(profile: str) -> None:
    """Demonstrations are learned at temperature 1, and the other stages sample as the profile says."""
    text = Path(profile).read_text(encoding="utf-8").replace("group_size = 4", "group_size = 4\ntemperature = 0.6")
    Path(profile).write_text(text, encoding="utf-8")
    assert [one.profile.sampling.temperature for one in stages(profile)] == [1.0, 0.6]


def stages(profile: str, **settings: Any) -> tuple[RunStage, ...]:
    """Return the stages of a profile with further settings."""

    def load(*layers: Any) -> Profile:
        return load_profile(profile, settings, adjust=lambda below: [*below, *layers])

    return stages_of(load(), load)


def test_a_stage_has_its_settings_and_those_of_the_profile(profile: str) -> None:
    """What its objective makes useless, such as the size of groups, does not count."""
    first, second = stages(profile)
    assert first.profile.learner.objective.__struct_config__.tag == "sft"
    assert (first.first_step, first.profile.steps, first.profile.learner.batch_size) == (0, 3, 6)
    assert (second.first_step, second.profile.steps, second.profile.learner.batch_size) == (3, 5, 4)
    assert (first.number, second.number) == (1, 2)
    assert first.profile.data.heldout == second.profile.data.heldout


def test_a_new_run_and_a_complete_one_have_stages_to_run(profile: str, tmp_path: Path) -> None:
    """All, or the last one, which ends at once."""
    directory = open_run(tmp_path / "run", resume=False, clean=False)
    try:
        found = []
        for step in (None, 3, 5):
            directory.resume_step = step
            found.append([one.number for one in remaining(stages(profile), directory)])
    finally:
        directory.close()
    assert found == [[1, 2], [2], [2]]


DISTILLED = """
[distillation]
teacher = "./teacher"
loss = "forward_kl"

[learner]
distillation_weight = 0.5
"""


def test_a_teacher_of_the_profile_is_that_of_its_stages_of_this_kind(profile: str, tmp_path: Path) -> None:
    """With their settings on top; other stages learn from no teacher."""
    text = (
        Path(profile)
        .read_text(encoding="utf-8")
        .replace('kind = "rl"', 'kind = "distill"')
        .replace("[learner]\n", DISTILLED, 1)
    )
    further = '[stages.settings.distillation]\nbeside_rewards = true\n\n[[stages]]\nkind = "rl"\nsteps = 1\n'
    Path(profile).write_text(f"{text}\n{further}", encoding="utf-8")
    (tmp_path / "teacher").mkdir()
    found = [one.profile for one in stages(profile)]
    taught: list[Any] = [getattr(one, "distillation") for one in found]  # noqa: B009
    assert [Path(one.teacher).name for one in taught] == ["", "teacher", ""]
    assert [one.loss for one in taught] == ["reverse_kl", "forward_kl", "reverse_kl"]
    assert [one.beside_rewards for one in taught] == [False, True, False]
    assert [one.learner.distillation_weight for one in found] == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('kind = "rl"', 'kind = "rl"\nsettings = {seed = 3}', "seed"),
        ('kind = "rl"', 'kind = "rl"\nsettings = {learner = {objectiv = "grpo"}}', "stages[1]"),
        ("batch_size = 6", 'objective = "grpo"', "stages[0]"),
        ('kind = "rl"', 'kind = "sft"', "records"),
        ("async = false", 'async = false\nstage = "dpo"', "stage"),
        ("async = false", "async = false\nsteps = 7", "steps"),
        ('schedule = "linear"', 'objective = "sft"', "learner.objective"),
        ('kind = "rl"', 'kind = "distill"', "distillation.teacher"),
    ],
    ids=["fixed", "unknown", "contradiction", "no answers", "kind", "steps", "objective", "teacher"],
)
def test_stages_that_cannot_work_are_refused(before: str, after: str, said: str, profile: str, tmp_path: Path) -> None:
    """With the key, and the number of the stage, when it begins at the latest."""
    text = Path(profile).read_text(encoding="utf-8").replace(before, after)
    Path(profile).write_text(text, encoding="utf-8")
    result = train(tmp_path / "run", profile, "--eval", "off")
    assert result.status == 2
    assert said in result.err


@pytest.mark.parametrize(("text", "named"), [("rl", True), ("rlhf", False), ("[{kind", False)])
def test_the_plural_of_the_flag_names_the_flag(text: str, *, named: bool) -> None:
    """If the flag would take the value."""
    with pytest.raises(ProfileError) as refused:
        parse_flags(["--stages", text], {})
    assert (f"--stage {text}" in str(refused.value)) is named
