"""What processes print: bounded on disk, the end at hand, no secret in it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from clotho.atropos import process as module
from clotho.atropos.process import Output

MISSING = "ModuleNotFoundError: No module named 'nowhere'"
TRACEBACK = b"""[transformers] something
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    import nowhere
ModuleNotFoundError: No module named 'nowhere'
"""


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """One that is open."""
    opened = Output(tmp_path / "x.log", secret="s3cret")
    opened.open()
    return opened


def test_lines_are_kept_whole_however_they_arrive(output: Output) -> None:
    """Half a line waits for its other half; the last one for the end."""
    assert output.write(b"one\ntw") == ["one"]
    assert output.write(b"o\r\nthr") == ["two"]
    output.write(b"ee")
    output.close()
    output.close()
    assert output.path.read_text() == "one\ntwo\nthree\n"
    assert output.last_words() == "three"


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (TRACEBACK, MISSING),
        (TRACEBACK + b"Help: install it\n", f"{MISSING} Help: install it"),
        (b"all is well\n-----\n\n", "all is well"),
        (b"\x1b[31mred\x07\n", "\xb7[31mred\xb7"),
        (b"x" * 500 + b"\n", "x" * 197 + "..."),
        (b"", ""),
    ],
)  # fmt: skip
def test_the_last_words_are_one_line_that_says_something(output: Output, printed: bytes, words: str) -> None:
    """An error with what follows it, else the last line; nothing that moves a cursor."""
    output.write(printed)
    assert output.last_words() == words


def test_the_file_does_not_grow_without_bound(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old file is kept, and nothing is lost between the two."""
    monkeypatch.setattr(module, "FILE_BYTES", 100)
    for number in range(100):
        output.write(f"line {number}\n".encode())
    output.close()
    old, new = output.path.with_name("x.log.1"), output.path
    assert sorted(path.name for path in output.path.parent.iterdir()) == ["x.log", "x.log.1"]
    assert max(old.stat().st_size, new.stat().st_size) <= 100
    kept = (old.read_text() + new.read_text()).splitlines()
    assert kept == [f"line {number}" for number in range(100)][-len(kept) :]


def test_a_line_without_an_end_does_not_grow_without_bound(output: Output) -> None:
    """It is broken."""
    lines = [line for _ in range(5) for line in output.write(b"x" * module.LINE_BYTES)]
    assert [len(line) for line in lines] == [module.LINE_BYTES] * 4


def test_only_the_owner_reads_it_and_secrets_are_masked(output: Output) -> None:
    """Settings are printed by others at their start."""
    output.write(b"api_key='s3cret:arithmetic'\n")
    output.close()
    assert output.path.read_text() == "api_key='********:arithmetic'\n"
    assert stat.S_IMODE(output.path.stat().st_mode) == 0o600


def test_a_new_life_begins_without_the_last_words_of_the_old_one(output: Output) -> None:
    """The file goes on."""
    output.write(b"ImportError: x\n")
    output.open()
    assert output.last_words() == ""
    output.write(b"fine\n")
    output.close()
    assert output.path.read_text() == "ImportError: x\nfine\n"
