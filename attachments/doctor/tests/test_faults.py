"""Fifteen common faults are injected. Each has its own finding, whose advice names what corrects it.

Fourteen are found before the first update. A learning rate that is too high is found in the rehearsed update of
`doctor`, and by the alarms of a run. Healthy profiles have no finding
(`attachments/doctor/tests/test_doctor_verdicts.py`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from attachments.alarms.collapse_detection import CollapseDetector
from attachments.alarms.sections import WarnOnCollapse
from attachments.doctor import doctor
from attachments.doctor.completions import completion_findings
from attachments.doctor.problems import problem_findings
from attachments.doctor.rehearsal import update_findings
from attachments.doctor.template import TemplateUse, check_template
from attachments.doctor.tests import templates
from attachments.doctor.tests.test_completions import scored
from attachments.doctor.tests.test_problems import REWARDS, problems
from attachments.doctor.versions import setting_findings
from attachments.machine.machine import machine_findings, read_machine
from attachments.machine.tests import simulated_mac
from protocols.compute import MemoryLimit
from protocols.finding import Finding
from tests.training_run.built_context import tiny_profile
from tests.training_run.records.display_examples import UPDATE, step
from tests.training_run.simulated_run import METRICS
from training_run.profile.schema import Profile
from training_run.rewards.runner import expectations


class Fault(Struct, frozen=True, kw_only=True):
    """A fault. inject: returns the findings with it. name: of its finding. advice: keys or commands that correct it."""

    name: str
    advice: tuple[str, ...]
    inject: Callable[[Path, pytest.MonkeyPatch], Iterator[Finding] | list[Finding] | tuple[Finding, ...]]


def rewards_always(value: float) -> Callable[[Path, pytest.MonkeyPatch], Iterator[Finding]]:
    """Every completion of four groups has this reward."""
    return lambda path, patch: completion_findings([scored((value, value))] * 4, expectations(REWARDS))


def everything_truncated(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """Every completion reaches the token limit."""
    return completion_findings([scored((0.0, 0.0), finish="length")] * 4, expectations(REWARDS))


def template(
    text: str, *, eos: str = "<|im_end|>", several_turns: bool = False
) -> Callable[[Path, pytest.MonkeyPatch], tuple[Finding, ...]]:
    """A model with this chat template and end token."""
    use = TemplateUse(rewards=("format", "math_eval"), several_turns=several_turns)
    return lambda path, patch: check_template(templates.tokenizer(text, eos=eos), use).findings


def one_problem(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """The dataset repeats one problem."""
    return problem_findings(problems(1) * 100, REWARDS, batch_size=16)


def no_reward_applies(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """The rewards are for another type than that of the problems."""
    rewards = [replace(reward, types=("code",)) for reward in REWARDS]
    return problem_findings(problems(20), rewards, batch_size=8)


def learning_rate_too_high(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """A rehearsed update moves the policy by 3 nats per token."""
    return update_findings([replace(METRICS, update_kl=3.0, learning_rate=0.1)], tiny_profile(path))


def wrong_scale(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """The adapter has 100 times the usual scale."""
    return setting_findings(tiny_profile(path, policy={"method": {"scale": 1000.0}}))


def swap_in_use(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """Three GiB of swap are in use."""
    return machine_findings(simulated_mac.machine(swap=3 << 30), simulated_mac.needs())


def display_awake(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """On a simulated Mac, a program keeps the display on; power and wired limit are healthy."""
    texts = {"pmset -g assertions": simulated_mac.ASSERTIONS, "pmset -g batt": simulated_mac.MAINS}
    patch.setenv("PATH", str(simulated_mac.install(path / "bin", texts)))
    state = read_machine(path, blas="Accelerate", system="Darwin")
    return machine_findings(replace(simulated_mac.machine(), mac=state.mac), simulated_mac.needs())


def without_attachments(patch: pytest.MonkeyPatch) -> None:
    """Let no attachment find or state anything."""
    for door in ("FACTS", "FINDINGS"):
        patch.setattr(doctor, door, lambda *_: [])


def diagnosed(profile: Profile, patch: pytest.MonkeyPatch) -> list[Finding]:
    """The findings of `doctor` before it loads a model; no attachment finds anything."""
    without_attachments(patch)
    found = doctor.Diagnosis()
    with pytest.raises(doctor.Stopped):
        doctor.check_without_model(found, profile)
    return found.findings


def too_little_memory(path: Path, patch: pytest.MonkeyPatch) -> list[Finding]:
    """The machine has one MiB."""
    limit = MemoryLimit(bytes=2**20, source="installed", installed=2**20)
    patch.setattr(doctor, "memory_limit", lambda: limit)
    return diagnosed(tiny_profile(path), patch)


def port_in_use(path: Path, patch: pytest.MonkeyPatch) -> list[Finding]:
    """Another program listens on the port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        profile = tiny_profile(path, server={"type": "http", "port": other.getsockname()[1]})
        found = doctor.Diagnosis()
        without_attachments(patch)
        doctor.check_without_model(found, profile)
        return found.findings


