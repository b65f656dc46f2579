"""Every shell command of README.md and docs/ works as written.

A page's commands run in order in one directory that contains links to the checkout. Blocks of Python and TOML whose
first line is a file name (`# name.py`) are written to that directory first. `pip install` is left out, because the
package is installed already; a page whose commands need an extra is skipped without that extra. The program is
`clotho` or `python pipeline.py`; a run of the profile local-m3 reads the first problems of its dataset. The program,
the scripts of a page and mlx-lm run in this process, which has loaded the modules, except in README.md and beside other
shell commands than `cp` and `cat`. HTML comments above a block control it:

    not executed: REASON            flags and profile are checked, nothing runs
    executed with: FLAGS            the flags are added to every command of the program
    executed during the run above   the block above runs in the background while this block runs
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, Block, blocks
from tests.e2e.pipeline_process import FEW_PROBLEMS
from training_run.__main__ import main
from training_run.profile.command_profiles import evaluation_help, load_evaluation, load_serving, serve_help
from training_run.profile.flags import parse_arguments
from training_run.profile.load import load_profile

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
COMMANDS = {page: [block for block in blocks(page) if block.language == "shell"] for page in PAGES}
SKIPPED = "not executed: "
ADDED = "executed with: "
DURING = "executed during the run above"
LANGUAGES = {"shell", "python", "toml", "json", "text"}
NOT_LINKED = {"runs", ".git", ".atropos", ".contenders", ".venv"}
INSTALLATION = re.compile(r"^pip install[^\n&]*(?:&& )?", re.MULTILINE)
BIN = ".bin"
EXTRA = re.compile(r"pip install -e '\.\[([\w-]+)\]'")
PARSED = {
    "view": "attachments.dashboard.view",
    "harness": "attachments.harness.command",
    **{name: f"attachments.files.{name}" for name in ("show", "convert", "merge", "push")},
}
"""Commands with a parser of their own, and their modules."""

PROGRAM = r"(?:python pipeline\.py|clotho)"
PLAIN = re.compile(rf"(?:{PROGRAM} |python (?:\w+\.py|-m mlx_lm ))(?:[^'|&;<>$`~*]|'[^']*')*")
"""A command that needs no shell, but for quotes."""

FILES = re.compile(r"cp [^|&;<>$`~*\n]*|cat > \S+ <<'END'\n.*?\nEND$", re.DOTALL | re.MULTILINE)
"""A shell command that writes a file."""

SERVE = re.compile(rf"^{PROGRAM} serve\b(?!.*--help)", re.MULTILINE)
COMMAND = re.compile(rf"^{PROGRAM}\b[^\n&|#]*", re.MULTILINE)
INSTALLED = '#!/bin/sh\nexec python -m training_run "$@"\n'
"""The command that the installation puts on the path, with the test's interpreter and checkout."""


def extras_of(page: Path) -> list[pytest.MarkDecorator]:
    """Return a mark for every extra that a page installs for its commands."""
    executed = [block.text for block in COMMANDS[page] if not block.comment.startswith(SKIPPED)]
    return [pytest.mark.needs_extra(extra) for text in executed for extra in EXTRA.findall(text)]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=extras_of(page), id=page.stem) for page in PAGES if COMMANDS[page]]
)
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block ends with exit status 0."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_LINKED:
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / BIN).mkdir()
    (tmp_path / BIN / "clotho").write_text(INSTALLED, encoding="utf-8")
    (tmp_path / BIN / "clotho").chmod(0o755)
    for block in blocks(page):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text, encoding="utf-8")
    port = free_port()
    commands = COMMANDS[page]
    use_modules_of(page, tmp_path, monkeypatch)
    for block, following in zip(commands, [*commands[1:], None], strict=True):
        if block.comment.startswith(SKIPPED) or block.comment == DURING:
            continue
        if following is not None and following.comment == DURING:
            run_beside(block, following, tmp_path, port, page)
        else:
            text = script(block, port, page)
            assert not SERVE.search(text), "a server ends only beside a block that is executed during the run above"
            commands_here = FILES.sub("", text).strip()
            if page.stem != "README" and all(map(PLAIN.fullmatch, commands_here.splitlines())):
                if files := "\n".join(FILES.findall(text)):
                    run(files, tmp_path)
                run_here(commands_here, tmp_path, monkeypatch)
            else:
                run(text, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_executed_have_a_reason_and_valid_flags(page: Path) -> None:
    """Only commands of the program are checked; the model and the dataset need not exist."""
    for block in COMMANDS[page]:
        if block.comment.startswith(SKIPPED):
            assert len(block.comment) > len(SKIPPED)
            for command in COMMAND.findall(block.text.replace("\\\n", " ")):
                words = shlex.split(re.sub(f"^{PROGRAM}", "", command))
                if words[:1] == ["serve"]:
                    assert serve_help(words[1:]) or load_serving(words[1:])
                    continue
                if words[:1] == ["eval"]:
                    assert evaluation_help(words[1:]) or load_evaluation(words[1:])
                    continue
                if words[0] in PARSED:
                    import_module(PARSED[words[0]]).parser().parse_args(words[1:])
                    continue
                arguments = parse_arguments(words[1:] if words[:1] == ["doctor"] else words)
                if not arguments.help:
                    load_profile(arguments.profile, arguments.overrides)


@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=lambda page: page.stem)
def test_every_block_of_a_page_with_commands_has_a_language(page: Path) -> None:
    """A block of commands with another language, or without one, would not be executed."""
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= LANGUAGES


