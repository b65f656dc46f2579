"""Every finding has a command that the program accepts, in a run and in `doctor`."""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import get_args

import anyio
import pytest
from msgspec.structs import replace

from attachments.alarms.checks import (
    CUT_REPORTS,
    EXPERT_UPDATES,
    FLIPPED_REPORTS,
    CollapseCheck,
    CutCheck,
    ExpertCheck,
    RouteCheck,
)
from attachments.alarms.tests import test_checks as alarms
from attachments.alarms.tests.collapse_reports import GOOD, batch, metrics, report
from attachments.alarms.tests.test_collapse_detection import detector_with_baseline
from attachments.doctor import doctor
from attachments.doctor.problems import problem_findings
from attachments.doctor.rehearsal import parity_findings, update_findings
from attachments.doctor.template import TemplateUse, check_template
from attachments.doctor.tests import templates
from attachments.doctor.tests import test_faults as faults
from attachments.doctor.tests.test_problems import REWARDS, problems
from attachments.doctor.versions import setting_findings, version_findings
from attachments.machine.alarms import MachineCheck
from attachments.machine.machine import machine_findings
from attachments.machine.macos import KernelPanic, MacState
from attachments.machine.resources import ResourceReading
from attachments.machine.tests import simulated_mac
from clotho.process import REFERENCE_BLAS
from clotho.settings.objectives import Grpo
from protocols.errors import ProfileError
from protocols.finding import CHECK, Change, Finding, FindingName, Remedy
from tests.training_run.built_context import tiny_profile
from tests.training_run.records import test_training_signal as signals
from tests.training_run.records.display_examples import UPDATE, step
from tests.training_run.records.observed_run import ObservedRun, groups
from tests.training_run.simulated_run import METRICS
from tests.training_run.supervision.test_lost_groups import Stage
from training_run.__main__ import main
from training_run.directory.checkpoints import checkpoint_steps
from training_run.parity_check import ParityReport
from training_run.profile.flags import OWN, as_flags, parse_flags
from training_run.profile.keys import KEYS
from training_run.profile.load import load_profile, write_profile
from training_run.profile.schema import Profile
from training_run.records.remedies import RunCommands, new_run_dir
from training_run.records.training_signal import TrainingSignal
from training_run.start.resume import refuse_if_incompatible

Findings = Iterable[Finding]


def of_collapse() -> Iterator[Finding]:
    """One batch for each check of the collapse detection."""
    for bad in (
        GOOD._replace(update_kl=0.11),
        GOOD._replace(ess=0.29),
        GOOD._replace(reward=0.6),
        GOOD._replace(entropy=0.26),
        GOOD._replace(entropy=0.0004),
        GOOD._replace(length=81.0),
        GOOD._replace(truncated=0.5),
        GOOD._replace(empty_form=0.5),
    ):
        yield from detector_with_baseline().observe(batch(bad)).findings
    yield from detector_with_baseline(kl_high=1.5).observe(report(update=metrics(GOOD, kl=1.6, kl_beta=0.1))).findings


def of_the_machine_during_a_run() -> Iterator[Finding]:
    """A run that becomes slow on a machine that has every fault."""
    run, check = alarms.observed(), MachineCheck()
    for rate in [1000.0] * 5 + [400.0] * 10:
        run.step(tokens_per_second=rate)
    faulty = ResourceReading(
        memory_level="critical", swap_change_bytes=2**30, thermal="heavy", on_battery=True, low_power=True
    )
    check.take(faulty)
    check.take(faulty)
    yield from (*run.findings.now, *check.findings())


def of_the_objective() -> Iterator[Finding]:
    """Rounding cuts tokens of completions that the present policy has sampled."""
    run = ObservedRun(lambda clock: CutCheck(Grpo(clip_low=1e-3)))
    cut = replace(step(1, groups=groups(1.0), update=replace(UPDATE, unmoved_cut_fraction=0.06)), staleness=(0,))
    for _ in range(CUT_REPORTS):
        run.step(cut)
    yield from run.findings.now


