"""The commands that run the two halves of Atropos: its API server, and environments.

The interpreter that has atroposlib: found, and looked at before a run depends on it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from clotho.config.group_sizes import batch_sequences, group_size, max_queued_batches, reserved_share
from clotho.config.schema import EnvironmentSection, Profile
from protocols.errors import ProfileError
from protocols.sampling import PARAMETERS

PATIENCE_SECONDS = 60.0
HAS_ATROPOSLIB = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('atroposlib') else 3)"
LACKS = 3


def find_interpreter(python: str) -> str:
    """Its path, whatever the working directory becomes; links stay, for a virtual environment's python is one."""
    name = os.path.expanduser(python)
    return os.path.abspath(name) if os.sep in name else shutil.which(name) or name


def require_atroposlib(python: str) -> None:
    """Raise ProfileError, on one line with the command that helps, unless this interpreter has atroposlib."""
    path = Path(find_interpreter(python))
    if not path.is_file():
        raise ProfileError(f"atropos.python: there is no {python}; to make one: {_make(python)}")
    if not os.access(path, os.X_OK):
        raise ProfileError(f"atropos.python: {python} is not a program that can be run")
    try:
        asked = subprocess.run(
            [path, "-c", HAS_ATROPOSLIB], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"atropos.python: {python} cannot be run: {error}") from error
    if asked.returncode == LACKS:
        raise ProfileError(f"atropos.python: {python} has no atroposlib: {python} -m pip install atroposlib")
    if asked.returncode:
        raise ProfileError(f"atropos.python: {python} is no Python that works: it ended with {asked.returncode}")


def require_environments(profile: Profile) -> None:
    """Raise ProfileError unless everything is there that a profile's environments are run with."""
    if not profile.atropos.python:
        return
    require_atroposlib(profile.atropos.python)
    for section in profile.environments:
        if not Path(section.script).is_file():
            raise ProfileError(f"environments: {section.name!r}: there is no script {section.script}")


def _make(python: str) -> str:
    place = Path(python).parent
    environment = place.parent if place.name == "bin" else Path(".atropos")
    return f"python3 -m venv {environment} && {environment}/bin/pip install atroposlib"


REGISTERED_AS = Path(__file__).with_name("run_environment.py")
ENDLESS_STEPS = 10**9
"""An environment ends with the run, not after steps of its own."""
FORWARDED = (
    *(name for name, one in PARAMETERS.items() if one.is_scalar and one.learner in ("evaluates", "replays support")),
    "max_tokens",
)
"""Sampling parameters that environments are told."""
LOCAL_ADDRESSES = ("127.0.0.1", "localhost")

QUIET = {
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",  # it starts as many threads as there are cores, for a line of text
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",  # whole settings on a line of the log
}
"""Environment variables, where the user has not set them."""


class Command(Struct, frozen=True, kw_only=True):
    """How a process is run.

    argv: the command line, without secrets. settings: what `--config` is given as a file: what no flag can say, and
    what only the owner may read. variables: the whole environment. secret: what no log should show.
    """

    argv: tuple[str, ...]
    variables: dict[str, str]
    settings: dict[str, dict[str, Any]] = {}
    secret: str = ""


def server_command(python: str, *, port: int) -> Command:
    """Run the API server, for this machine alone."""
    module = "atroposlib.cli.run_api"
    argv = (find_interpreter(python), "-m", module, "--host", LOCAL_ADDRESSES[0], "--port", str(port))
    return Command(argv=argv, variables=_variables({}))


def environment_command(section: EnvironmentSection, profile: Profile, *, server_url: str, gateway_url: str) -> Command:
    """Run one environment's script with `serve`: it asks the gateway, and sends its groups to the server.

    The bearer token is `KEY:NAME`, by which the gateway knows who asks.
    """
    flags: dict[str, Any] = _flags(section, profile, server_url, reachable(gateway_url))
    flags |= {name if "." in name else f"env.{name}": value for name, value in section.options.items()}
    key = profile.server.api_key
    secret = flags["openai.api_key"] if key or "openai.api_key" in section.options else ""
    apart = [name for name, value in flags.items() if isinstance(value, list | dict) or (secret and value == secret)]
    settings: dict[str, dict[str, Any]] = {}
    for name in apart:
        space, _, field = name.partition(".")
        settings.setdefault(space, {})[field] = flags.pop(name)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if Path(_model(profile)).is_dir() else {}
    sampling = json.dumps({name: getattr(profile.sampling, name) for name in FORWARDED})
    python = find_interpreter(profile.atropos.python)
    return Command(
        argv=(
            *(python, str(REGISTERED_AS), section.script, "serve"),
            *(f"--{name}={_text(value)}" for name, value in flags.items()),
        ),
        variables=_variables(offline) | {"CLOTHO_SAMPLING": sampling},
        settings=settings,
        secret=key or secret,
    )


def reachable(url: str) -> str:
    """An address to connect to, for one that was bound."""
    return url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


def _flags(section: EnvironmentSection, profile: Profile, server_url: str, gateway_url: str) -> dict[str, Any]:
    model, batch = _model(profile), batch_sequences(profile)
    sizes = {other.name: group_size(other, profile) for other in profile.environments}
    flags: dict[str, Any] = {
        "slurm": False,
        "env.group_size": group_size(section, profile),
        "env.batch_size": batch,
        "env.max_batches_offpolicy": max_queued_batches(batch, sizes),
        "env.rollout_server_url": server_url.rstrip("/"),
        "env.tokenizer_name": model,
        "env.total_steps": ENDLESS_STEPS,
        "env.use_wandb": False,
        "env.wandb_name": section.name,
        "env.steps_per_eval": 0,
        "env.max_token_length": profile.sampling.max_tokens,
        "env.inference_weight": section.weight,
        "openai.base_url": f"{gateway_url}/v1",
        "openai.server_type": "vllm",
        "openai.model_name": profile.server.model_name,
        "openai.tokenizer_name": model,
        "openai.api_key": f"{profile.server.api_key or 'clotho'}:{section.name}",
    }
    if (share := reserved_share(section, profile)) is not None:
        flags["env.min_batch_allocation"] = share
    return flags


def _model(profile: Profile) -> str:
    """The tokenizer's place, as the environment's own working directory finds it."""
    path = os.path.expanduser(profile.model.path)
    return os.path.abspath(path) if os.path.isdir(path) else profile.model.path


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _variables(offline: Mapping[str, str]) -> dict[str, str]:
    """Ours where the user has set nothing; and what must be as we say."""
    inherited = dict(os.environ)
    forced = {"PYTHONUNBUFFERED": "1"}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy does not know this machine's loopback
        forced[name] = ",".join(filter(None, [inherited.get(name, ""), *LOCAL_ADDRESSES]))
    return {**QUIET, **offline, **inherited, **forced}