def use_modules_of(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the modules of a page from its directory, although another page can have a module of the same name."""
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", environment(directory)["PYTHONPATH"])
    for block in blocks(page):
        if block.file_name.endswith(".py"):
            monkeypatch.delitem(sys.modules, Path(block.file_name).stem, raising=False)


def script(block: Block, port: int, page: Path) -> str:
    """The block as a script; the server listens on `port` instead of 8000."""
    added = block.comment.removeprefix(ADDED) if block.comment.startswith(ADDED) else ""
    text = re.sub(r"\\\n\s*", "", INSTALLATION.sub("", block.text)).replace("127.0.0.1:8000", f"127.0.0.1:{port}")

    def with_flags(match: re.Match[str]) -> str:
        return f"{match[0].rstrip()} {added} {server_flag(match[0], port)} {problem_flags(match[0], page)} "

    return COMMAND.sub(with_flags, text)


def server_flag(command: str, port: int) -> str:
    """The flag that sets the port, if the command starts a server: a run, also in its short form, or `serve`."""
    other = re.match(rf"{PROGRAM} (?!(serve|train)\b)[a-z]", command)
    return "" if other or "--help" in command or "--server." in command else f"--server.port {port}"


def problem_flags(command: str, page: Path) -> str:
    """The flags that shorten the dataset of the profile local-m3, if the command uses it.

    It does too with a profile of the page that extends local-m3 and names no dataset.
    """
    uses = re.match(rf"{PROGRAM} (?:sample )?--profile (\S+)(?! .*--data)", command)
    plain = [
        block.file_name
        for block in blocks(page)
        if 'extends = "local-m3"' in block.text and not re.search("^train =", block.text, re.MULTILINE)
    ]
    return shlex.join(FEW_PROBLEMS) if uses and uses[1] in ("local-m3", *plain) else ""


def environment(directory: Path) -> dict[str, str]:
    """The test's interpreter is the first `python` of the path, and hub downloads fail at once."""
    return os.environ | {
        "PATH": f"{directory / BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
    }


def run(text: str, directory: Path) -> None:
    """Run a script and show its output if it fails."""
    command = ["bash", "-euo", "pipefail", "-c", text]
    result = subprocess.run(command, cwd=directory, env=environment(directory), capture_output=True, text=True)
    assert result.returncode == 0, f"{text}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def run_here(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands of Python in this process."""
    for line in text.strip().splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "clotho":
            words[:1] = ["python", "pipeline.py"]
        _, program, *arguments = words
        with contextlib.chdir(directory):
            if program == "pipeline.py":
                assert main(arguments) == 0, line
            elif program == "-m":
                monkeypatch.setattr(sys, "argv", arguments)
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                monkeypatch.setattr(sys, "argv", [program, *arguments])
                runpy.run_path(program, run_name="__main__")


def run_beside(block: Block, during: Block, directory: Path, port: int, page: Path) -> None:
    """Run a block while the run of another block serves, then stop that run."""
    command = ["bash", "-euo", "pipefail", "-c", f"exec {script(block, port, page).strip()}"]
    log = (directory / "background.txt").open("w+", encoding="utf-8")
    background = subprocess.Popen(
        command, cwd=directory, env=environment(directory), stdout=log, stderr=subprocess.STDOUT
    )
    try:
        while not is_ready(port):
            assert background.poll() is None, Path(log.name).read_text(encoding="utf-8")[-3000:]
            time.sleep(0.05)
        run(script(during, port, page), directory)
    finally:
        background.send_signal(signal.SIGINT)
        background.wait()
        log.close()


def is_ready(port: int) -> bool:
    """Whether a server on loopback has loaded its model."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