def of_the_experts() -> Iterator[Finding]:
    """A quarter of the experts compute no token any more."""
    run = ObservedRun(lambda clock: ExpertCheck())
    for unused in (0.0, *[0.25] * EXPERT_UPDATES):
        run.step(step(1, groups=groups(1.0), update=replace(UPDATE, unused_experts_fraction=unused)))
    yield from run.findings.now


def of_the_routes() -> Iterator[Finding]:
    """The learner chooses other experts than the sampler."""
    run = ObservedRun(lambda clock: RouteCheck())
    for number in range(FLIPPED_REPORTS):
        report = step(number + 1, groups=groups(1.0), update=replace(UPDATE, flipped_routes=50.0))
        run.step(replace(report, staleness=(0,)))
    yield from run.findings.now


def of_the_scorer() -> Iterator[Finding]:
    """The learner waits for rewards."""
    run = ObservedRun()
    for number in range(1, 4):
        run.gauges = replace(run.gauges, scorer_full_seconds=8.0 * number, groups_scored_at_once=8)
        run.step(replace(step(number, groups=groups(1.0)), wait_seconds=8.0))
    yield from run.findings.now


def of_the_kv_cache() -> Iterator[Finding]:
    """Rows wait for the long requests of clients."""
    run = ObservedRun()
    run.gauges = replace(run.gauges, cache_holders=("chatcmpl-1",))
    for number in range(1, 4):
        run.step(step(number, groups=groups(1.0)))
    yield from run.findings.now


def of_a_collapsed_run() -> Iterator[Finding]:
    """The reward falls at step 5 of a run; the best mean is that of the first four steps."""
    run = alarms.observed()
    for number in range(1, 9):
        run.step(step(number, groups=groups(2.0 if number < 5 else 0.02), update=UPDATE))
    yield from run.findings.now


def of_the_rewards() -> Iterator[Finding]:
    """Groups without a signal, whose rewards fail, are constant, or whose completions are truncated."""
    yield from signals.findings(signals.groups(4))
    yield from signals.findings(signals.groups(4, (1.0, 1.0)))
    yield from signals.findings(signals.groups(4, reason="reward_error"))
    yield from signals.findings(signals.groups(4, finish="length"))
    yield from signals.findings(signals.groups(32, (1.0, 2.0), parts={"format": (0.0, 0.0), "b": (0.0, 1.0)}))
    dropped = (signals.group((1.0, 1.0)),) * 8 + (signals.group((0.0, 0.0)),) * 8
    yield from signals.findings(*(step(1, groups=(), discarded=dropped, update=None),) * 3)
    for reward in (1.0, 0.0):
        yield from signals.findings(signals.groups(29, (reward, reward)), signals.groups(3, (0.0, 1.0)))
    some = TrainingSignal({})
    some.observe(signals.groups(4, (0.0, 0.1), finish="length"))
    some.observe(signals.groups(4, (0.5, 1.0)))
    yield from some.findings()


