"""The report of `metal`: the state of a Mac, the block to paste, and README's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.machine.macos import MacState
from bench import metal, metal_report, metal_state
from bench.figures import write_between
from bench.measurement import Case, Measurement, write
from bench.metal_report import MACS, README, block, readme_table, write_report
from clotho.models.machine import memory_limit
from tests.bench.made_measurements import HERE

STATE: Case = {"macOS": "26.1", "power": "mains", "display": "off"}


def results() -> list[Measurement]:
    """Some measurements of a Mac."""
    bench = metal.Bench(metal.Clock(10.0, [1.0]), HERE)
    decode: Case = {"model": "Qwen3-0.6B", "phase": "decode", "rows": 4, "group": 8}
    update: Case = {"model": "Qwen3-0.6B", "phase": "update", "prompts": 2}
    learning: Case = {"phase": "learning", "profile": "local-m3", "step": 5}
    made: list[tuple[str, Case, str, float]] = [
        ("clotho", decode, "tokens_per_second", 500.0),
        ("mlx-lm", decode, "tokens_per_second", 250.0),
        ("clotho", update, "seconds", 4.0),
        ("clotho", learning, "accuracy", 0.75),
    ]
    return [
        *bench.machine(STATE, memory_limit()),
        *(bench._one(name, case, metal.METRICS[metric], value, "", {}) for name, case, metric, value in made),
    ]


def test_the_block_has_the_state_and_the_figures_of_each_contender() -> None:
    """Of the machine, of decode steps and updates, and of learning."""
    text = block(results())
    for part in (
        "macOS 26.1",
        "power mains",
        "Qwen3-0.6B, clotho: 4 rows 500 tokens/s, update 4 s",
        "mlx-lm: 4 rows 250",
    ):
        assert part in text
    assert "local-m3, step 5: accuracy 0.75" in text


def test_a_file_becomes_a_row_for_each_contender(tmp_path: Path) -> None:
    """A figure that was not measured stays empty; without files, the table says so."""
    file, page = tmp_path / "metal.jsonl", tmp_path / "README.md"
    page.write_text(f"before\n<!-- {MACS}:begin -->\n<!-- {MACS}:end -->\nafter\n")
    write(file, results())
    report = write_report([file], page)
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows[1:]] == ["clotho", "mlx-lm"]
    assert "500 tokens/s" in rows[1]
    assert report.endswith("```")
    assert "no Mac yet" in readme_table([])


def test_a_file_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one line, exit status 2, and an unchanged page."""
    with pytest.raises(SystemExit) as ended:
        metal.main(["--report", str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2
    assert "has no results" in capsys.readouterr().err


def test_readme_has_the_place_of_the_table(tmp_path: Path) -> None:
    """Between its markers."""
    page = tmp_path / "README.md"
    page.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    write_between(page, MACS, "a table")
    assert "a table" in page.read_text(encoding="utf-8")


def test_the_state_of_this_machine_is_known_without_a_mac() -> None:
    """Cores and wheel; nothing is asked of macOS elsewhere."""
    state = metal_state.machine_state()
    assert int(state["cores"]) >= 1
    assert "mlx wheel" in state


def test_the_state_of_a_mac_is_read_from_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores of both kinds, heat, and `unknown` for what a program does not tell."""
    texts = {
        "cores": "hw.perflevel0.physicalcpu: 4\nhw.perflevel1.physicalcpu: 6\n",
        "gpu": '    "gpu-core-count" = 10\n',
        "thermal": "\tCPU_Scheduler_Limit \t= 100\n\tCPU_Speed_Limit \t= 80\n",
    }
    monkeypatch.setattr(metal_state, "run_programs", lambda commands, limit_seconds: texts)
    found = dict(metal_state._of_mac(MacState(version="26.1", display_awake=True, wired_limit_mb=0)))
    assert found["performance and efficiency cores"] == "4 + 6"
    assert found["GPU cores"] == 10
    assert found["thermal"] == "CPU_Scheduler_Limit 100, CPU_Speed_Limit 80"
    assert (found["display"], found["power"], found["wired limit in MB"]) == ("on", "unknown", "default")


def test_columns_of_the_table_are_measured() -> None:
    """Every figure names a metric and a case of a phase."""
    planned = metal.phases(metal_report.DENSE, quick=False, gpu=True)
    for metric, where in metal_report.FIGURES.values():
        assert metric in metal.METRICS
        assert any(where.items() <= phase.case.items() for phase in planned)
