"""Rules between settings of environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attachments.atropos.sections import ATROPOS, ENVIRONMENTS, MockSource, StartedServer
from clotho.settings.bounds import Off
from protocols.errors import ProfileError
from tests.training_run.profile.profile_faults import TAP, fault
from training_run.profile.load import PROFILES, load_profile, resolved_toml

MINE = {"name": "mine", "script": "mine.py"}
YOURS = {"name": "yours", "script": "yours.py"}
URL = {"type": "connect", "url": "http://127.0.0.1:8001"}
START = {"type": "start", "python": "python3"}
MOCK = {"type": "mock"}
MOST, REST = MINE | {"min_batch_allocation": 0.7}, YOURS | {"min_batch_allocation": 0.4}
REPLACE = TAP | {"mode": "replace"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"atropos": {"type": "off", "url": "http://x"}}, "atropos.url"),
        ({"atropos": {"type": "off", "patience_seconds": 9.0}}, "atropos.patience_seconds"),
        ({"environments": [MINE]}, "environments"),
        ({"atropos": "connect"}, "atropos.url"),
        ({"atropos": "start"}, "atropos.python"),
        ({"atropos": START}, "atropos.python"),
        ({"atropos": URL | {"python": "python3"}}, "atropos.python"),
        ({"atropos": URL, "environments": [MINE]}, "environments"),
        ({"atropos": MOCK | {"url": "http://x"}}, "atropos.url"),
        ({"atropos": MOCK | {"python": "python3"}}, "atropos.python"),
        ({"atropos": MOCK | {"missing_logprobs": "recompute"}}, "atropos.missing_logprobs"),
        ({"atropos": MOCK, "environments": [MINE]}, "environments"),
        ({"atropos": START | {"reset": False}, "environments": [MINE]}, "atropos.reset"),
        ({"atropos": MOCK, "server": "off"}, "server"),
        ({"atropos": MOCK, "async": False}, "async"),
        (
            {"atropos": MOCK, "learner": {"objective": {"dynamic_sampling_max_ratio": 2.0}}},
            "learner.objective.dynamic_sampling_max_ratio",
        ),
        (
            {"atropos": MOCK, "learner": {"objective": {"overlong_penalty": {"type": "linear", "buffer": 8}}}},
            "learner.objective.overlong_penalty",
        ),
        ({"atropos": MOCK, "learner": {"max_failed_batches": 5}}, "learner.max_failed_batches"),
        ({"atropos": MOCK, "queues": {"prompts": 4}}, "queues.prompts"),
        ({"atropos": MOCK, "queues": {"rollouts": 4}}, "queues.rollouts"),
        (
            {
                "atropos": MOCK,
                "collapse_detection": {"empty_format_high": 0.2},
                "rewards": [{"name": "format"}, {"name": "exact", "correct": True}],
            },
            "collapse_detection.empty_format_high",
        ),
        ({"atropos": START, "environments": [MINE, MINE | {"name": "MINE"}]}, "environments"),
        ({"atropos": START, "environments": [MINE | {"name": "api-server"}]}, "environments"),
        (
            {"atropos": START, "environments": [MINE | {"options": {"group_size": 4}}]},
            "environments",
        ),
        (
            {"atropos": START, "environments": [MINE | {"options": {"env.inference_weight": 4}}]},
            "environments",
        ),
        ({"atropos": MOCK, "actors": [REPLACE | {"at": "prompter"}]}, "actors"),
        ({"atropos": MOCK, "actors": [TAP | {"at": "rollouts"}]}, "actors"),
        ({"atropos": MOCK, "actors": [REPLACE | {"at": "atropos_fetche"}]}, "actors"),
        ({"actors": [REPLACE | {"at": "atropos_fetcher"}]}, "actors"),
        ({"actors": [TAP | {"name": "atropos_fetcher"}]}, "actors"),
        (
            {"atropos": START, "environments": [MINE], "actors": [TAP | {"name": "environment mine"}]},
            "actors",
        ),
    ],
)  # fmt: skip
def test_a_contradiction_or_a_setting_without_effect_is_refused(sections: dict[str, Any], key: str) -> None:
    """The complaint names the key."""
    assert fault(**sections) == key


@pytest.mark.parametrize(
    "sections",
    [
        {"atropos": URL},
        {"atropos": URL | {"reset": False}},
        {"atropos": MOCK},
        {"atropos": START, "environments": [MINE]},
        {"atropos": URL | {"python": "python3"}, "environments": [MINE | {"weight": 2.0}]},
        {"atropos": START, "environments": [MINE, YOURS | {"weight": 3.0, "group_size": 4}]},
        {"atropos": START, "environments": [MOST, REST | {"min_batch_allocation": 0.3}]},
        {"atropos": MOCK, "actors": [REPLACE | {"at": "atropos_fetcher", "name": "atropos_fetcher"}]},
        {"atropos": MOCK, "actors": [TAP]},
    ],
    ids=str,
)
def test_valid_combinations_are_allowed(sections: dict[str, Any]) -> None:
    """The rules refuse no valid combination."""
    assert fault(**sections) is None


@pytest.mark.parametrize("name", ["atropos", "atropos-local"])
@pytest.mark.parametrize("overrides", [{"atropos": "mock"}, {"atropos": "off"}], ids=str)
def test_a_switch_on_top_takes_the_place_of_what_a_profile_names(name: str, overrides: dict[str, Any]) -> None:
    """Neither the server nor environments of a lower layer remain."""
    found = load_profile(name, overrides)
    assert isinstance(ATROPOS.of(found), MockSource | Off)
    assert ENVIRONMENTS.of(found) == ()


def test_scripts_are_the_profiles_or_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As data files are; the interpreter is the caller's, wherever it is named."""
    monkeypatch.chdir(tmp_path)
    found = load_profile("atropos-local")
    assert ENVIRONMENTS.of(found)[0].script == str(PROFILES / "environments" / "arithmetic.py")
    assert ATROPOS.of(found) == StartedServer(python=".atropos/bin/python")
    by_flag = load_profile("atropos-local", {"environments": [MINE | {"options": {"max_num_workers": 2}}]})
    assert ENVIRONMENTS.of(by_flag)[0].script == str(tmp_path / "mine.py")
    (tmp_path / "again.toml").write_text(resolved_toml(by_flag), encoding="utf-8")
    assert load_profile("./again.toml") == by_flag


def test_an_environment_without_a_script_is_named() -> None:
    """By its number."""
    with pytest.raises(ProfileError, match=r"^command line: environments\[0\].script is missing$"):
        load_profile("atropos-local", {"environments": [{"name": "mine"}]})


@pytest.mark.parametrize("script", ["x" * 5000, "a/" * 2500 + "e.py", "a\0b", "~nobody-here/e.py"])
def test_a_script_that_cannot_be_a_path_is_refused_with_its_key(script: str) -> None:
    """Long names, long paths, NUL and unknown users."""
    with pytest.raises(ProfileError, match=r"^command line: environments\[0\]\.script cannot be a path"):
        load_profile("atropos-local", {"environments": [MINE | {"script": script}]})