def of_the_start(path: Path) -> Iterator[Finding]:
    """Machine, libraries, settings, templates and problems."""
    mac = MacState(
        display_awake=True, wired_limit_mb=15 * 1024, panic=KernelPanic(file="a.panic", days=3.0, names_gpu=True)
    )
    faulty = simulated_mac.machine(mac=mac, available=4 << 30, swap=2 << 30)
    yield from machine_findings(replace(faulty, disk_bytes=0), simulated_mac.needs())
    slow = replace(simulated_mac.machine(), blas=REFERENCE_BLAS)
    yield from machine_findings(slow, simulated_mac.needs(uses_gpu=False, quantized=True))
    yield from version_findings({"mlx": "0.31.2"})
    yield from setting_findings(tiny_profile(path, policy={"method": {"scale": 1000.0}}))
    for text, eos in (
        (templates.OPENS_THINK, "<|im_end|>"),
        (templates.THINKS_UNLESS_TOLD, "<|im_end|>"),
        (templates.HEALTHY, "<|endoftext|>"),
    ):
        use = TemplateUse(rewards=("format", "math_eval"), several_turns=False)
        yield from check_template(templates.tokenizer(text, eos=eos), use).findings
    several = TemplateUse(rewards=(), several_turns=True)
    for text in (templates.DROPS_THINKING, templates.REWRITES):
        yield from check_template(templates.tokenizer(text, eos="<|im_end|>"), several).findings
    tools = TemplateUse(rewards=(), several_turns=False, tools=({"type": "function"},), problems=1, with_tools=1)
    yield from check_template(templates.tokenizer(), tools).findings
    yield from problem_findings(problems(1) * 100, REWARDS, batch_size=16)
    yield from problem_findings(problems(20), [replace(reward, types=("x",)) for reward in REWARDS], batch_size=8)
    unanswerable = [replace(problem, answer="") for problem in problems(20)]
    yield from problem_findings(unanswerable, REWARDS, batch_size=8)


def of_the_rehearsal(path: Path) -> Iterator[Finding]:
    """An update that is too large, one that is not finite, and log-probabilities that differ."""
    profile = tiny_profile(path)
    yield from update_findings([replace(METRICS, update_kl=3.0, learning_rate=0.1)], profile)
    yield from update_findings([None], profile)
    parity = ParityReport(rows=2, tokens=8, mean_kl=1.0, max_difference=0.0, served_kl=0.0)
    yield from parity_findings(parity, profile, "float32")


async def of_custom_actors() -> list[Finding]:
    """An actor that returns with a group inside."""
    stage = Stage()
    await stage.receive(7)
    stage.returned()
    await stage.custodian.run()
    return stage.findings


