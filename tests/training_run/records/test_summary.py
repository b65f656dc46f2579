"""Summary of a run, and table of the memory estimate."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from protocols.accounting import Balance
from protocols.compute import ComputeTotals
from protocols.finding import CHECK, Finding
from protocols.summary import HistoryGap, MemoryEstimate, MemoryPart, RunSummary
from tests.training_run.records.display_examples import GAUGES, MEASURES, evaluation, ungraded_evaluation
from training_run.records.summary import (
    command_lines,
    figure_lines,
    print_estimate,
    print_summary,
    result_lines,
    resume_command,
)

SMALL = msgspec.convert(
    {name: 2**20 for name in MemoryEstimate.__struct_fields__ if name not in ("shipped_shape", "quantized")},
    MemoryEstimate,
)
PARTS = [
    MemoryPart(component="logits", bytes=2**20, change="learner.micro_batch_tokens"),
    MemoryPart(component="base weights", bytes=2**30, change="model.path"),
]


def printed(estimate: MemoryEstimate) -> str:
    """Return the printed table."""
    console = Console(file=io.StringIO(), width=120)
    print_estimate(console, estimate, PARTS, 2**34, "this machine has 16.0 GiB")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_largest_part_is_first() -> None:
    """The total is next to the memory limit."""
    text = printed(SMALL)
    assert text.index("base weights") < text.index("logits")
    assert all(words in text for words in ("1 GiB", "model.path", "of 16 GiB: this machine has"))


@pytest.mark.parametrize("shipped", [False, True])
def test_an_estimate_from_a_shipped_configuration_is_marked(shipped: bool) -> None:
    """No file of the model was read."""
    text = printed(msgspec.structs.replace(SMALL, shipped_shape=shipped))
    assert ("configuration that ships with the project" in text) == shipped


def summary(*, measured: bool = True) -> RunSummary:
    """Return the summary of a finished run."""
    return RunSummary(
        steps=100,
        planned_steps=100,
        version=98,
        before=evaluation(0, 0.43) if measured else None,
        after=evaluation(100, 0.96, final=True) if measured else None,
        balance=Balance(prompted=800, trained=612, by_reason={"stale": 8, "zero_variance": 180}, carried_over=0),
        gauges=GAUGES,
        training_seconds=100.0,
        computing=ComputeTotals(decode=50.0, update=40.0, other=2.0, overlap=30.0, processor=90.0),
        cores=2,
        evaluation_seconds=8.0,
        other_evaluation_seconds=4.0,
        total_seconds=125.0,
        base_model="/models/my base",
        adapter="runs/local-m3/adapters",
        resume_command="clotho --profile runs/local-m3/profile.toml --resume",
        run_dir="runs/local m3",
        profile="runs/local m3/profile.toml",
        files=("adapters/", "metrics.jsonl"),
    )


def summary_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """Return label and text of all lines."""
    lines = (*result_lines(summary), *command_lines(summary), *figure_lines(summary))
    return [(line.label, line.text) for line in lines]


def summarized(summary: RunSummary, *, width: int = 80, encoding: str = "utf-8") -> str:
    """Return the printed summary."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    print_summary(Console(file=screen, width=width, force_terminal=True, color_system=None), summary)
    assert isinstance(screen.buffer, io.BytesIO)
    return screen.buffer.getvalue().decode(encoding)


def test_the_summary_says_how_mlx_lm_loads_the_adapter_of_a_gguf_file() -> None:
    """mlx-lm reads models from directories only, so that the file is converted first."""
    shown = summarized(msgspec.structs.replace(summary(), base_model="/models/my base.gguf"))
    assert "clotho convert '/models/my base.gguf' base --to mlx" in shown
    assert "mlx_lm.chat --model base --adapter-path" in shown


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_summary_has_accuracy_groups_timings_and_commands(encoding: str) -> None:
    """Prose is wrapped at words. Commands and the balance of the groups are not, to be copied or searched."""
    text = summarized(summary(), width=60, encoding=encoding)
    commands = [line.text for line in command_lines(summary())]
    lines = text.splitlines()
    assert all(any(line.endswith(command) for line in lines) for command in commands)
    assert str(summary().balance) in text
    assert all(len(line) <= 60 or line.endswith((*commands, str(summary().balance))) for line in lines)
    text = " ".join(text.split())
    for expected in (
        "prompted 800 = trained 612 + discarded 188 + carried over 0",
        "stale 8, zero_variance 180",
        "total 2:05: training 1:40, evaluation 0:08 beside it, evaluation before and after 0:04",
        "0.90 of 2 cores in the training; decoding 50 % of the time, updates 40 %, other work 2 %, two at once 30 %, "
        "none 38 %",
        "123k tokens; per second: 988 over the run with its evaluations, 2000 while decoding alone, 1100 during "
        "updates in 52 % of the time",
        "9, median 0.5 ms, longest 2 ms",
        "mlx_lm.chat --model '/models/my base' --adapter-path runs/local-m3/adapters",
    ):
        assert expected in text
    rows = [line.split() for line in lines if " % " in line]
    assert any("43.0" in row and "96.0" in row and "+53.0" in row for row in rows)
    assert any("word" in row and "+0.0" in row for row in rows)


