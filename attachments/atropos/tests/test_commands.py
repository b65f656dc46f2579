"""Command lines of environments and of the API server, and checks of the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attachments.atropos.commands import (
    Command,
    environment_command,
    find_interpreter,
    reachable,
    require_atroposlib,
    require_environments,
    server_command,
)
from attachments.atropos.sections import ENVIRONMENTS
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from protocols.errors import ProfileError
from training_run.profile.load import load_profile

SHOWS_SETTINGS = '''
"""An environment that shows how it is set, and ends."""
import json
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class Config(BaseEnvConfig):
    names: list[str] = []
    bias: float = 0.0

class Shows(BaseEnv):
    name = "shows"
    env_config_cls = Config
    @classmethod
    def config_init(cls):
        return Config(), [APIServerConfig()]
    async def setup(self):
        server = self.server.servers[0]
        shown = {"env": self.config.model_dump(mode="json"), "openai": server.config.model_dump(mode="json")}
        print("SHOWN", type(server).__name__, json.dumps(shown), flush=True)
        raise SystemExit(0)
    async def get_next_item(self): ...
    async def evaluate(self): ...

if __name__ == "__main__":
    Shows.cli()
'''


def command(python: str = "python3", /, **overrides: Any) -> Command:
    """Return the command of the profile's first environment."""
    settings = {"atropos.python": python, **overrides}
    profile = load_profile("atropos-local", settings)
    section = ENVIRONMENTS.of(profile)[0]
    return environment_command(section, profile, server_url="http://127.0.0.1:1", policy_url="http://0.0.0.0:8000")


def flag(command: Command, name: str) -> str | None:
    """Return the value of a flag."""
    found = [text.partition("=")[2] for text in command.argv if text.startswith(f"--{name}=")]
    assert len(found) <= 1
    return found[0] if found else None


def mine(**keys: Any) -> list[dict[str, Any]]:
    """Return the sections of two environments."""
    return [{"name": "mine", "script": "mine.py", **keys}, {"name": "other", "script": "other.py"}]


def test_the_command_contains_the_settings_of_the_run() -> None:
    """Sizes, addresses, names, and the API key with the client label."""
    made = command(
        environments=mine(weight=3.0, group_size=4, min_batch_allocation=0.25), **{"sampling.max_tokens": 64}
    )
    said = {
        "slurm": "false", "env.group_size": "4", "env.batch_size": "128", "env.inference_weight": "3.0",
        "env.min_batch_allocation": "0.25", "env.rollout_server_url": "http://127.0.0.1:1",
        "env.max_token_length": "64", "env.use_wandb": "false", "env.wandb_name": "mine", "env.steps_per_eval": "0",
        "openai.base_url": "http://127.0.0.1:8000/v1", "openai.server_type": "vllm", "openai.model_name": "policy",
        "openai.api_key": "clotho:mine",
    }  # fmt: skip
    assert {name: flag(made, name) for name in said} == said
    assert flag(made, "env.tokenizer_name") == flag(made, "openai.tokenizer_name")
    assert Path(flag(made, "env.tokenizer_name") or "").is_dir()
    assert made.argv[2:4] == (str(Path.cwd() / "mine.py"), "serve")
    assert flag(command(), "env.min_batch_allocation") is None, "it is the only one"
    assert flag(command(environments=mine(weight=3.0)), "env.min_batch_allocation") == "0.75"


def test_options_override_the_settings_of_the_run() -> None:
    """A key is a flag of `--env`; a key with a dot is a complete flag name."""
    made = command(environments=mine(options={"max_token_length": 9, "use_wandb": True, "openai.timeout": 5}))
    assert (flag(made, "env.max_token_length"), flag(made, "env.use_wandb"), flag(made, "openai.timeout")) == (
        "9",
        "true",
        "5",
    )


def test_lists_and_tables_are_passed_in_a_file() -> None:
    """A flag of atroposlib takes a single value."""
    made = command(environments=mine(options={"names": ["a", "b"], "deep": {"x": 1}}))
    assert made.settings == {"env": {"names": ["a", "b"], "deep": {"x": 1}}}
    assert flag(made, "env.names") is None
    assert command(environments=mine()).settings == {}


def test_an_api_key_is_passed_in_a_file() -> None:
    """Command lines and environment variables are visible to other users."""
    made = command(environments=mine(), **{"server.api_key": "s3cret"})
    assert made.settings == {"openai": {"api_key": "s3cret:mine"}}
    assert "s3cret" not in json.dumps([made.argv, made.variables])
    assert made.secret == "s3cret"
    own = command(environments=mine(options={"openai.api_key": "theirs"}))
    assert own.settings == {"openai": {"api_key": "theirs"}}
    assert own.secret == "theirs"


