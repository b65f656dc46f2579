"""Draw the charts of the documentation and write the generated tables into README.md and docs/.

python -m bench figures
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import summary
from bench.__main__ import module_of
from bench.fingerprint import ROOT
from bench.measurement import RESULTS
from bench.studies import methods

IMAGES = ROOT / "docs" / "images"
TABLES = "docs/benchmark-tables.md"
PAGES = {
    "learning": "README.md",
    "methods": "docs/numerics-internals.md",
    "rounding": "docs/numerics.md",
    "environments": "docs/atropos.md",
    "agents": "docs/agents.md",
    "turns": "docs/agents.md",
    "curriculum": "docs/datasets.md",
    "warm_up": "docs/sft.md",
    "learnability": "docs/doctor.md",
    "distillation": "docs/distillation.md",
    "soak": "docs/reliability.md",
    "remote": "docs/remote.md",
    "decode": TABLES,
    "first_token": TABLES,
    "update": TABLES,
    "sft": TABLES,
    "real": TABLES,
    "gym": TABLES,
    "proof": "docs/known-tasks.md",
    "serve": TABLES,
    "visitors": TABLES,
    "swap": TABLES,
    "save": TABLES,
    "adapters": TABLES,
    "speculation": TABLES,
    "overlap": TABLES,
    "peers": TABLES,
}
"""Page that has the table of a benchmark, between markers of its name."""

OBJECTIVES_PAGE, OBJECTIVES = "docs/numerics.md", "objectives"
REPORT = "docs/report.md"


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between the two markers `name` of a page. Raises ValueError if a marker is missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = path.read_text(encoding="utf-8")
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def illustrated(question: Any, results: Sequence[Any], page: Path) -> str:
    """The table of a benchmark, below its chart if it draws one."""
    table: str = question.table(results)
    if not hasattr(question, "draw"):
        return table
    image = IMAGES / f"{question.NAME}.svg"
    question.draw(results, image)
    return f"![{question.NAME}]({os.path.relpath(image, page.parent)})\n\n{table}"


def main(argv: Sequence[str]) -> int:
    """Regenerate every chart and table that has results. Returns 1 and names the others if some have none."""
    argparse.ArgumentParser(prog="python -m bench figures", description=__doc__).parse_args(argv)
    for name, lines in ((summary.KERNELS, summary.SAME_KERNELS), (summary.NAME, summary.ON_LINUX)):
        if beside_others := summary.table(RESULTS, lines):
            write_between(ROOT / "docs" / "benchmarks.md", name, beside_others)
            for page in ("README.md", REPORT):
                write_between(ROOT / page, name, summary.table(RESULTS, lines, headlines=True))
    if outcomes := methods.read():
        write_between(ROOT / OBJECTIVES_PAGE, OBJECTIVES, methods.objectives(outcomes))
    missing = []
    for name in PAGES:
        question = import_module(module_of(name))
        if results := question.read():
            for path in (PAGES[name], *([REPORT] if name == "learning" else ())):
                write_between(ROOT / path, name, illustrated(question, results, ROOT / path))
        else:
            missing.append(name)
    if missing:
        sys.stderr.write(f"bench: no results, unchanged: {', '.join(missing)} (run python -m bench NAME)\n")
    return 1 if missing else 0
