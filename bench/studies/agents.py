"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures training on episodes of several turns: three tools, Wordle, and one game that is played in three ways.

    python -m bench agents [--arms NAME ...] [--seeds 0 1 2]

The game is that of `--profile guessing`: as an environment in Python, as a taskset of verifiers, and as the agent of
docs/sessions.md, which uses OpenAI's client. The variable CLOTHO_VERIFIERS_PYTHON names an interpreter that has
verifiers (docs/verifiers.md); it is .verifiers/bin/python without the variable. All three are evaluated after training
by `clotho eval --profile guessing`.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import msgspec

from bench.contenders.process import verifiers_python
from bench.fingerprint import ROOT
from bench.runs import POLL_SECONDS, Record
from bench.studies.runner import Arm, Study, column, run_study

NAME = "agents"
GAME = ("--steps", "40", "--learner.batch-size", "8", "--eval", "off")
TRAINED = ("--data.verifiers.tasks", "210", "--data.heldout-fraction", "0")
"""The tasks without the name of the games that are held out."""

AGENT = re.compile(r"^```python\n(# agent\.py\n.*?)^```$", re.DOTALL | re.MULTILINE)
"""The agent in its page."""


def started(arm: Arm, _: int, directory: Path) -> Sequence[str]:
    """Further flags of a run. The agent of sessions is started beside it, as soon as the server of the run answers."""
    if arm.name == "game, taskset":
        return "--data.verifiers.python", verifiers_python()
    if arm.name != "game, HTTP agent":
        return ()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    threading.Thread(target=play, args=(port, directory / "agent.py"), daemon=True).start()
    return "--server.port", str(port)


def play(port: int, program: Path) -> None:
    """Write the agent of docs/sessions.md, wait for the server, and let the agent play to the end of the run."""
    (source,) = AGENT.findall((ROOT / "docs" / "sessions.md").read_text(encoding="utf-8"))
    program.write_text(source, encoding="utf-8")
    address = f"http://127.0.0.1:{port}"
    while not answers(f"{address}/health"):
        time.sleep(POLL_SECONDS)
    subprocess.run([sys.executable, program, f"{address}/v1"], stdout=subprocess.DEVNULL, check=False)


def answers(url: str) -> bool:
    """Whether a server has loaded its model."""
    try:
        return httpx.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def games_won(record: Record) -> dict[str, float]:
    """Return before and after: shares of held-out games that are won greedily. Empty if the run had evaluations."""
    if record.evaluations:
        return {}
    command = [sys.executable, "pipeline.py", "eval", "--profile", "guessing", "--json", "true"]
    adapter = f"after={record.adapters}"
    found = subprocess.run([*command, "--adapter", adapter], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    policies = msgspec.json.decode(found.stdout)["policies"]
    return {name: policies[policy]["greedy"]["overall"]["value"] for name, policy in SHOWN.items()}


SHOWN = {"before": "base", "after": "after"}
STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        Arm(name="calculator", flags=("--profile", "calculator", "--async", "false")),
        Arm(name="wordle", flags=("--profile", "wordle", "--async", "false")),
        Arm(name="game, Python", flags=("--profile", "guessing", *GAME)),
        Arm(name="game, taskset", flags=("--profile", "verifiers-guessing", *TRAINED, *GAME)),
        Arm(
            name="game, HTTP agent",
            flags=("--profile", "local-m3", "--sessions", "http", "--sampling.max-tokens", "24", *GAME),
        ),
    ),
    quick="--steps 2 --learner.batch-size 2",
    measure=games_won,
    prepare=started,
    columns=(
        column("accuracy before", "before"),
        column("accuracy after", "after"),
        column("updates", "updates"),
        column("processor time", "cpu_seconds", "s"),
    ),
    note=(
        "Greedy accuracy on held-out problems: 256 chains of calls, 32 games of Wordle, 42 games with a name that was "
        "not trained on. The HTTP agent trains with four of the six things of these games. Medians over seeds, with "
        "lowest and highest. The processor time includes evaluations within the run, and excludes the process of the "
        "HTTP agent."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
