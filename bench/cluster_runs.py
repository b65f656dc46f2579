"""Measured costs of a cluster: short synchronous runs, and the directory of any synchronous run.

In a synchronous run, a batch is decoded from its first token to its last, then trained on. The number of decode steps
of a batch is the length of its longest completion, so that the time of a step and that of a row follow from the batches
of a run by least squares.
"""

from __future__ import annotations

import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from bench.cluster_costs import Costs, Plan, Workload

FILES = ("profile.toml", "facts.json", "metrics.jsonl", "rollouts.jsonl", "log.jsonl")
MIN_BATCHES = 4
"""Fewer batches do not determine the costs. The first one is not counted: it includes the start."""

TOKEN_BYTES = 100.0
"""Of a token in an answer: token, log-probability, version and support of the sampling distribution (docs/flow.md)."""


class RunFilesError(Exception):
    """A run directory from which no costs can be read; the message is one line."""


class Batch(Struct, frozen=True, kw_only=True):
    """One step of a run. lengths: completions of each group. zero_variance: one flag per group.

    began, ended: seconds since the start of the run. wait: seconds for which the learner waited. decode: seconds of the
    run's engine. update: seconds of the update, over trained_tokens tokens.
    """

    lengths: tuple[tuple[int, ...], ...]
    zero_variance: tuple[bool, ...]
    ended: float
    wait: float
    decode: float
    update: float
    trained_tokens: int

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(map(sum, self.lengths))

    @property
    def longest(self) -> int:
        """Number of tokens of the longest completion."""
        return max(map(max, self.lengths), default=0)


class RunFiles(Struct, frozen=True, kw_only=True):
    """What a run directory says. cluster_workers: 0 without a cluster.

    version_seconds: of the learner's device, per weight swap. push_seconds: until a worker has a version.
    """

    plan: Plan
    cluster_workers: int
    batches: tuple[Batch, ...]
    weight_bytes: float
    version_seconds: float
    push_seconds: float

    @property
    def determines_decoding(self) -> bool:
        """Whether the decode costs follow from the batches."""
        return self.plan.synchronous and not self.plan.max_batches_ahead and self.cluster_workers <= 1

    def groups_per_second(self, warm_up: int) -> float:
        """Rate at which groups ended, after so many steps."""
        counted = self.batches[warm_up:]
        return sum(batch.groups for batch in counted) / (counted[-1].ended - self.batches[warm_up - 1].ended)


