"""The command `serve` accepts the settings that apply to a server, and refuses the others with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols.errors import ProfileError
from training_run.profile.command_profiles import APPLICABLE, SERVE_COMMON, load_serving, serve_help
from training_run.profile.keys import flag_of


def test_settings_come_from_defaults_and_flags() -> None:
    """Without a profile, every setting but the model has the default of its key."""
    found = load_serving(["--model", "org/name", "--server.port", "0", "--sampling.temperature=0.5"])
    assert found.profile.model.path == "org/name"
    assert (found.profile.server.port, found.profile.server.host) == (0, "127.0.0.1")
    assert (found.profile.sampling.temperature, found.profile.sampling.max_tokens) == (0.5, 512)
    assert found.adapters == {}


def test_a_training_profile_gives_its_model_and_its_server() -> None:
    """Its settings for training are not used; flags have precedence."""
    found = load_serving(["--profile", "local-m3", "--server.port", "0"])
    assert found.profile.model.path.endswith("embedded")
    assert found.profile.server.port == 0
    assert load_serving(["--profile", "local-m3", "--model", "other/model"]).profile.model.path == "other/model"


def test_a_model_has_a_name_of_its_own_only_if_it_is_set(tmp_path: Path) -> None:
    """By a flag or by a profile; the default of training runs is no name of a served model."""
    profile = tmp_path / "named.toml"
    profile.write_text('[model]\npath = "org/name"\n[server]\nmodel_name = "from-profile"\n')
    assert load_serving(["--model", "m"]).model_name == ""
    assert load_serving(["--model", "m", "--server.model-name", "policy"]).model_name == "policy"
    assert load_serving(["--profile", str(profile)]).model_name == "from-profile"


def test_a_shipped_chat_template_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be used from any directory; a file of the same name there has precedence."""
    monkeypatch.chdir(tmp_path)
    flags = ["--model", "m", "--model.chat-template", "tools-hermes"]
    assert Path(load_serving(flags).profile.model.chat_template).read_text(encoding="utf-8").startswith("{#-")
    (tmp_path / "tools-hermes").touch()
    assert load_serving(flags).profile.model.chat_template == str(tmp_path / "tools-hermes")


@pytest.mark.parametrize(
    "flag",
    ["--steps=3", "--data.train=x.jsonl", "--sampling.group-size=4", "--server=off", "--engine.kv-policy=drain",
     "--run-dir=x", "--learner.batch-size=2"],
)  # fmt: skip
def test_a_flag_of_training_is_refused(flag: str) -> None:
    """The message names the flag."""
    with pytest.raises(ProfileError) as refusal:
        load_serving(["--model", "m", flag])
    assert flag.partition("=")[0] in str(refusal.value)
    assert refusal.value.exit_status == 2


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--server.port", "0"],
        ["--model"],
        ["--model", "m", "--no-such-flag", "1"],
        ["--model", "m", "--server.port", "x"],
        ["--model", "m", "--sampling.max-tokens", "300000"],
        ["--model", "m", "--adapter", "name"],
        ["--model", "m", "--adapter", "=path"],
        ["--model", "m", "--adapter", "a b=path"],
        ["--model", "m", "--adapter", "a=x", "--adapter", "a=y"],
        ["--model", "m", "--resume"],
        ["--profile", "no-such-profile"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_line(argv: list[str]) -> None:
    """A ProfileError without a line break."""
    with pytest.raises(ProfileError) as refusal:
        load_serving(argv)
    assert "\n" not in str(refusal.value)


def test_adapters_have_names_and_paths() -> None:
    """The flag is repeated for each adapter; `~` is the home directory."""
    found = load_serving(["--model", "m", "--adapter", "a=runs/a", "--adapter", "b-2.x=~/b"])
    assert found.adapters == {"a": Path("runs/a"), "b-2.x": Path("~/b").expanduser()}


def test_help_shows_the_settings_of_a_server_only() -> None:
    """`--help` shows the common flags, `--help SECTION` a section, `--help-all` everything."""
    common, everything = serve_help(["--help"]), serve_help(["--help-all"])
    assert common is not None
    assert everything is not None
    assert all(flag_of(path) in everything for path in APPLICABLE if path != "model.path")
    assert "--model" in common
    assert "--adapter" in common
    assert "learner" not in everything
    assert set(SERVE_COMMON) <= set(APPLICABLE)
    section = serve_help(["--help", "engine"])
    assert section is not None
    assert "--engine.max-num-seqs" in section
    assert "--server.port" not in section
    assert serve_help(["--model", "m"]) is None
    with pytest.raises(ProfileError):
        serve_help(["--help", "learner"])