def test_the_table_has_every_measure_and_shows_missing_values_as_missing() -> None:
    """Shares change in percentage points, other values by their difference."""
    after = msgspec.structs.replace(evaluation(100, 0.96, final=True), **MEASURES)
    before = msgspec.structs.replace(ungraded_evaluation(0), truncated=0.5)
    text = summarized(msgspec.structs.replace(summary(), before=before, after=after))
    rows = [[cell.strip() for cell in line.strip("│|").replace("|", "│").split("│")] for line in text.splitlines()]
    for row in (
        ["all", "-", "96.0 %", "-"], ["reward", "-", "0.750", "-"], ["reward format", "-", "1.000", "-"],
        ["loss", "-", "0.500", "-"], ["avg@4", "-", "50.0 %", "-"], ["pass@4", "-", "75.0 %", "-"],
        ["length", "-", "21.5", "-"], ["truncated", "50.0 %", "25.0 %", "-25.0"],
    ):  # fmt: skip
        assert row in rows
    lines = dict(summary_lines(msgspec.structs.replace(summary(), before=before, after=ungraded_evaluation(100))))
    assert lines["learned"].startswith("unknown")
    assert (lines["ungraded"].split()[0], "3" in lines["failed"].split()) == ("500", True)


def test_a_run_without_evaluations_has_no_table() -> None:
    """The other lines are unchanged."""
    text = summarized(summary(measured=False))
    assert "held-out" not in text
    assert "prompted 800" in text


def test_an_unfinished_run_shows_the_command_that_continues_it() -> None:
    """With the step that it reached."""
    drained = msgspec.structs.replace(summary(), steps=40)
    assert "after step 40 of 100" in summarized(drained)
    assert dict(summary_lines(drained))["continue it"] == drained.resume_command
    assert "--resume" not in summarized(summary())
    assert resume_command(Path("/runs/my run/profile.toml")) == (
        "clotho --profile '/runs/my run/profile.toml' --resume"
    )


def test_the_summary_counts_the_records_that_the_histories_have() -> None:
    """The balance counts all groups that ended. If a history lacks records, the summary has its own count beside it."""
    gaps = (
        HistoryGap(file="metrics.jsonl", unit="steps", missing=1),
        HistoryGap(file="rollouts.jsonl", unit="groups", missing=3),
        HistoryGap(file="evaluations.jsonl", unit="evaluations", missing=2),
    )
    lines = summary_lines(msgspec.structs.replace(summary(), history_gaps=gaps))
    assert [text for label, text in lines if label == "records"] == [
        "metrics.jsonl has 99 of these 100 steps",
        "rollouts.jsonl has 797 of these 800 groups",
        "evaluations.jsonl lacks 2 evaluations",
    ]
    assert "records" not in dict(summary_lines(summary()))


def test_the_summary_names_files_and_next_commands() -> None:
    """The commands evaluate, serve, convert and show the run, and can be copied."""
    lines = dict(summary_lines(summary()))
    assert lines["files"] == "adapters/, metrics.jsonl in runs/local m3"
    commands = [lines[label] for label in ("look at it", "evaluate it", "serve it", "export it")]
    words = [shlex.split(command) for command in commands]
    assert [found[1] for found in words] == ["view", "eval", "serve", "convert"]
    assert [word for found in words for word in found if word.startswith("runs/local m3")] == [
        "runs/local m3",
        "runs/local m3/profile.toml",
        "runs/local m3",
        "runs/local m3.gguf",
    ]


def test_weights_that_were_trained_in_full_are_named_as_a_model() -> None:
    """No command of the summary reads them as an adapter of Clotho, because `eval` and `serve` refuse that."""
    full = dict(summary_lines(msgspec.structs.replace(summary(), is_adapter=False)))
    assert full["weights"] == summary().adapter
    assert "adapter" not in full
    export, *later = (shlex.split(full[label]) for label in ("export it", "evaluate it", "serve it"))
    saved = export[export.index("--save-path") + 1]
    assert export[export.index("--adapter-path") + 1] == summary().adapter
    assert [(words[1], words[words.index("--model") + 1]) for words in later] == [("eval", saved), ("serve", saved)]
    assert all("--adapter" not in words for words in later)


def test_the_summary_says_what_was_learned() -> None:
    """Accuracy before and after with its intervals, and the groups that had no signal."""
    before, after = evaluation(0, 0.43), evaluation(100, 0.96, final=True)
    apart = msgspec.structs.replace(
        summary(),
        before=msgspec.structs.replace(before, interval=(0.39, 0.47)),
        after=msgspec.structs.replace(after, interval=(0.94, 0.97)),
    )
    lines = dict(summary_lines(apart))
    assert all(words in lines["learned"] for words in ("43.0 % (from 39.0 % to 47.0 %)", "96.0 %", "do not overlap"))
    assert lines["no signal"] == "180 of 800 groups had equal rewards and therefore no training signal"
    assert lines["learned"].startswith("the held-out accuracy rose")
    fallen = msgspec.structs.replace(apart, before=apart.after, after=apart.before)
    assert dict(summary_lines(fallen))["learned"].startswith("the held-out accuracy fell")
    assert "can be chance" in dict(summary_lines(summary()))["learned"]
    assert dict(summary_lines(summary(measured=False)))["learned"].startswith("unknown")


def test_the_summary_of_a_run_that_learned_nothing_names_its_findings_and_the_check() -> None:
    """The findings at the end have their consequence and their remedy."""
    finding = Finding(name="no_reward", severity="error", fact="f", consequence="c", advice="a", remedy=CHECK)
    finding = msgspec.structs.replace(finding, command="clotho doctor --profile p.toml")
    untrained = msgspec.structs.replace(summary(), version=0, findings=(finding,))
    lines = dict(summary_lines(untrained))
    assert untrained.is_untrained
    assert lines["learned"].startswith("nothing")
    assert lines["error"] == "f; c; a"
    assert lines["then check"] == "clotho doctor --profile p.toml"
    assert shlex.split(lines["find out"])[1] == "doctor"
    assert not {"evaluate it", "serve it", "export it"} & lines.keys()