def read_run(directory: Path) -> RunFiles:
    """Read the files of a run. Raises RunFilesError."""
    missing = [name for name in FILES if not (directory / name).is_file()]
    if missing:
        raise RunFilesError(f"{directory} is not the directory of a complete run: {missing[0]} is missing")
    try:
        profile = tomllib.loads((directory / "profile.toml").read_text(encoding="utf-8"))
        facts = msgspec.json.decode((directory / "facts.json").read_bytes())
        metrics, rollouts, log = (_lines(directory / f"{name}.jsonl") for name in ("metrics", "rollouts", "log"))
        batches = tuple(_batches(metrics, rollouts))
        in_16_bits = facts["dtype"] in ("bfloat16", "float16") and profile["policy"]["method"]["type"] == "full"
        return RunFiles(
            plan=_plan(profile),
            cluster_workers=_workers(profile, metrics),
            batches=batches,
            weight_bytes=(2.0 if in_16_bits else 4.0) * facts["trainable_parameters"],
            version_seconds=_version_seconds(log),
            push_seconds=_push_seconds(metrics),
        )
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise RunFilesError(f"{directory}: a file has another format ({type(error).__name__}: {error})") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _workers(profile: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> int:
    if profile.get("cluster", {}).get("type") != "ray":
        return 0
    return max([len(line["remote_servers"]) for line in metrics], default=0)


def _plan(profile: Mapping[str, Any]) -> Plan:
    cluster, synchronous = profile.get("cluster", {}), not profile["async"]
    rollouts = profile.get("rollouts", {})  # a setting without effect is not in the file
    return Plan(
        batch_size=profile["learner"]["batch_size"],
        max_batches_ahead=rollouts.get("lag", 0) if synchronous else rollouts["max_batches_ahead"],
        synchronous=synchronous,
        max_staleness=profile["learner"].get("max_staleness"),
        sync_interval=cluster.get("sync_interval", 1),
        local_share=cluster.get("local_share", 0.0),
        decode_share=profile["engine"]["decode_share"],
        max_num_seqs=profile["engine"]["max_num_seqs"],
        dynamic_sampling_max_ratio=profile["learner"]["objective"].get("dynamic_sampling_max_ratio", 0.0),
    )


def _batches(metrics: Sequence[Mapping[str, Any]], rollouts: Iterable[Mapping[str, Any]]) -> Iterable[Batch]:
    by_step = defaultdict[int, list[Mapping[str, Any]]](list)
    for line in rollouts:
        if line["completions"]:
            by_step[line["step"]].append(line)
    for line in metrics:
        groups = by_step[line["step"]]
        yield Batch(
            lengths=tuple(tuple(max(1, one["tokens"]) for one in group["completions"]) for group in groups),
            zero_variance=tuple(group["reason"] == "zero_variance" for group in groups),
            ended=line["time/run"],
            wait=line["time/wait_for_rollouts"],
            decode=line["time/decode"],
            update=line["time/update"],
            trained_tokens=line["trained_tokens"] or 0,
        )


def _version_seconds(log: Iterable[Mapping[str, Any]]) -> float:
    """Seconds of swap and parity check per weight swap, from the statistics at the end of the run."""
    turns = next((line["engine"]["turns"] for line in reversed(list(log)) if line["event"] == "run_statistics"), None)
    if turns is None:
        raise ValueError("log.jsonl has no run_statistics: the run has not ended")
    swaps = sum(turns["swap"]["counts"])
    return (float(turns["swap"]["total"]) + float(turns["parity"]["total"])) / max(1, int(swaps))


def _push_seconds(metrics: Iterable[Mapping[str, Any]]) -> float:
    found = [
        server["push_seconds"]
        for line in metrics
        for server in line.get("remote_servers", {}).values()
        if server["push_seconds"] is not None
    ]
    return statistics.median(found) if found else 0.0


def workload_of(run: RunFiles) -> Workload:
    """The groups of a run. Raises RunFilesError if it has none."""
    lengths = tuple(group for batch in run.batches for group in batch.lengths)
    if not lengths:
        raise RunFilesError("the run has no groups in rollouts.jsonl")
    return Workload(lengths=lengths, zero_variance=tuple(flag for one in run.batches for flag in one.zero_variance))


def costs_of(runs: Sequence[RunFiles], given: Mapping[str, float] = {}) -> Costs:
    """Costs from synchronous runs of one profile: without a cluster, and with one worker, if there is such a run.

    Several batch sizes separate the costs of step, row and group. The costs of the learner are those of the runs with a
    worker, if there are any: Ray's processes need time too. given: costs that are not taken from the runs.
    Raises RunFilesError if the runs do not determine the others.
    """
    alone = [run for run in runs if run.determines_decoding and not run.cluster_workers]
    beside = [run for run in runs if run.determines_decoding and run.cluster_workers]
    decoded = [batch for run in alone for batch in run.batches[1:] if batch.groups and batch.decode]
    waited = [batch for run in beside for batch in run.batches[1:] if batch.groups]
    if not {"step_seconds", "row_seconds"} <= given.keys():
        found = _decoding(decoded or waited, from_wait=not decoded)
    else:
        found = {}
    found = {"group_seconds": 0.0, **found, **given}
    trained = [batch for run in runs for batch in run.batches[1:] if batch.trained_tokens]
    if len(trained) < MIN_BATCHES:
        raise RunFilesError(f"the run has {len(trained)} updates after its first; {MIN_BATCHES} are needed")
    found |= _updates([batch for run in beside for batch in run.batches[1:] if batch.trained_tokens] or trained)
    found["version_seconds"] = statistics.mean(run.version_seconds for run in beside or runs)
    found["weight_bytes"], found["token_bytes"] = runs[0].weight_bytes, TOKEN_BYTES
    if waited and decoded:
        found |= _remote(waited, found, statistics.median(run.push_seconds for run in beside))
    return Costs(**{**found, **given})


def _decoding(batches: Sequence[Batch], *, from_wait: bool) -> dict[str, float]:
    if len(batches) < MIN_BATCHES:
        raise RunFilesError(
            "the decode costs do not follow from this run: use a run with --async false, without a cluster or with one "
            f"worker, of {MIN_BATCHES + 1} steps or more; or give --step-seconds and --row-seconds"
        )
    columns = [[batch.longest, batch.tokens, batch.groups] for batch in batches]
    step, row, group = fit(columns, [batch.wait if from_wait else batch.decode for batch in batches])
    return {"step_seconds": step, "row_seconds": row, "group_seconds": group}


def _updates(batches: Sequence[Batch]) -> dict[str, float]:
    fixed, token = fit([[1.0, batch.trained_tokens] for batch in batches], [batch.update for batch in batches])
    return {"update_seconds": fixed, "update_token_seconds": token}


def _remote(batches: Sequence[Batch], found: Mapping[str, float], push_seconds: float) -> dict[str, float]:
    """What a worker adds to decoding: per batch, the way of the weights and of the messages; per group, the answer."""
    added = [
        batch.wait
        - found["step_seconds"] * batch.longest
        - found["row_seconds"] * batch.tokens
        - found["group_seconds"] * batch.groups
        for batch in batches
    ]
    sizes = {batch.groups for batch in batches}
    columns = [[1.0, batch.groups] if len(sizes) > 1 else [1.0] for batch in batches]
    fixed, *group = fit(columns, [max(0.0, seconds) for seconds in added])
    return {
        "load_seconds": min(push_seconds, fixed),
        "latency_seconds": max(0.0, fixed - push_seconds) / 2.0,
        "head_group_seconds": group[0] if group else 0.0,
    }


def fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients >= 0 with the least relative errors. Columns that would get a negative one get 0.

    Values that are far from the first fit, as those of a pause of the machine, are left out of a second one.
    """
    matrix, target = np.asarray(columns, dtype=float), np.asarray(values, dtype=float)
    scale = np.maximum(np.abs(target), 1e-3 * max(1e-9, float(np.median(np.abs(target)))))
    found = _nonnegative(matrix / scale[:, None], target / scale)
    errors = np.abs(matrix @ found - target)
    kept = errors <= 4.0 * max(float(np.median(errors)), 1e-9)
    if matrix.shape[1] < kept.sum() < len(target):
        found = _nonnegative((matrix / scale[:, None])[kept], (target / scale)[kept])
    return [float(value) for value in found]


def _nonnegative(matrix: Any, target: Any) -> Any:
    """Least squares with coefficients >= 0: the best of all subsets of the few columns."""
    number = matrix.shape[1]
    best, least = np.zeros(number), float(np.sum(target**2))
    for size in range(1, number + 1):
        for chosen in combinations(range(number), size):
            part = matrix[:, chosen]
            solved = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.sum((part @ solved - target) ** 2))
            if np.all(solved >= 0.0) and error < least:
                best, least = np.zeros(number), error
                best[list(chosen)] = solved
    return best
