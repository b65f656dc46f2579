"""The model card of a training run: what was trained, on which data, the held-out results, and the curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from msgspec import Struct

from clotho import __version__
from protocols.evaluation import EvalReport
from training_run.adapters.formats import LABELS
from training_run.records.evaluation_history import read_evaluations
from training_run.records.held_out_rows import rows

CURVES = "curves.svg"
WIDTH, HEIGHT, MARGIN = 640, 220, 48


class RunFacts(Struct, frozen=True, kw_only=True):
    """What the card of a run is made of. settings: the resolved profile. metrics: the lines of metrics.jsonl."""

    base_model: str
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[EvalReport]


def read_run(directory: Path, settings: Mapping[str, Any], base_model: str) -> RunFacts:
    """Read the histories of a run directory; incomplete lines are skipped."""
    return RunFacts(
        base_model=base_model,
        settings=settings,
        metrics=_lines(directory / "metrics.jsonl"),
        evaluations=read_evaluations(directory / "evaluations.jsonl"),
    )


def model_card(name: str, facts: RunFacts) -> str:
    """Return the text of README.md, with the metadata that the hub reads."""
    settings, learner = facts.settings, facts.settings["learner"]
    method = settings["policy"]["method"]["type"]
    what = f"{LABELS[method]} adapter" if method in LABELS else "Weights"
    trained = facts.metrics[-1]["step"] if facts.metrics else 0
    parts = [
        card_head(
            facts.base_model,
            tags=["grpo", learner["objective"]["type"]],
            name=name,
            results=_results(facts.evaluations, Path(settings["data"]["heldout"]).name),
        ),
        f"# {name}\n\n{what} for `{facts.base_model}`, trained with reinforcement learning "
        f"(objective `{learner['objective']['type']}`) in {trained} updates with Clotho {__version__}.",
        usage(name, facts.base_model, is_adapter=method != "full"),
        f"## Held-out accuracy\n\n{_accuracy(facts.evaluations)}",
        f"## Curves\n\n![reward and held-out accuracy by update]({CURVES})",
        f"## Training\n\n{_training(settings)}",
        "`training/` contains the resolved profile and the metrics of every update.",
    ]
    return "\n\n".join(parts) + "\n"


def card_head(base_model: str, *, tags: Sequence[str] = (), name: str = "", results: Sequence[EvalResult] = ()) -> str:
    """Return the metadata block of a card. results: measures of the model `name`, which the hub lists on its page."""
    data = ModelCardData(
        base_model=base_model,
        model_name=name,
        eval_results=list(results) or None,
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "clotho", "reinforcement-learning", *dict.fromkeys(tags)],
    )
    return f"---\n{data.to_yaml()}\n---"


def usage(name: str, base_model: str, *, is_adapter: bool) -> str:
    """Return the section of a card that loads an adapter or a model with mlx-lm."""
    arguments = f'"{base_model}", adapter_path=snapshot_download("{name}")' if is_adapter else f'"{name}"'
    imports = "from huggingface_hub import snapshot_download\n" if is_adapter else ""
    code = f"{imports}from mlx_lm import generate, load\n\nmodel, tokenizer = load({arguments})"
    return f"## Use\n\n```python\n{code}\n```"


def curves(facts: RunFacts) -> str:
    """Return an SVG picture of the mean reward (left axis) and of the held-out accuracy (0 to 1) by update."""
    rewards = [(line["step"], line["reward/mean"]) for line in facts.metrics if line.get("reward/mean") is not None]
    accuracy = [(record.step, record.accuracy) for record in facts.evaluations if record.accuracy is not None]
    last = max([step for step, _ in (*rewards, *accuracy)], default=1) or 1
    low, high = min([value for _, value in rewards], default=0.0), max([value for _, value in rewards], default=1.0)
    lines = [
        _polyline(rewards, last, low, high, "#2563eb"),
        _polyline(accuracy, last, 0.0, 1.0, "#d97706"),
        _text(MARGIN, 18, "mean reward", "#2563eb"),
        _text(MARGIN + 110, 18, "held-out accuracy", "#d97706"),
        _text(4, HEIGHT - MARGIN, f"{low:.2f}", "#2563eb"),
        _text(4, MARGIN, f"{high:.2f}", "#2563eb"),
        _text(WIDTH - MARGIN + 6, HEIGHT - MARGIN, "0", "#d97706"),
        _text(WIDTH - MARGIN + 6, MARGIN, "1", "#d97706"),
        _text(WIDTH // 2 - 40, HEIGHT - 12, f"update 0 to {last}", "#555"),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(lines)}</svg>\n'


def _polyline(points: Sequence[tuple[int, float]], last: int, low: float, high: float, color: str) -> str:
    width, height, span = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN, (high - low) or 1.0
    places = " ".join(
        f"{MARGIN + width * step / last:.1f},{HEIGHT - MARGIN - height * (value - low) / span:.1f}"
        for step, value in points
    )
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>'


def _text(x: int, y: int, text: str, color: str) -> str:
    return f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="12" fill="{color}">{escape(text)}</text>'


def _accuracy(records: Sequence[EvalReport]) -> str:
    """A table of the first and the last evaluation; a sentence if there is none."""
    if not records:
        return "The run had no evaluation."
    ends = first, last = records[0], records[-1]
    table = [f"| problems | update {first.step} | update {last.step} |", "|---|---:|---:|"]
    table.append(_line(f"all ({last.problems})", [_share(record) for record in ends]))
    for kind in sorted({*first.by_type, *last.by_type}):
        shares = (record.by_type.get(kind) for record in ends)
        table.append(_line(kind, ["-" if share is None else f"{share:.1%}" for share in shares]))
    if first.ungraded or last.ungraded:
        table.append(_line("ungraded", [str(record.ungraded) for record in ends]))
    old, new = ({row.label: row.text_with_interval for row in rows(one, functions=True)} for one in ends)
    table += (_line(label, [old.get(label, "-"), new.get(label, "-")]) for label in dict.fromkeys([*old, *new]))
    note = (
        "Greedy decoding on problems that were not trained on, with intervals of 95 %. avg@k and pass@k are of "
        "completions that are sampled at the temperature of training."
    )
    return "\n".join([note, "", *table])


def _results(records: Sequence[EvalReport], dataset: str) -> list[EvalResult]:
    """Return accuracy, avg@k and pass@k of the last evaluation on held-out problems, as fractions."""
    if not records:
        return []
    last = records[-1]
    sampled = {f"pass@{k}": estimate.value for k, estimate in last.pass_at.items()}
    if last.avg is not None:
        sampled[f"avg@{last.samples}"] = last.avg.value
    measured = sampled if last.accuracy is None else {"accuracy": last.accuracy, **sampled}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name="held-out problems",
            metric_type=kind,
            metric_value=round(value, 4),
        )
        for kind, value in measured.items()
    ]


def _line(label: str, cells: Sequence[str]) -> str:
    return f"| {label.replace('|', ' ')} | {' | '.join(cells)} |"


def _share(record: EvalReport) -> str:
    if record.accuracy is None or record.interval is None:
        return "-"
    low, high = record.interval
    return f"{record.accuracy:.1%} ({low:.1%} to {high:.1%})"


def _training(settings: Mapping[str, Any]) -> str:
    learner, data = settings["learner"], settings["data"]
    rewards = ", ".join(f"{reward['name']} (weight {reward['weight']:g})" for reward in settings["rewards"])
    rows = {
        "data": Path(data["train"]).name if Path(data["train"]).is_absolute() else data["train"],
        "rewards": rewards,
        "objective": learner["objective"]["type"],
        "groups per update": learner["batch_size"],
        "completions per group": settings["sampling"]["group_size"],
        "temperature": settings["sampling"]["temperature"],
        "optimizer": learner["optimizer"]["type"],
        "learning rate": learner["optimizer"]["learning_rate"],
        "method": settings["policy"]["method"]["type"],
        "seed": settings["seed"],
    }
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _lines(path: Path) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:  # the last line of a run in progress
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            found.append(value)
    return found
