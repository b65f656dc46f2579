"""The JavaScript of the page: the linter and the type checker find nothing, and the types are those of the API."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from attachments.dashboard.page_files import PAGE
from attachments.dashboard.paths import KINDS
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from attachments.dashboard.tests.viewed_runs import viewing
from tests.test_layering import LONGEST_MODULE

TOOLS = Path(__file__).parent / "javascript"
INSTALL = "npm install --no-package-lock --ignore-scripts --prefix attachments/dashboard/tests/javascript"
LONGEST_LINE = 120

needs_npm = pytest.mark.skipif(not (TOOLS / "node_modules").exists(), reason=f"packages of npm are missing: {INSTALL}")

RESPONSES = {
    "about": "About", "rows?" + "&".join(f"{kind}=" for kind in KINDS): "News", "metrics?from=1&to=9": "Part",
    "timeline?from=1&to=9": "Part", "groups/17": "GroupRecord", "groups/18/tokens": "Tokens",
    "groups/1/tokens": "Tokens", "groups/search?text=add": "Found",
}  # fmt: skip
"""Paths of a run's API, and the type of each response."""


def run_tool(name: str, *arguments: str) -> None:
    """Run a program of the packages, and expect that it finds nothing."""
    command = [str(TOOLS / "node_modules" / ".bin" / name), *arguments]
    ended = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_modules_and_lines_are_as_short_as_in_python() -> None:
    """A tab counts as two characters."""
    for path in PAGE.glob("*.js"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= LONGEST_MODULE, path.name
        assert [line for line in lines if len(line.expandtabs(2)) > LONGEST_LINE] == [], path.name


@needs_npm
def test_the_linter_finds_nothing() -> None:
    """Its rules limit functions to 80 lines too."""
    run_tool("biome", "lint", "--config-path=.", "--error-on-warnings", *map(str, PAGE.glob("*.js")))


@needs_npm
def test_the_type_checker_finds_nothing() -> None:
    """In the modules of the page."""
    run_tool("tsc", "--project", ".")


@needs_npm
async def test_the_types_of_responses_are_those_of_the_api(tmp_path: Path) -> None:
    """The type checker refuses a response with a key more or less, or with a value of another type."""
    run = write_run(tmp_path / "run", RunShape(groups=36, steps=4, token_steps=2))
    (run / ".lock").write_text("1")
    async with viewing(run) as viewed:
        answers = [(kind, await viewed.get(path)) for path, kind in RESPONSES.items()]
        answers.append(("Runs", (await viewed.http.get("/dashboard/api/runs")).json()))
    text = "".join(f"const sample{n}: {kind} = {json.dumps(found)};\n" for n, (kind, found) in enumerate(answers))
    (tmp_path / "samples.ts").write_text(
        f"{text}export {{ {', '.join(f'sample{n}' for n in range(len(answers)))} }};\n"
    )
    settings = {
        "extends": str(TOOLS / "tsconfig.json"),
        "include": [],
        "files": ["samples.ts", str(TOOLS / "page.d.ts")],
    }
    (tmp_path / "tsconfig.json").write_text(json.dumps(settings))
    run_tool("tsc", "--project", str(tmp_path))
