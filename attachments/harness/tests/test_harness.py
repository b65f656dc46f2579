"""`clotho harness`: another project's harness evaluates the server of this one, and all policies are side by side."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from attachments.harness.command import run, table
from attachments.harness.harnesses import HARNESSES, HarnessError, HarnessRequest, HarnessValue, Inspect, LmEval
from protocols.errors import ProfileError
from training_run.__main__ import main

EMBEDDED = Path(__file__).resolve().parents[3] / "profiles" / "embedded"
INTERPRETER = "CLOTHO_HARNESS_PYTHON"
"""Names an interpreter that has lm-eval and inspect."""

PROBLEMS = 12
LM_EVAL_TASK = """
task: embedded
dataset_path: json
dataset_kwargs: {data_files: embedded.jsonl}
test_split: train
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: 96, temperature: 0}
filter_list:
  - name: answer
    filter: [{function: regex, regex_pattern: "<answer>(.*?)</answer>"}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import pattern


@task
def embedded():
    problems = json_dataset("embedded.jsonl", FieldSpec(input="prompt", target="answer"))
    greedy = GenerateConfig(temperature=0, max_tokens=96)
    return Task(dataset=problems, scorer=pattern("<answer>(.*?)</answer>"), config=greedy)
"""
real = pytest.mark.skipif(
    INTERPRETER not in os.environ, reason=f"{INTERPRETER} names no interpreter with the harnesses"
)


def request(**fields: object) -> HarnessRequest:
    """Return a request of two tasks."""
    values = {
        "url": "http://127.0.0.1:8001/v1", "model": "policy", "directory": Path("results"), "tasks": ("one", "two"),
        "chat": False, "limit": 0, "concurrency": 4, "context": 512, "flags": (), **fields,
    }  # fmt: skip
    return HarnessRequest(**values)  # type: ignore[arg-type]


def columns(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the cells of the last row of the table that was printed."""
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    return [cell.strip() for cell in rows[-1].strip("│").split("│")]


@pytest.mark.parametrize(
    ("name", "interpreter", "flags"),
    [
        pytest.param("lm_eval", sys.executable, ("--chat", "--", "--include_path", "."), id="a program in its place"),
        pytest.param(
            "lm_eval",
            os.environ.get(INTERPRETER, ""),
            ("--chat", "--", "--include_path", "."),
            marks=[real, pytest.mark.slow],
            id="lm-eval",
        ),
        pytest.param("inspect", os.environ.get(INTERPRETER, ""), (), marks=[real, pytest.mark.slow], id="inspect"),
    ],
)
def test_a_harness_finds_the_accuracy_that_eval_finds(
    name: str,
    interpreter: str,
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the same problems, with greedy completions of the base model."""
    monkeypatch.chdir(tmp_path)
    lines = (EMBEDDED / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:PROBLEMS]
    Path("embedded.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("embedded.yaml").write_text(LM_EVAL_TASK, encoding="utf-8")
    Path("embedded.py").write_text(INSPECT_TASK, encoding="utf-8")
    if interpreter == sys.executable:
        (tmp_path / "made" / "lm_eval").mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("fake_lm_eval.py"), "made/lm_eval/__main__.py")
        (tmp_path / "made" / "lm_eval" / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'made'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = "embedded.py" if name == "inspect" else "embedded"
    status = main(["harness", name, "--tasks", tasks, "--model", str(EMBEDDED), "--python", interpreter, *flags])
    assert status == 0
    task, _, found = columns(capsys)
    assert task == "embedded"
    assert main(
        ["eval", "--profile", "local-m3", "--data.heldout", "embedded.jsonl", "--sampling.max-tokens", "96", "--json"]
    ) == 0  # fmt: skip
    expected = json.loads(capsys.readouterr().out)["policies"]["base"]["greedy"]["overall"]["value"]
    assert float(found.split(" ")[0]) == pytest.approx(expected, abs=5e-4)


def test_lm_eval_uses_the_tokenizer_of_the_server() -> None:
    """With completions it sends tokens. With --chat the server applies the template, and no tokenizer is needed."""
    command = " ".join(LmEval().command(request(limit=5, flags=("--num_fewshot", "3"))))
    assert "--model local-completions --tasks one,two" in command
    assert "base_url=http://127.0.0.1:8001/v1/completions" in command
    assert "tokenizer_backend=remote" in command
    assert command.endswith("--limit 5 --num_fewshot 3")
    chat = " ".join(LmEval().command(request(chat=True)))
    assert "--model local-chat-completions" in chat
    assert "chat/completions" in chat
    assert "tokenizer_backend" not in chat
    assert "--apply_chat_template" in chat


def test_inspect_gets_the_address_in_its_environment(tmp_path: Path) -> None:
    """It reads a task from a relative path only."""
    command = Inspect().command(request(tasks=(str(tmp_path / "my.py"), "known")))
    assert command[3:5] == [os.path.relpath(tmp_path / "my.py"), "known"]
    assert Inspect().variables(request())["CLOTHO_BASE_URL"] == "http://127.0.0.1:8001/v1"


def test_the_results_of_lm_eval_are_read_by_metric_and_filter(tmp_path: Path) -> None:
    """An error that lm-eval does not state is None."""
    metrics = {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 0.25, "em_stderr,strict": "N/A"}
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "results_1.json").write_text(json.dumps({"results": {"one": metrics}}))
    assert list(LmEval().values(tmp_path)) == [
        HarnessValue(task="one", metric="acc", value=0.5, stderr=0.1),
        HarnessValue(task="one", metric="em (strict)", value=0.25, stderr=None),
    ]


def test_a_task_of_inspect_that_failed_is_an_error(tmp_path: Path) -> None:
    """Its exit status is 0 even then."""
    (tmp_path / "log.json").write_text(json.dumps({"status": "error", "eval": {"task": "one"}}))
    with pytest.raises(HarnessError):
        list(Inspect().values(tmp_path))


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_without_results_is_an_error(name: str, tmp_path: Path) -> None:
    """So that an empty table is never shown."""
    with pytest.raises(HarnessError):
        list(HARNESSES[name].values(tmp_path))


def test_policies_are_compared_with_the_first_one() -> None:
    """A metric that a policy lacks is shown as missing."""
    shown = table(
        {
            "base": [HarnessValue(task="one", metric="acc", value=0.5, stderr=0.1)],
            "mine": [
                HarnessValue(task="one", metric="acc", value=0.75, stderr=None),
                HarnessValue(task="two", metric="acc", value=1.0, stderr=None),
            ],
        }
    )
    cells = list(zip(*(column.cells for column in shown.columns), strict=True))
    assert cells == [("one", "acc", "0.500 ± 0.100", "0.750", "+0.250"), ("two", "acc", "-", "1.000", "-")]


@pytest.mark.parametrize(
    "words",
    [
        ["lm_eval", "--tasks", "one", "--python", "/nowhere/python"],
        ["lm_eval", "--tasks", "one", "--model", str(EMBEDDED)],
        ["nonsense", "--tasks", "one"],
        ["inspect"],
    ],
    ids=["no interpreter", "harness not installed", "unknown harness", "no tasks"],
)
def test_bad_input_is_refused_before_anything_is_served(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install, or which flag is wrong."""
    monkeypatch.setattr("attachments.harness.command.anyio.run", None)
    with pytest.raises(ProfileError):
        run(words, Console(quiet=True))


def test_an_output_directory_that_exists_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of two evaluations would be mixed."""
    monkeypatch.setattr("attachments.harness.command.require_harness", lambda *_: None)
    with pytest.raises(ProfileError):
        run(["lm_eval", "--tasks", "one", "--model", str(EMBEDDED), "--output", str(tmp_path)], Console(quiet=True))
