"""LossSettings between settings of environments: each refusal says why and what to do; what is allowed stays allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clotho.config.layers import PROFILES
from clotho.config.load import load_profile, resolved_toml
from clotho.config.rules import validate
from protocols.errors import ProfileError
from tests.config.test_profile_rules import TAP, profile

MINE = {"name": "mine", "script": "mine.py"}
YOURS = {"name": "yours", "script": "yours.py"}
URL = {"enabled": True, "url": "http://127.0.0.1:8001"}
BOTH = {"enabled": True, "python": "python3"}
MOCK = {"enabled": True, "mock": True}
MOST, REST = MINE | {"min_batch_allocation": 0.7}, YOURS | {"min_batch_allocation": 0.4}
REPLACE = TAP | {"mode": "replace"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"atropos": {"url": "http://x"}}, "atropos.url has no effect: atropos.enabled = false"),
        ({"atropos": {"mock": True}}, "atropos.mock has no effect: atropos.enabled = false"),
        ({"atropos": {"patience_seconds": 9.0}}, "atropos.patience_seconds has no effect: atropos.enabled = false"),
        ({"environments": [MINE]}, "environments has no effect: atropos.enabled = false"),
        ({"atropos": {"enabled": True}}, "atropos.enabled = true must say where groups come from"),
        ({"atropos": BOTH}, "atropos.python starts an API server and the environments: list at least one"),
        ({"atropos": BOTH | URL}, "atropos.python starts environments: list at least one"),
        ({"atropos": URL, "environments": [MINE]}, "environments has no effect: atropos.python runs them"),
        ({"atropos": MOCK | URL}, "atropos.url has no effect: atropos.mock = true"),
        ({"atropos": MOCK | BOTH}, "atropos.python has no effect: atropos.mock = true"),
        ({"atropos": MOCK | {"missing_logprobs": "recompute"}}, "atropos.missing_logprobs has no effect"),
        ({"atropos": MOCK, "environments": [MINE]}, "environments has no effect: atropos.mock = true"),
        ({"atropos": BOTH | {"reset": False}, "environments": [MINE]}, "atropos.reset has no effect: only a server"),
        ({"atropos": MOCK, "server": {"enabled": False}}, "server.enabled = false leaves environments nobody"),
        ({"atropos": MOCK, "async": False}, "async = false and atropos.enabled = true exclude each other"),
        ({"atropos": MOCK, "learner": {"dynamic_sampling": True}}, "learner.dynamic_sampling has no effect"),
        ({"atropos": MOCK, "learner": {"overlong_buffer": 8}}, "learner.overlong_buffer has no effect: with atropos"),
        ({"atropos": MOCK, "queues": {"prompts": 4}}, "queues.prompts has no effect"),
        ({"atropos": MOCK, "queues": {"rollouts": 4}}, "queues.rollouts has no effect"),
        (
            {
                "atropos": MOCK,
                "collapse_detection": {"empty_format_high": 0.2},
                "rewards": [{"name": "format"}, {"name": "exact", "correct": True}],
            },
            "collapse_detection.empty_format_high has no effect: environments send one score",
        ),
        ({"atropos": BOTH, "environments": [MINE, MINE | {"name": "MINE"}]}, "environments: 2 are named 'mine'"),
        ({"atropos": BOTH, "environments": [MINE | {"name": "api-server"}]}, "'api-server' is the name of the server"),
        (
            {"atropos": BOTH, "environments": [MOST, REST]},
            "min_batch_allocation comes to 1.1 in all; it must be at most 1",
        ),
        ({"atropos": BOTH, "environments": [MINE | {"weight": 2.0}]}, "weight has no effect: 'mine' is the only one"),
        (
            {"atropos": BOTH, "environments": [MINE | {"options": {"group_size": 4}}]},
            "'mine': say group_size by its key, not as an option",
        ),
        (
            {"atropos": BOTH, "environments": [MINE | {"options": {"env.inference_weight": 4}}]},
            "'mine': say weight by its key, not as an option",
        ),
        (
            {"atropos": BOTH, "environments": [MINE, YOURS | {"group_size": 3}]},
            "groups of 3 (yours) cannot be packed to the largest group size 8 (mine)",
        ),
        ({"atropos": BOTH, "environments": [MINE | {"group_size": 256}]}, "groups of 256 (mine) are larger"),
        ({"atropos": MOCK, "actors": [REPLACE | {"at": "prompter"}]}, "not 'prompter'; with atropos.enabled = true"),
        ({"atropos": MOCK, "actors": [TAP | {"at": "rollouts"}]}, "must be at one of scored, reports, not 'rollouts'"),
        ({"atropos": MOCK, "actors": [REPLACE | {"at": "atropos_fetche"}]}, "did you mean atropos_fetcher?"),
        ({"actors": [REPLACE | {"at": "atropos_fetcher"}]}, "it is there with atropos.enabled = true"),
        ({"actors": [TAP | {"name": "atropos_fetcher"}]}, "'atropos_fetcher' is the name of a box"),
        (
            {"atropos": BOTH, "environments": [MINE], "actors": [TAP | {"name": "environment mine"}]},
            "'environment mine' is the name of a service",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(sections: dict[str, Any], message: str) -> None:
    """Groups come from one place, in sizes that fill batches, and nothing is set in vain."""
    with pytest.raises(ProfileError) as caught:
        validate(profile(**sections))
    assert str(caught.value).startswith("profile: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"atropos": URL},
        {"atropos": URL | {"reset": False}},
        {"atropos": MOCK},
        {"atropos": BOTH, "environments": [MINE]},
        {"atropos": BOTH | URL, "environments": [MINE | {"weight": 2.0}]},
        {"atropos": BOTH, "environments": [MINE, YOURS | {"weight": 3.0, "group_size": 4}]},
        {
            "atropos": BOTH,
            "environments": [MOST, REST | {"min_batch_allocation": 0.3}],
        },
        {"atropos": MOCK, "actors": [REPLACE | {"at": "atropos_fetcher", "name": "atropos_fetcher"}]},
        {"atropos": MOCK, "actors": [TAP]},
    ],
    ids=str,
)
def test_what_makes_sense_is_allowed(sections: dict[str, Any]) -> None:
    """The rules refuse no honest combination."""
    validate(profile(**sections))


@pytest.mark.parametrize("name", ["atropos", "atropos-local"])
@pytest.mark.parametrize("overrides", [{"atropos.mock": True}, {"atropos.enabled": False}], ids=str)
def test_a_switch_on_top_takes_the_place_of_what_a_profile_names(name: str, overrides: dict[str, Any]) -> None:
    """Neither the server nor environments of a lower layer remain."""
    found = load_profile(name, overrides)
    assert (found.atropos.url, found.atropos.python, found.environments) == ("", "", ())


def test_scripts_are_the_profiles_or_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As data files are; the interpreter is the caller's, wherever it is named."""
    monkeypatch.chdir(tmp_path)
    found = load_profile("atropos-local")
    assert found.environments[0].script == str(PROFILES / "environments" / "arithmetic.py")
    assert found.atropos.python == ".atropos/bin/python"
    by_flag = load_profile("atropos-local", {"environments": [MINE | {"options": {"max_num_workers": 2}}]})
    assert by_flag.environments[0].script == str(tmp_path / "mine.py")
    (tmp_path / "again.toml").write_text(resolved_toml(by_flag), encoding="utf-8")
    assert load_profile("./again.toml") == by_flag


def test_an_environment_without_a_script_is_named() -> None:
    """By its number."""
    with pytest.raises(ProfileError, match=r"^command line: environments\[0\].script is missing$"):
        load_profile("atropos-local", {"environments": [{"name": "mine"}]})
