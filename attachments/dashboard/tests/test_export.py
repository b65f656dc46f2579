"""An exported file contains the page and the data of runs, within a limit, and no text can end its element."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attachments.dashboard.export import LIBRARY, export, source_hash
from attachments.dashboard.page_files import page_names
from attachments.dashboard.tests.synthetic_run import MARKUP, RunShape, made_groups, write_run

SHAPE = RunShape(groups=36, steps=4, token_steps=1)


class Elements(HTMLParser):
    """The scripts and styles of a page as a browser finds them, and all addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.addresses: list[str] = []
        self.policy = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a start tag says."""
        found = dict(attrs)
        self._open = tag
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]
        if tag == "script":
            self.scripts.append((found, ""))
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""

    def handle_data(self, data: str) -> None:
        """Collect the text of scripts and styles."""
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif self._open == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        """Leave the element."""
        self._open = ""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Elements, dict[str, Any]]:
    """Return the elements of the file of a run of 36 groups, and its data."""
    directory = tmp_path_factory.mktemp("export")
    run = write_run(directory / "run", SHAPE)
    assert export([run], directory / "run.html", limit_bytes=10_000_000) == [(36, 36)]
    found = Elements((directory / "run.html").read_text(encoding="utf-8"))
    data = next(text for attributes, text in found.scripts if attributes.get("id") == "export")
    return found, msgspec.json.decode(data)


def test_the_data_are_the_responses_of_the_api(exported: tuple[Elements, dict[str, Any]]) -> None:
    """By their addresses. Texts with markup are in the data, and in no element."""
    elements, data = exported
    run = "/dashboard/api/runs/0"
    assert data["runs"][0] | {"path": ""} == {
        "id": "0", "name": "run", "path": "", "live": False, "included_groups": 36, "total_groups": 36,
    }  # fmt: skip
    assert data["responses"][f"{run}/rows"]["groups"]["columns"]["group_id"] == list(range(36))
    records = msgspec.json.decode(msgspec.json.encode(list(made_groups(SHAPE))))
    assert data["responses"][f"{run}/groups/1"] == records[1]
    assert records[1]["completions"][1]["text"] == MARKUP
    assert data["responses"][f"{run}/groups/35/tokens"]["completions"]
    assert data["responses"][f"{run}/groups/1/tokens"]["reason"]
    assert data["responses"][f"{run}/rows"]["state"]["step"] == 4
    assert not [text for attributes, text in elements.scripts if "executed" in text and not attributes.get("id")]


def test_the_file_loads_nothing_and_permits_only_its_own_scripts(exported: tuple[Elements, dict[str, Any]]) -> None:
    """The policy has the hash of every script and style."""
    elements, _ = exported
    assert {address.partition(":")[0] for address in elements.addresses} <= {"data"}
    for attributes, text in elements.scripts:
        if attributes.get("type") != "application/json":
            assert source_hash(text) in elements.policy
    for text in elements.styles:
        assert source_hash(text) in elements.policy
    assert "unsafe" not in elements.policy
    assert "default-src 'none'" in elements.policy


def test_every_module_is_in_the_import_map(exported: tuple[Elements, dict[str, Any]]) -> None:
    """Modules import each other by these names."""
    elements, _ = exported
    text = next(text for attributes, text in elements.scripts if attributes.get("type") == "importmap")
    imports = msgspec.json.decode(text)["imports"]
    assert set(imports) == {f"dashboard/{name}" for name in page_names() if name.endswith(".js") and name != LIBRARY}
    for address in imports.values():
        source = base64.b64decode(address.partition(",")[2]).decode()
        used = re.findall(r"""^import .*["'](.+)["'];?$""", source, re.MULTILINE)
        assert set(used) <= set(imports)


def test_the_best_the_worst_and_the_newest_groups_are_included_first(tmp_path: Path) -> None:
    """Within the limit; the list of groups is complete."""
    run = write_run(tmp_path / "run", RunShape(groups=400, steps=4, token_steps=0))
    ((included, total),) = export([run], tmp_path / "run.html", limit_bytes=100_000)
    assert 40 < included < total == 400
    data = next(
        msgspec.json.decode(text)
        for attributes, text in Elements((tmp_path / "run.html").read_text(encoding="utf-8")).scripts
        if attributes.get("id") == "export"
    )
    prefix = "/dashboard/api/runs/0/groups/"
    ids = {int(found[1]) for address in data["responses"] if (found := re.fullmatch(prefix + r"(\d+)", address))}
    assert len(ids) == included
    columns = data["responses"]["/dashboard/api/runs/0/rows"]["groups"]["columns"]
    for kind in set(columns["type"]):
        scored = [
            (reward, group)
            for reward, group, other in zip(columns["reward_mean"], columns["group_id"], columns["type"], strict=True)
            if other == kind and reward is not None
        ]
        assert {max(scored)[1], min(scored)[1]} <= ids
    assert 399 in ids
