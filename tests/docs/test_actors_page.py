"""The examples of docs/actors.md, taken from the page and run: every mode does what the page says."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct

from actors.prompter import Prompter
from tests.e2e.pipeline_process import GroupAccounting, assert_recorded, lines, run
from training_run.supervision.custom_actors import ReplacedActor
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

PAGE = Path(__file__).parents[2] / "docs" / "actors.md"
EXAMPLE = re.compile(r"```python\n# (\w+)\.py\n(.*?)```\s+```toml\n(.*?)```", re.DOTALL)
STEPS, BATCH = 3, 4


class Ran(Struct, frozen=True, kw_only=True):
    """A short run with all four examples. stanzas: by mode."""

    directory: Path
    accounting: GroupAccounting
    groups: list[dict[str, Any]]
    stanzas: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Write the modules and the stanzas as the page has them, and run the main job."""
    directory = tmp_path_factory.mktemp("examples")
    stanzas: dict[str, dict[str, Any]] = {}
    text = 'extends = "local-m3"\n'
    for module, code, stanza in EXAMPLE.findall(PAGE.read_text(encoding="utf-8")):
        (directory / f"{module}.py").write_text(code)
        stanza = re.sub(r'file = "', f'file = "{directory}/', stanza)
        [table] = tomllib.loads(stanza)["actors"]
        stanzas[table["mode"]] = table
        text += "\n" + stanza
    (directory / "examples.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        for stanza in stanzas.values():
            patch.delitem(sys.modules, stanza["factory"].partition(":")[0], raising=False)
        result = run(directory / "run", "--profile", str(directory / "examples.toml"), "--steps", str(STEPS))
    assert result.status == 0, result
    groups = lines(directory / "run" / "rollouts.jsonl")
    return Ran(directory=directory, accounting=result.accounting, groups=groups, stanzas=stanzas)


def test_the_page_has_an_example_of_every_mode_in_about_twenty_lines(ran: Ran) -> None:
    """A stage that needs a page of code would not be written."""
    assert sorted(ran.stanzas) == ["add", "insert", "replace", "tap"]
    for stanza in ran.stanzas.values():
        module = stanza["factory"].partition(":")[0]
        assert len((ran.directory / f"{module}.py").read_text().strip().splitlines()) <= 22


def test_the_books_balance_with_all_of_them(ran: Ran) -> None:
    """Each group ends once, those that the stage keeps back included."""
    assert (ran.accounting.prompted, ran.accounting.carried_over) == (STEPS * BATCH, 0)
    assert_recorded(ran.directory / "run", ran.accounting, steps=STEPS)


def test_the_page_changes_messages_with_msgspec() -> None:
    """`dataclasses.replace` does not accept messages."""
    page = PAGE.read_text(encoding="utf-8")
    assert "from msgspec.structs import replace" in page
    assert "import dataclasses" not in page


def test_a_variant_of_an_actor_is_a_subclass_with_the_arguments_of_the_replaced_actor() -> None:
    """The example with `services.replaced`."""
    [code] = re.findall(r"```text\n(class Patient.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"Prompter": Prompter}
    exec(code, namespace)
    queue: Queue[Any] = Queue("prompts", capacity=1)
    arguments = {
        "outbox": queue.outbox(), "make": None, "group_ids": range(3), "batch_size": 1,
        "replacements": Latest[int]("replacements"),
    }  # fmt: skip
    services = SimpleNamespace(replaced=ReplacedActor(actor_class=Prompter, arguments=arguments))
    patient = namespace["Patient"](name="patient", services=services, outbox=arguments["outbox"])
    assert isinstance(patient, Prompter)
    assert patient.name == "patient"


def test_the_replaced_scorer_gives_the_rewards(ran: Ran) -> None:
    """They are those of the example, and the group was learned from under its advantages."""
    scale = ran.stanzas["replace"]["options"]["scale"]
    trained = [group for group in ran.groups if group["outcome"] == "trained"]
    assert trained
    for completion in (completion for group in trained for completion in group["completions"]):
        assert completion["reward"] == pytest.approx(-completion["tokens"] / scale)
        assert completion["parts"] == {"brevity": completion["reward"]}


def test_the_inserted_stage_keeps_long_questions_back(ran: Ran) -> None:
    """They are discarded, with what it said of them, without having been asked; the others are not."""
    longest = ran.stanzas["insert"]["options"]["longest"]
    kept_back = [group for group in ran.groups if len(group["prompt"]) > longest]
    assert 0 < len(kept_back) < len(ran.groups)
    for group in kept_back:
        assert (group["reason"], group["detail"]) == ("invalid", f"{len(group['prompt'])} characters")
        assert group["completions"] == []
    assert all(group["reason"] != "invalid" for group in ran.groups if len(group["prompt"]) <= longest)


def test_the_tap_hears_every_report(ran: Ran) -> None:
    """A line for each step, the same as the run recorded."""
    table = [line.split(",") for line in (ran.directory / "table.csv").read_text().splitlines()]
    assert table[0] == ["step", "version", "trained", "discarded"]
    recorded = lines(ran.directory / "run" / "metrics.jsonl")
    expected = [
        [line["step"], line["policy_version"], line["groups/trained"], line["groups/discarded"]] for line in recorded
    ]
    assert [[int(cell) for cell in row] for row in table[1:]] == expected
    assert len(expected) == STEPS


def test_the_diary_has_the_base_policys_answer(ran: Ran) -> None:
    """And those of later versions, as far as there was time for them; it is not waited for."""
    diary = (ran.directory / "diary.txt").read_text()
    versions = [int(number) for number in re.findall(r"^version (\d+): ", diary, re.MULTILINE)]
    assert versions[0] == 0
    assert versions == sorted(versions)
    assert "<answer>" in diary