def of_doctor(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """What `doctor` refuses before it loads a model, and a model that the run refuses."""
    yield from faults.port_in_use(path, patch)
    missing = str(path / "missing")
    yield from faults.diagnosed(tiny_profile(path, model={"path": missing}), patch)
    yield from faults.diagnosed(tiny_profile(path, data={"train": f"{missing}.jsonl"}), patch)
    with patch.context() as limited:
        yield from faults.too_little_memory(path, limited)
    (other := path / "unparsable").mkdir()
    yield from faults.half_unparsable(other, patch)
    found = doctor.Diagnosis()
    with pytest.raises(doctor.Stopped), found.refused("model", "run_refused", "correct what the message names"):
        raise ProfileError("what")
    yield from found.findings


class Ended:
    """The directory of a run that has ended, and its profile."""

    def __init__(self, directory: Path) -> None:
        profile = tiny_profile(directory, eval="off", sampling={"group_size": 4, "temperature": 2.0})
        self.file, self.path = directory / "tiny.toml", directory / "run"
        write_profile(profile, self.file)
        self.status = silent(["--profile", str(self.file), "--checkpoint.interval", "1", "--steps", "4"])


def silent(argv: Iterable[str]) -> int:
    """Run the program without its output, and return its exit status."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        status = main(list(argv))
    assert status in (0, 1), errors.getvalue()
    return status


def arguments(finding: Finding) -> list[str]:
    """The words of the command of a finding behind the program's name."""
    name, *words = shlex.split(finding.command)
    assert name == "clotho"
    return words


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of four steps with a checkpoint of each."""
    found = Ended(tmp_path_factory.mktemp("ended"))
    assert checkpoint_steps(found.path / "checkpoints") == [4, 3, 2, 0]
    return found


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """One finding of each name, from the checks that find it."""
    path = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        sources: tuple[Findings, ...] = (
            of_collapse(),
            of_the_machine_during_a_run(),
            of_a_collapsed_run(),
            of_the_objective(),
            of_the_experts(),
            of_the_routes(),
            of_the_scorer(),
            of_the_kv_cache(),
            of_the_rewards(),
            of_the_start(path),
            of_the_rehearsal(path),
            of_doctor(path, patch),
            anyio.run(of_custom_actors),
        )
        return {finding.name: finding for source in sources for finding in source}


def test_every_finding_is_injected_here(findings: dict[str, Finding]) -> None:
    """A new finding needs a test of its command."""
    assert findings.keys() == set(get_args(FindingName))


@pytest.fixture
def stopped(ended: Ended, tmp_path: Path) -> Path:
    """The directory of a run that was stopped after four of ten steps."""
    path = tmp_path / "stopped"
    shutil.copytree(ended.path, path)
    profile = load_profile(str(ended.path / "profile.toml"), {"steps": 10, "run_dir": str(path)})
    write_profile(profile, path / "profile.toml")
    return path


def test_the_command_of_every_finding_of_a_run_is_accepted(stopped: Path, findings: dict[str, Finding]) -> None:
    """A dry run accepts it, and what is resumed may have the changed setting. Checks are all the same command."""
    commands, profile, actions = RunCommands(stopped), str(stopped / "profile.toml"), set()
    accepted: list[list[str]] = []
    for finding in findings.values():
        completed = commands.complete(finding)
        words, action = arguments(completed), completed.remedy.action
        actions.add(action)
        if action == "check":
            assert words == ["doctor", "--profile", profile], finding.name
            continue
        assert words in accepted or silent([*words, "--dry-run"]) == 0, finding.name
        accepted.append(words)
        if finding.name == "groups_lost":  # the same settings, with a corrected actor
            continue
        assert finding.remedy.changes, finding.name
        values = parse_flags(words, OWN)
        old, new = (load_profile(profile, found) for found in ({}, {key: values[key] for key in values.keys() & KEYS}))
        assert new != old, finding.name
        if action == "resume":
            refuse_if_incompatible(old, new, run=stopped)
    assert actions == {"start", "fork", "resume", "check"}


def test_the_command_of_every_finding_of_doctor_is_accepted(
    ended: Ended, findings: dict[str, Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks the same profile, with the flags of the user and the changed setting."""
    given = {"learner.batch_size": 3, "sampling.stop_token_ids": (5,), "rewards": ({"name": "exact"},)}
    load = partial(load_profile, str(ended.file))
    checked: list[Profile] = []

    async def diagnose(profile: Profile, console: object, *, seconds: float) -> doctor.Diagnosis:
        checked.append(profile)
        return doctor.Diagnosis()

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    accepted: list[list[str]] = []
    for finding in findings.values():
        completed = doctor.completed(finding, str(ended.file), given, load)
        words = arguments(completed)
        if words in accepted:
            continue
        accepted.append(words)
        assert silent(words) == 0, finding.name
        assert checked[-1].learner.batch_size == 3
        assert (checked[-1] == load_profile(str(ended.file), given)) == (completed.remedy.action == "check")


def test_the_check_of_a_run_is_made(ended: Ended) -> None:
    """`doctor` reads the profile that the run has written; a model with random weights has findings."""
    words = arguments(RunCommands(ended.path).complete(example(CHECK)))
    assert silent([*words, "--output", str(ended.path.parent / "found.json")]) == 1
    assert (ended.path.parent / "found.json").is_file()


def test_the_command_after_a_collapse_starts_a_run_from_a_checkpoint_before_it(
    ended: Ended, findings: dict[str, Finding]
) -> None:
    """From the newest one before the step with the best rewards, with a tenth of the learning rate."""
    words = arguments(RunCommands(ended.path).complete(findings["reward_collapse"]))
    assert words[:2] == ["--fork", f"{ended.path}@3"]
    before, new = load_profile(str(ended.path / "profile.toml")), Path(words[words.index("--run-dir") + 1])
    assert silent(words) == ended.status
    after = load_profile(str(new / "profile.toml"))
    assert after.learner.optimizer.highest_rate == pytest.approx(before.learner.optimizer.highest_rate / 10)
    steps = [json.loads(line)["step"] for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_run_that_has_ended_is_not_resumed(ended: Ended, findings: dict[str, Finding]) -> None:
    """A new run with the changed setting starts instead."""
    assert RunCommands(ended.path).complete(findings["memory_pressure"]).remedy.action == "start"


def test_a_fork_without_an_earlier_checkpoint_starts_anew(ended: Ended) -> None:
    """With the settings of the run."""
    remedy = Remedy(action="fork", changes=(Change(key="seed", value="5"),), before_step=0)
    completed = RunCommands(ended.path).complete(example(remedy))
    assert completed.remedy.action == "start"
    assert arguments(completed)[:2] == ["--profile", str(ended.path / "profile.toml")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((Change(key="learner.kl_penalty.coef", factor=2.0), Change(key="seed", value="5")), ["--seed", "5"]),
        ((Change(key="seed", value="0"), Change(key="learner.batch_size", factor=0.5)), ["--learner.batch-size", "1"]),
        ((Change(key="sampling.temperature", value="-1"),), []),
        ((Change(key="sampling.group_size", of="sampling.max_tokens", factor=2.0),), ["--sampling.group-size", "8"]),
    ],
    ids=["a setting that the profile lacks", "the same value", "a value that is refused", "of another setting"],
)
def test_the_first_change_that_the_settings_accept_is_used(
    ended: Ended, changes: tuple[Change, ...], expected: list[str]
) -> None:
    """Without any, the command is a check."""
    completed = RunCommands(ended.path).complete(example(Remedy(action="start", changes=changes)))
    assert arguments(completed)[4:] == expected if expected else completed.remedy == CHECK


def test_a_run_directory_that_exists_is_not_proposed(tmp_path: Path) -> None:
    """The number rises until the name is free."""
    (tmp_path / "run-2").mkdir()
    assert new_run_dir(tmp_path / "run") == str(tmp_path / "run-3")


def test_the_checkpoint_that_a_command_names_is_known_to_the_alarms(ended: Ended) -> None:
    """So that it is not deleted while the finding applies."""
    found = ObservedRun(lambda clock: CollapseCheck(), complete=RunCommands(ended.path).complete)
    found.step(alarms.collapsed(3))
    assert found.findings.named_checkpoints == {2}


def test_flags_are_read_back() -> None:
    """Texts, numbers, lists, tables and none; an API key is never part of a command."""
    values = {
        "learner.objective.type": "dapo", "seed": 3, "async": False, "learner.max_staleness": None,
        "sampling.stop_token_ids": (1, 2), "rewards": [{"name": "exact", "weight": 0.5}],
        "model.chat_template_kwargs": {"enable_thinking": False}, "learner.optimizer.learning_rate": 1e-7,
    }  # fmt: skip
    assert parse_flags(as_flags({**values, "server.api_key": "secret"}), {}) == values


def test_the_refusal_of_a_resume_names_the_fork_with_the_new_settings(ended: Ended) -> None:
    """From the checkpoint that was to be resumed. The command is accepted."""
    changed = ["--learner.optimizer.learning-rate", "1e-3", "--rewards", "exact,format"]
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        status = main(["--profile", str(ended.path / "profile.toml"), "--resume-step", "2", *changed])
    assert status == 2
    words = shlex.split(errors.getvalue().rpartition("from its state, ")[2])
    assert words[:3] == ["clotho", "--fork", f"{ended.path}@2"]
    values = parse_flags(words[1:], OWN)
    assert values["learner.optimizer.learning_rate"] == 1e-3
    assert values["rewards"] == [{"name": "exact", "correct": True}, {"name": "format"}]
    assert silent([*words[1:], "--dry-run"]) == 0


def example(remedy: Remedy) -> Finding:
    """A finding with this remedy."""
    return Finding(name="slow", severity="warning", fact="f", consequence="c", advice="a", remedy=remedy)
