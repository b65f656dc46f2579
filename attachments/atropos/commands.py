"""The command lines of the Atropos API server and of environments, and the checks of their interpreter."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from attachments.atropos.group_sizes import (
    batch_sequences,
    group_size,
    max_queued_batches,
    require_fillable,
    reserved_share,
)
from attachments.atropos.sections import ATROPOS, ENVIRONMENTS, EnvironmentSection, EnvironmentSource
from clotho.settings.server import HttpServer
from protocols.errors import ProfileError
from protocols.sampling import PARAMETERS
from training_run.profile.program import program
from training_run.profile.schema import Profile

CHECK_SECONDS = 60.0
CHECK_ATROPOSLIB = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('atroposlib') else 3)"
NOT_INSTALLED = 3


def find_interpreter(python: str) -> str:
    """Return the absolute path of an interpreter. Symbolic links are kept, because virtual environments use them."""
    name = os.path.expanduser(python)
    return os.path.abspath(name) if os.sep in name else shutil.which(name) or name


def require_atroposlib(python: str) -> None:
    """Raise ProfileError, with the command that helps, unless this interpreter has atroposlib."""
    path = Path(find_interpreter(python))
    if not path.is_file():
        raise ProfileError(f"atropos.python: {python} does not exist; create it with: {_install_command(python)}")
    if not os.access(path, os.X_OK):
        raise ProfileError(f"atropos.python: {python} is not executable; set it to a Python interpreter")
    try:
        check = subprocess.run(
            [path, "-c", CHECK_ATROPOSLIB], stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"atropos.python: {python} cannot be run: {error}") from error
    if check.returncode == NOT_INSTALLED:
        raise ProfileError(
            f"atropos.python: {python} has no atroposlib; install it with: {python} -m pip install atroposlib"
        )
    if check.returncode:
        raise ProfileError(
            f"atropos.python: {python} is not a working Python interpreter: it exited with {check.returncode}"
        )


def require_environments(profile: Profile) -> None:
    """Raise ProfileError unless a profile's environments can fill a batch, and interpreter and scripts exist."""
    require_fillable(profile)
    if not (python := interpreter(profile)):
        return
    if ENVIRONMENTS.of(profile) and profile.model.path.lower().endswith(".gguf"):
        raise ProfileError(
            "model.path: environments read the tokenizer from a directory, not from a GGUF file: convert it with "
            f"{program()} convert {shlex.quote(profile.model.path)} DIRECTORY --to mlx"
        )
    require_atroposlib(python)
    for section in ENVIRONMENTS.of(profile):
        if not Path(section.script).is_file():
            raise ProfileError(f"environments: {section.name!r}: the script {section.script} does not exist")


def interpreter(profile: Profile) -> str:
    """Return `atropos.python`; empty if the run starts no environments."""
    source = ATROPOS.of(profile)
    return source.python if isinstance(source, EnvironmentSource) else ""


def require_server(profile: Profile) -> HttpServer:
    """Return the settings of the HTTP server. Raises ProfileError without one: environments sample over HTTP."""
    if isinstance(profile.server, HttpServer):
        return profile.server
    raise ProfileError('server = "off" contradicts atropos: environments sample over HTTP')


def _install_command(python: str) -> str:
    directory = Path(python).parent
    environment = directory.parent if directory.name == "bin" else Path(".atropos")
    return f"python3 -m venv {environment} && {environment}/bin/pip install atroposlib"


RUN_ENVIRONMENT = Path(__file__).with_name("run_environment.py")
ENDLESS_STEPS = 10**9
"""Environments end with the run, not after a number of steps."""
FORWARDED = (
    *(name for name, one in PARAMETERS.items() if one.is_scalar and one.learner in ("evaluates", "replays support")),
    "max_tokens",
)
"""Sampling parameters that environments receive in CLOTHO_SAMPLING."""
LOCAL_ADDRESSES = ("127.0.0.1", "localhost")

DEFAULT_VARIABLES = {
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",  # avoids one thread per core for short texts
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",  # keeps settings on one line of the log
}
"""Environment variables that are set unless the user has set them."""


class Command(Struct, frozen=True, kw_only=True):
    """The command of one process.

    argv: command line, without secrets. settings: contents of the `--config` file: values that no flag can express, and
    secrets. variables: all environment variables. secret: text that logs mask.
    """

    argv: tuple[str, ...]
    variables: dict[str, str]
    settings: dict[str, dict[str, Any]] = {}
    secret: str = ""


def server_command(python: str, *, port: int) -> Command:
    """Return the command of the API server, which listens on the loopback address."""
    module = "atroposlib.cli.run_api"
    argv = (find_interpreter(python), "-m", module, "--host", LOCAL_ADDRESSES[0], "--port", str(port))
    return Command(argv=argv, variables=_variables({}))


def environment_command(section: EnvironmentSection, profile: Profile, *, server_url: str, policy_url: str) -> Command:
    """Return the command that runs an environment's script with `serve`.

    The environment samples from the policy's HTTP API and sends its groups to the API server. Its bearer token is
    `KEY:NAME`; the name is the client label.
    """
    flags: dict[str, Any] = _flags(section, profile, server_url, reachable(policy_url))
    flags |= {name if "." in name else f"env.{name}": value for name, value in section.options.items()}
    key = require_server(profile).api_key
    secret = flags["openai.api_key"] if key or "openai.api_key" in section.options else ""
    in_file = [name for name, value in flags.items() if isinstance(value, list | dict) or (secret and value == secret)]
    settings: dict[str, dict[str, Any]] = {}
    for name in in_file:
        section_name, _, field = name.partition(".")
        settings.setdefault(section_name, {})[field] = flags.pop(name)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if Path(_model(profile)).is_dir() else {}
    sampling = json.dumps({name: getattr(profile.sampling, name) for name in FORWARDED})
    python = find_interpreter(interpreter(profile))
    return Command(
        argv=(
            *(python, str(RUN_ENVIRONMENT), section.script, "serve"),
            *(f"--{name}={_text(value)}" for name, value in flags.items()),
        ),
        variables=_variables(offline) | {"CLOTHO_SAMPLING": sampling},
        settings=settings,
        secret=key or secret,
    )


def reachable(url: str) -> str:
    """Return a URL to connect to for a bound URL: wildcard addresses become loopback addresses."""
    return url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


def _flags(section: EnvironmentSection, profile: Profile, server_url: str, policy_url: str) -> dict[str, Any]:
    model, batch, server = _model(profile), batch_sequences(profile), require_server(profile)
    sizes = {other.name: group_size(other, profile) for other in ENVIRONMENTS.of(profile)}
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
        "openai.base_url": f"{policy_url}/v1",
        "openai.server_type": "vllm",
        "openai.model_name": server.model_name,
        "openai.tokenizer_name": model,
        "openai.api_key": f"{server.api_key or 'clotho'}:{section.name}",
    }
    if (share := reserved_share(section, profile)) is not None:
        flags["env.min_batch_allocation"] = share
    return flags


def _model(profile: Profile) -> str:
    """Return the path of the model's tokenizer, absolute if it is a directory."""
    path = os.path.expanduser(profile.model.path)
    return os.path.abspath(path) if os.path.isdir(path) else profile.model.path


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _variables(offline: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables: defaults, the user's variables, and required values."""
    inherited = dict(os.environ)
    required = {"PYTHONUNBUFFERED": "1"}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's loopback address
        required[name] = ",".join(filter(None, [inherited.get(name, ""), *LOCAL_ADDRESSES]))
    return {**DEFAULT_VARIABLES, **offline, **inherited, **required}