def half_unparsable(path: Path, patch: pytest.MonkeyPatch) -> list[Finding]:
    """Every second line is cut off."""
    profile = tiny_profile(path)
    lines = [json.dumps({"prompt": f"{i}?", "answer": str(i)})[: None if i % 2 else 9] for i in range(20)]
    (path / "train.jsonl").write_text("\n".join(lines))
    return diagnosed(profile, patch)


FAULTS: dict[str, Fault] = {
    "reward always 0": Fault(name="no_reward", advice=("data.system",), inject=rewards_always(0.0)),
    "reward always 1": Fault(name="always_rewarded", advice=("harder problems",), inject=rewards_always(1.0)),
    "template opens a tag": Fault(
        name="template_opens_tag",
        advice=("model.chat_template", "[[rewards]]", "format"),
        inject=template(templates.OPENS_THINK),
    ),
    "wrong end token": Fault(
        name="end_token_mismatch",
        advice=("generation_config.json", "sampling.stop_token_ids"),
        inject=template(templates.HEALTHY, eos="<|endoftext|>"),
    ),
    "everything truncated": Fault(
        name="all_truncated", advice=("sampling.max_tokens", "end token"), inject=everything_truncated
    ),
    "dataset of one problem": Fault(name="few_problems", advice=("data.train",), inject=one_problem),
    "no reward applies": Fault(name="no_reward_applies", advice=("types", "[[rewards]]"), inject=no_reward_applies),
    "learning rate too high": Fault(
        name="update_too_large",
        advice=("--learner.optimizer.learning-rate 0.01", "policy.method.scale"),
        inject=learning_rate_too_high,
    ),
    "template drops thinking": Fault(
        name="template_drops_thinking",
        advice=("model.chat_template",),
        inject=template(templates.DROPS_THINKING, several_turns=True),
    ),
    "wrong LoRA scale": Fault(name="lora_scale_unusual", advice=("policy.method.scale",), inject=wrong_scale),
    "too little memory": Fault(name="too_little_memory", advice=("--dry-run",), inject=too_little_memory),
    "swap in use": Fault(name="swap_in_use", advice=("close other programs", "--dry-run"), inject=swap_in_use),
    "display awake on a Mac": Fault(
        name="display_awake",
        advice=("pmset displaysleepnow", "ssh", "caffeinate -is", "learner.max_turn_ms"),
        inject=display_awake,
    ),
    "port in use": Fault(name="port_in_use", advice=("--server.port",), inject=port_in_use),
    "half of the dataset unparsable": Fault(
        name="dataset_unparsable", advice=("data.train", "data.prompt_key"), inject=half_unparsable
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_has_its_own_finding_and_advice(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finding, and no other."""
    (finding,) = fault.inject(tmp_path, monkeypatch)
    assert finding.name == fault.name
    assert [word for word in fault.advice if word not in finding.advice] == []
    assert finding.fact
    assert finding.consequence


def test_the_faults_have_different_findings() -> None:
    """Fifteen faults, fifteen names."""
    assert len({fault.name for fault in FAULTS.values()}) == len(FAULTS) == 15


def test_a_learning_rate_that_is_too_high_is_found_during_the_run_too() -> None:
    """By the collapse detection, under the same name and with the same learning rate in the advice."""
    detection = CollapseDetector(WarnOnCollapse())
    response = detection.observe(step(1, update=replace(UPDATE, update_kl=3.0, learning_rate=0.1)))
    fault = FAULTS["learning rate too high"]
    assert {finding.name: "0.01" in finding.advice for finding in response.findings} == {fault.name: True}
