"""The command lines of lm-eval and inspect, and the results that they write."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from protocols.errors import ClothoError


class HarnessError(ClothoError, RuntimeError):
    """A harness, or the server that it evaluates, has failed."""


class HarnessValue(Struct, frozen=True, kw_only=True):
    """One number of a harness. stderr: its standard error; None if the harness states none."""

    task: str
    metric: str
    value: float
    stderr: float | None


class HarnessRequest(Struct, frozen=True, kw_only=True):
    """What is evaluated. url: of the API, with /v1. model: name of the policy in requests. directory: of the results.

    tasks: as the harness names them. chat: whether requests are conversations. limit: problems per task; 0: all.
    concurrency: requests at once. context: number of tokens of the context. flags: further flags of the harness.
    """

    url: str
    model: str
    directory: Path
    tasks: tuple[str, ...]
    chat: bool
    limit: int
    concurrency: int
    context: int
    flags: tuple[str, ...]


class Harness(Protocol):
    """One harness. module: what its interpreter must have. package: what `pip` installs."""

    module: str
    package: str

    def command(self, request: HarnessRequest) -> list[str]:
        """Return the arguments of the interpreter."""
        ...

    def variables(self, request: HarnessRequest) -> Mapping[str, str]:
        """Return its environment."""
        ...

    def values(self, directory: Path) -> Iterator[HarnessValue]:
        """Yield the numbers that an evaluation has written. Raises HarnessError."""
        ...


class LmEval:
    """EleutherAI's lm-evaluation-harness.

    The tokenizer of the server is used (`tokenizer_backend=remote`), so that the harness needs no copy of the model.
    """

    module, package = "lm_eval", "lm_eval[api]==0.4.13"

    def command(self, request: HarnessRequest) -> list[str]:
        """Return `-m lm_eval run` with a model of the API."""
        route, kind = (
            ("chat/completions", "local-chat-completions") if request.chat else ("completions", "local-completions")
        )
        arguments = {
            "model": request.model,
            "base_url": f"{request.url}/{route}",
            "num_concurrent": request.concurrency,
            "max_length": request.context,
            **({} if request.chat else {"tokenizer_backend": "remote"}),
        }
        return [
            *("-m", "lm_eval", "run", "--model", kind, "--tasks", ",".join(request.tasks)),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--output_path", str(request.directory)),
            *(["--limit", str(request.limit)] if request.limit else []),
            *(["--apply_chat_template"] if request.chat else []),
            *request.flags,
        ]

    def variables(self, request: HarnessRequest) -> Mapping[str, str]:
        """Return the environment of this process with a key, which the client requires."""
        return {"OPENAI_API_KEY": "none", **os.environ}

    def values(self, directory: Path) -> Iterator[HarnessValue]:
        """Yield every metric of every task: `exact_match,none` is the metric and the filter of answers."""
        results = _decoded(_newest(directory, "results_*.json"))["results"]
        for task, metrics in sorted(results.items()):
            for name, value in metrics.items():
                metric, comma, kind = name.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                error = metrics.get(f"{metric}_stderr,{kind}")
                shown = metric if kind == "none" else f"{metric} ({kind})"
                yield HarnessValue(task=task, metric=shown, value=float(value), stderr=_number(error))


class Inspect:
    """Inspect of the UK AI Security Institute. Tasks are names of installed tasks, or files of Python."""

    module, package = "inspect_ai", "inspect-ai openai"

    def command(self, request: HarnessRequest) -> list[str]:
        """Return `-m inspect_ai eval` with an OpenAI-compatible model."""
        tasks = [os.path.relpath(one) if os.path.isabs(one) else one for one in request.tasks]  # it refuses others
        return [
            *("-m", "inspect_ai", "eval", *tasks, "--model", f"openai-api/clotho/{request.model}"),
            *("--log-dir", str(request.directory), "--log-format", "json", "--display", "plain"),
            *("--max-connections", str(request.concurrency)),
            *(["--limit", str(request.limit)] if request.limit else []),
            *request.flags,
        ]

    def variables(self, request: HarnessRequest) -> Mapping[str, str]:
        """Return the environment of this process with address and key of the model."""
        return {"CLOTHO_API_KEY": "none", **os.environ, "CLOTHO_BASE_URL": request.url}

    def values(self, directory: Path) -> Iterator[HarnessValue]:
        """Yield every metric of every scorer, from one log per task."""
        _newest(directory, "*.json")
        for log in sorted(directory.glob("*.json")):
            found = _decoded(log)
            if found.get("status") != "success":
                raise HarnessError(
                    f"inspect: the task {found['eval']['task']} ended as {found.get('status')}: see {log}"
                )
            for score in found["results"]["scores"]:
                metrics = {name: metric["value"] for name, metric in score["metrics"].items()}
                error = _number(metrics.pop("stderr", None))
                for name, value in metrics.items():
                    shown = name if len(metrics) == 1 else f"{score['name']}/{name}"
                    yield HarnessValue(task=found["eval"]["task"], metric=shown, value=float(value), stderr=error)


HARNESSES: Mapping[str, Harness] = {"lm_eval": LmEval(), "inspect": Inspect()}
"""By the name that the command has for them."""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _newest(directory: Path, pattern: str) -> Path:
    found = sorted(directory.rglob(pattern))
    if not found:
        raise HarnessError(f"the harness has written no results ({pattern}) below {directory}")
    return found[-1]


def _decoded(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise HarnessError(f"results of the harness, {path}: {error}") from error
