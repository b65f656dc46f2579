"""Runs of the program with one common fault each: the run names the fault and its remedy, and ends as documented.

`attachments/doctor/tests/test_faults.py` injects the same fifteen faults into the checks alone.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from attachments.doctor.tests import templates
from attachments.machine import machine as machine_checks
from attachments.machine.machine import read_machine
from attachments.machine.tests import simulated_mac
from protocols.compute import MemoryLimit
from tests.e2e.pipeline_process import REPOSITORY, RunResult, lines, metrics, run
from tests.e2e.test_run import ABOUT_THE_MACHINE
from training_run.memory import report
from training_run.profile.load import load_profile

EMBEDDED = REPOSITORY / "profiles" / "embedded"
SMALL = (
    "--profile", "local-m3", "--steps", "2", "--eval", "off", "--server.port", "0",
    "--learner.batch-size", "4", "--sampling.group-size", "4",
)  # fmt: skip
CONSTANT = "tests.e2e.constant_rewards:"

Inject = Callable[[Path, ExitStack], tuple[str, ...]]
"""Injects a fault with files in a directory, until the stack is closed. Returns the flags of the run."""


class Fault(Struct, frozen=True, kw_only=True):
    """A fault of a run. finding: its name; empty if the run is refused, with one line on stderr.

    advice: keys or commands that correct the fault. late: found after the first update.
    """

    inject: Inject
    finding: str = ""
    advice: tuple[str, ...]
    late: bool = False


def flags(*given: str) -> Inject:
    """A fault of the settings."""
    return lambda path, stack: given


def dataset(records: Iterator[str], *more: str) -> Inject:
    """A fault of the dataset."""

    def inject(path: Path, stack: ExitStack) -> tuple[str, ...]:
        (path / "faulty.jsonl").write_text("\n".join(records))
        return ("--dataset", str(path / "faulty.jsonl"), *more)

    return inject


NO_FLAGS = flags()


def template(text: str, then: Inject = NO_FLAGS) -> Inject:
    """A fault of the chat template, with the flags of another injection."""

    def inject(path: Path, stack: ExitStack) -> tuple[str, ...]:
        (path / "template.jinja").write_text(text)
        return ("--model.chat-template", str(path / "template.jinja"), *then(path, stack))

    return inject


def wrong_end_token(path: Path, stack: ExitStack) -> tuple[str, ...]:
    """The files of the model name another end token than that of the template."""
    model = path / "model"
    shutil.copytree(EMBEDDED, model)
    for name, changes in {
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": [0]},
        "config.json": {"eos_token_id": 0},
    }.items():
        written = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(written | changes))
    return ("--model", str(model))


def machine(**state: object) -> Inject:
    """A fault of the machine, which is simulated otherwise."""

    def inject(path: Path, stack: ExitStack) -> tuple[str, ...]:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(machine_checks, "read_machine", lambda *_, **__: replace(simulated_mac.machine(), **state))
        return ()

    return inject


def display_awake(path: Path, stack: ExitStack) -> tuple[str, ...]:
    """On a simulated Mac with a GPU, a program keeps the display on."""
    texts = {"pmset -g assertions": simulated_mac.ASSERTIONS, "pmset -g batt": simulated_mac.MAINS}
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("PATH", str(simulated_mac.install(path / "bin", texts)), prepend=":")
    patch.setattr(machine_checks, "backend_name", lambda: "Metal")
    return machine(mac=read_machine(path, blas="Accelerate", system="Darwin").mac)(path, stack)


def too_little_memory(path: Path, stack: ExitStack) -> tuple[str, ...]:
    """The machine has one MiB."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(report, "memory_limit", lambda: MemoryLimit(bytes=2**20, source="installed", installed=2**20))
    return ()


def port_in_use(path: Path, stack: ExitStack) -> tuple[str, ...]:
    """Another program listens on the port."""
    other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return ("--server.port", str(other.getsockname()[1]))


def problem(number: int, **more: object) -> str:
    """One line of a dataset."""
    return json.dumps({"prompt": f"What is {number} + 1?", "answer": str(number + 1), "type": "sum"} | more)


def conversation(number: int) -> str:
    """A problem with an earlier turn."""
    earlier = {"role": "assistant", "content": "<think>easy</think><answer>2</answer>"}
    asked = [{"role": "user", "content": f"What is {n} + 1?"} for n in (1, number)]
    return problem(number, prompt=[asked[0], earlier, asked[1]])


def usual_rate() -> float:
    """The learning rate of the profile."""
    return load_profile("local-m3").learner.optimizer.highest_rate


