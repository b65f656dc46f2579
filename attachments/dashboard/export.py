"""The export: one HTML file that contains the page, its scripts, and the data of runs.

The file needs no server and no network. Modules become `data:` addresses in an import map, under names that replace
their relative specifiers. A policy in the file permits these, the inline scripts by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attachments.dashboard.histories import decoded
from attachments.dashboard.overview import about, state
from attachments.dashboard.page_files import INDEX, page_names, page_text
from attachments.dashboard.paths import API
from attachments.dashboard.run_files import RunFiles
from clotho.storage.atomic_files import replace_file
from protocols.errors import RunDirectoryError
from training_run.directory.jsonl import encode

DEFAULT_MEGABYTES = 20

FILES = re.compile(r'<link rel="stylesheet".*</script>', re.DOTALL)
"""The elements of the page that load its files."""

LIBRARY = "vendor/uPlot.iife.min.js"
SPECIFIER = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])\./([\w./-]+)\2""")
"""The specifier of a static import. Modules of the page import each other by relative names."""

PREFIX = "dashboard/"
"""Begins the names of modules in the import map."""

EXTREMES = 5
"""Number of best and of worst groups of each type that are included first."""


def export(runs: Sequence[Path], path: Path, *, limit_bytes: int) -> list[tuple[int, int]]:
    """Write the file atomically, and return the numbers of included and of all groups of each run.

    limit_bytes: limit of the records and token values of groups, in all runs together. Each run has an equal part.
    """
    listed, counts = list[dict[str, Any]](), list[tuple[int, int]]()
    responses = dict[str, bytes]()
    for number, directory in enumerate(runs):
        files = RunFiles(directory)
        for history in files.histories.values():
            history.read_all()
        groups = dict(chosen_groups(files, number, limit_bytes // len(runs)))
        responses |= run_responses(files, number) | groups
        included = sum(not address.endswith("/tokens") for address in groups)
        counts.append((included, files.groups.end))
        listed.append(
            {
                "id": str(number),
                "name": directory.resolve().name,
                "path": directory.name,
                "live": False,
                "included_groups": included,
                "total_groups": counts[-1][1],
            }
        )
    data = encode({"runs": listed, "responses": {}})
    body = b",".join(encode(address) + b":" + response for address, response in responses.items())
    data = data.removesuffix(b"{}}") + b"{" + body + b"}}"
    replace_file(path, [html(data).encode()])
    return counts


def run_responses(files: RunFiles, number: int) -> dict[str, bytes]:
    """Return the responses of a run's API by address, without groups. Paths lose the user's home directory."""
    rows = {kind: history.after("") for kind, history in files.histories.items()}
    settings = without_home(about(files))
    return {
        f"{API}/{number}/rows": encode({"state": without_home(state(files, is_live=False)), **rows}),
        f"{API}/{number}/about": encode(settings),
    }


def without_home(value: Any, home: str = "") -> Any:
    """Return a value whose texts have `~` for the user's home directory."""
    home = home or str(Path.home())
    if isinstance(value, dict):
        return {key: without_home(item, home) for key, item in value.items()}
    if isinstance(value, list):
        return [without_home(item, home) for item in value]
    return value.replace(home, "~") if isinstance(value, str) and home != "/" else value


def chosen_groups(files: RunFiles, number: int, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the responses for groups and their token values, by address, within a limit on their size.

    The best and the worst groups of each type come first, then the newest.
    """
    prefix = f"{API}/{number}/groups"
    for group_id in ordered_groups(files):
        line = files.groups.record(group_id)
        record = None if line is None else decoded(line)
        if line is None or record is None:
            continue
        try:
            tokens = files.tokens(record)
        except RunDirectoryError as error:
            tokens = {"completions": [], "reason": without_home(str(error))}
        responses = [(f"{prefix}/{group_id}", line), (f"{prefix}/{group_id}/tokens", encode(tokens))]
        limit_bytes -= sum(len(response) for _, response in responses)
        if limit_bytes < 0:
            return
        yield from responses


def ordered_groups(files: RunFiles) -> list[int]:
    """Return the ids of all groups, the most important ones first."""
    ids, rewards = files.groups.column("group_id"), files.groups.column("reward_mean")
    by_type = dict[str, list[tuple[float, int]]]()
    for kind, reward, group_id in zip(files.groups.column("type"), rewards, ids, strict=True):
        if reward is not None:
            by_type.setdefault(kind, []).append((reward, group_id))
    extremes = list[int]()
    for scored in by_type.values():
        ranked = [group_id for _, group_id in sorted(scored)]
        extremes += [*ranked[:EXTREMES], *ranked[-EXTREMES:]]
    return list(dict.fromkeys([*extremes, *reversed(ids)]))


def html(data: bytes) -> str:
    """Return the page with everything inline. data: the JSON of the export."""
    style, modules = page_text("style.css"), [name for name in page_names() if name.endswith(".js") and name != LIBRARY]
    imports = encode({"imports": {PREFIX + name: data_address(name) for name in sorted(modules)}}).decode()
    start = f'import "{PREFIX}app.js";'
    scripts = {"text/javascript": page_text(LIBRARY), "importmap": imports, "module": start}
    policy = (
        f"default-src 'none'; script-src {' '.join(map(source_hash, scripts.values()))} data:; "
        f"style-src {source_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    elements = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="referrer" content="no-referrer">',
        f"<style>{style}</style>",
        f'<script type="application/json" id="export">{inert(data)}</script>',
        *(f'<script type="{kind}">{text}</script>' for kind, text in scripts.items()),
    ]
    return FILES.sub(lambda _: "\n".join(elements), page_text(INDEX))


def data_address(name: str) -> str:
    """Return a module as a `data:` address; its imports have the names of the import map."""
    text = SPECIFIER.sub(rf"\1\2{PREFIX}\3\2", page_text(name))
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def source_hash(text: str) -> str:
    """Return the source expression of an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def inert(data: bytes) -> str:
    """Return JSON that cannot end its element, and that is valid as JavaScript too."""
    text = data.decode().replace("<", "\\u003c").replace(">", "\\u003e")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