def test_environment_variables_of_the_user_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except PYTHONUNBUFFERED and the loopback addresses in NO_PROXY."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("no_proxy", "a.b")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    made = command().variables
    assert (made["WANDB_MODE"], made["MINE"], made["OMP_NUM_THREADS"]) == ("offline", "kept", "1")
    assert (made["PYTHONUNBUFFERED"], made["no_proxy"]) == ("1", "a.b,127.0.0.1,localhost")
    assert made["HF_HUB_OFFLINE"] == made["TRANSFORMERS_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in command(**{"model.path": "some/repository"}).variables


def test_environments_receive_the_sampling_parameters() -> None:
    """As JSON in CLOTHO_SAMPLING."""
    made = command(**{"sampling.temperature": 0.7, "sampling.top_k": 5, "sampling.max_tokens": 32})
    assert json.loads(made.variables["CLOTHO_SAMPLING"]) == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "max_tokens": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
    ],
)
def test_a_wildcard_address_becomes_a_loopback_address(bound: str, reached: str) -> None:
    """A client cannot connect to a wildcard address."""
    assert reachable(bound) == reached


def test_the_api_server_listens_on_the_loopback_address() -> None:
    """atroposlib's default is every address."""
    assert server_command("python3", port=5).argv[1:] == (
        "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", "5",
    )  # fmt: skip


@pytest.mark.needs_extra("atroposlib")
def test_atroposlib_accepts_the_command(tmp_path: Path) -> None:
    """A real environment receives every flag and every setting with the expected type."""
    script, settings = tmp_path / "shows.py", tmp_path / "settings.json"
    script.write_text(SHOWS_SETTINGS, encoding="utf-8")
    options = {"names": ["a", "b"], "bias": -3.5, "openai.timeout": 77}
    section = {"name": "mine", "script": str(script), "min_batch_allocation": 0.5, "group_size": 4, "options": options}
    made = command(python_with_atropos(), environments=[section], **{"server.api_key": "s3cret"})
    settings.write_text(json.dumps(made.settings), encoding="utf-8")
    asked = subprocess.run(
        [*made.argv, f"--config={settings}"], env=made.variables, capture_output=True, text=True, check=False
    )
    shown = [line for line in asked.stdout.splitlines() if line.startswith("SHOWN")]
    assert shown, asked.stdout + asked.stderr
    _, kind, text = shown[0].split(" ", 2)
    found = json.loads(text)
    assert kind == "VLLMServer"
    assert (
        found["openai"] | {"api_key": "s3cret:mine", "base_url": "http://127.0.0.1:8000/v1", "timeout": 77}
        == (found["openai"])
    )
    expected = {"group_size": 4, "min_batch_allocation": 0.5, "names": ["a", "b"], "bias": -3.5, "use_wandb": False}
    assert found["env"] | expected == found["env"]


def program(path: Path, text: str) -> str:
    """Create an executable script."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def error_message(python: str) -> str:
    """Return the message of the error."""
    with pytest.raises(ProfileError) as caught:
        require_atroposlib(python)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_the_error_contains_the_command_that_installs_what_is_missing(tmp_path: Path) -> None:
    """A missing interpreter, and an interpreter without atroposlib."""
    assert error_message(".nowhere/bin/python") == (
        "atropos.python: .nowhere/bin/python does not exist; create it with: "
        "python3 -m venv .nowhere && .nowhere/bin/pip install atroposlib"
    )
    assert error_message("no-such-program").endswith("python3 -m venv .atropos && .atropos/bin/pip install atroposlib")
    lacking = program(tmp_path / "lacking", "exit 3")
    assert (
        error_message(lacking)
        == f"atropos.python: {lacking} has no atroposlib; install it with: {lacking} -m pip install atroposlib"
    )


def test_a_file_that_is_not_a_python_interpreter_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file that is not executable, one that fails, and one that cannot be run. What a file prints is not shown."""
    (tmp_path / "text").touch()
    assert error_message(str(tmp_path / "text")).endswith("is not executable; set it to a Python interpreter")
    assert error_message(program(tmp_path / "fails", "echo no; exit 9")).endswith(
        "is not a working Python interpreter: it exited with 9"
    )
    assert capfd.readouterr() == ("", "")
    (tmp_path / "text").write_bytes(b"\x7fELF, or not")
    (tmp_path / "text").chmod(0o755)
    assert "cannot be run: " in error_message(str(tmp_path / "text"))


@pytest.mark.needs_extra("atroposlib")
def test_an_interpreter_with_atroposlib_is_accepted() -> None:
    """The interpreter of the other tests."""
    require_atroposlib(python_with_atropos())


def test_the_symbolic_link_of_a_virtual_environment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target is a Python without the packages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert find_interpreter("bin/python") == str(tmp_path / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert find_interpreter("python") == str(tmp_path / "bin" / "python")


def test_script_and_tokenizer_of_an_environment_must_exist(tmp_path: Path) -> None:
    """Profiles without environments need no script. Environments read no tokenizer from a GGUF file."""
    python = program(tmp_path / "python", "exit 0")
    environments = [{"name": "mine", "script": str(tmp_path / "mine.py")}]
    profile = load_profile("atropos-local", {"atropos.python": python, "environments": environments})
    with pytest.raises(ProfileError, match=r"^environments: 'mine': the script .*mine.py does not exist$"):
        require_environments(profile)
    (tmp_path / "mine.py").touch()
    require_environments(profile)
    with pytest.raises(ProfileError, match=r"convert m\.gguf"):
        require_environments(replace(profile, model=replace(profile.model, path="m.gguf")))
    require_environments(load_profile("atropos"))
    require_environments(load_profile("local-m3"))