FAULTS: dict[str, Fault] = {
    "reward always 0": Fault(
        inject=flags("--rewards", f'[{{name = "{CONSTANT}zero", correct = true}}]'),
        finding="no_reward",
        advice=("data.system",),
    ),
    "reward always 1": Fault(
        inject=flags("--rewards", f'[{{name = "{CONSTANT}one", correct = true}}]'),
        finding="always_rewarded",
        advice=("harder problems",),
    ),
    "template opens a tag": Fault(
        inject=template(templates.OPENS_THINK),
        finding="template_opens_tag",
        advice=("model.chat_template", "[[rewards]]", "format"),
    ),
    "wrong end token": Fault(
        inject=wrong_end_token,
        finding="end_token_mismatch",
        advice=("generation_config.json", "sampling.stop_token_ids"),
    ),
    "everything truncated": Fault(
        inject=flags("--sampling.max-tokens", "3"), finding="all_truncated", advice=("sampling.max_tokens", "end token")
    ),
    "dataset of one problem": Fault(
        inject=dataset(problem(1) for _ in range(50)), finding="few_problems", advice=("data.train",)
    ),
    "no reward applies": Fault(
        inject=dataset(
            (problem(i, type="sum" if i else "code") for i in range(50)),
            *("--rewards", '[{name = "math_eval", types = ["code"], correct = true}]'),
        ),
        finding="no_reward_applies",
        advice=("types", "[[rewards]]"),
    ),
    "learning rate 100 times too high": Fault(
        inject=flags("--learner.optimizer.learning-rate", f"{100 * usual_rate():g}", "--learner.schedule", "constant"),
        finding="update_too_large",
        advice=("learner.optimizer.learning_rate",),
        late=True,
    ),
    "template drops thinking": Fault(
        inject=template(templates.DROPS_THINKING, then=dataset(map(conversation, range(50)))),
        finding="template_drops_thinking",
        advice=("model.chat_template",),
    ),
    "wrong LoRA scale": Fault(
        inject=flags("--policy.method.scale", "1000"), finding="lora_scale_unusual", advice=("policy.method.scale",)
    ),
    "too little memory": Fault(inject=too_little_memory, advice=("memory", "change")),
    "swap in use": Fault(
        inject=machine(swap_bytes=3 << 30), finding="swap_in_use", advice=("close other programs", "--dry-run")
    ),
    "display awake on a Mac": Fault(
        inject=display_awake,
        finding="display_awake",
        advice=("pmset displaysleepnow", "ssh", "caffeinate -is", "learner.max_turn_ms"),
    ),
    "port in use": Fault(inject=port_in_use, advice=("--server.port",)),
    "half of the dataset unparsable": Fault(
        inject=dataset(problem(i)[: None if i % 2 else 9] for i in range(20)), advice=("10 of 20", "faulty.jsonl")
    ),
}


def run_with(inject: Inject, path: Path) -> tuple[RunResult, Path]:
    """Run the program with a fault in this process; the machine is simulated, because this one may be busy."""
    with ExitStack() as stack:
        machine()(path, stack)
        given = inject(path, stack)
        return run(path / "run", *given, small=SMALL), path / "run"


def findings(run_dir: Path) -> dict[str, str]:
    """The advice of all findings in the log, by name, in their order; without those that a busy machine causes."""
    logged = [line for line in lines(run_dir / "log.jsonl") if line["event"] == "finding"]
    return {line["finding"]: line["advice"] for line in logged if line["finding"] not in ABOUT_THE_MACHINE}


def check(fault: Fault, path: Path) -> None:
    """Run with the fault, and compare the output, the log, preflight.json and the exit status."""
    result, run_dir = run_with(fault.inject, path)
    if not fault.finding:
        assert (result.status, result.err.count("\n")) == (2, 1), result
        assert [word for word in fault.advice if word not in result.err] == []
        return
    logged, steps = findings(run_dir), metrics(run_dir)
    assert fault.finding in logged
    assert [word for word in fault.advice if word not in logged[fault.finding]] == []
    shown = " ".join(result.out.split())
    assert " ".join(logged[fault.finding].split()) in shown
    early = [line["name"] for line in json.loads((run_dir / "preflight.json").read_text())["findings"]]
    of_first_batch = [found["name"] for found in steps[0]["findings"]] if steps else []
    assert fault.late or fault.finding in (*early, *of_first_batch)
    assert result.status == (0 if any(line["update_applied"] for line in steps) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_run_with_a_fault_names_it_and_its_remedy(fault: Fault, tmp_path: Path) -> None:
    """On the screen, in log.jsonl, and at a start in preflight.json. A run that cannot work is refused with one line.

    The exit status is 2 for a refusal, 1 if no update was applied, and 0 otherwise.
    """
    check(fault, tmp_path)


@pytest.mark.slow
def test_a_healthy_run_has_no_finding_at_all(tmp_path: Path) -> None:
    """At the start and during the run."""
    result, run_dir = run_with(flags(), tmp_path)
    assert result.status == 0
    assert json.loads((run_dir / "preflight.json").read_text())["findings"] == []
    assert findings(run_dir) == {}


def test_most_faults_are_found_before_the_first_update() -> None:
    """All but the learning rate, which `doctor` finds in its rehearsal."""
    assert len(FAULTS) == 15
    assert [name for name, fault in FAULTS.items() if fault.late] == ["learning rate 100 times too high"]
