"""Records of a dataset: JSON, JSON lines, CSV, Parquet and Arrow files, directories, and the Hugging Face hub."""

from __future__ import annotations

import csv
import importlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from protocols.errors import DatasetError, visible

MAX_BYTES = 4 * 2**30
"""Size of a file, and of the decoded contents of a compressed one."""

MAX_LINE_BYTES = 32 * 2**20
MAX_CSV_FIELD_CHARACTERS = 2**20

DELIMITERS: Mapping[str, str] = MappingProxyType({".csv": ",", ".tsv": "\t"})
COLUMNAR = (".parquet", ".arrow", ".feather")
SUFFIXES = (".jsonl", ".json", ".ndjson", *DELIMITERS, *COLUMNAR)

INSTALL = "pip install datasets"
"""The command that installs both libraries; pyarrow is a dependency of datasets."""

Records = Iterator[tuple[str, Any]]
"""Place of each record, for error messages, and the record or the DatasetError of a line that is not valid JSON."""


class Source(Struct, frozen=True, kw_only=True):
    """Where records are read from.

    path: a file, a directory, or the name of a dataset on the hub. subset: configuration of a dataset of the hub.
    split: part of a directory or of a dataset of the hub; a file has no splits.
    """

    path: str
    subset: str = ""
    split: str = ""


def read_records(source: Source) -> Records:
    """Yield the records of a dataset in their order.

    A file is read by its suffix (`SUFFIXES`); without one of them, the file contains JSON lines or a JSON list. A
    directory contains one file per split, named after the split (`train.jsonl`), or was written by the library
    `datasets`. A DatasetError takes the place of a line that is not valid JSON. Raises DatasetError if the dataset is
    missing, unreadable, too large or malformed.
    """
    name = visible(source.path, 200)
    try:
        path = Path(source.path).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path, or the home of an unknown user
        raise DatasetError(f"dataset {name} cannot be read: {error}") from error
    if is_directory:
        return _from_directory(path, source)
    if not exists and is_hub_dataset(source.path):
        return _from_hub(source)
    _require_no_subset(source, path)
    return _from_file(path)


def _require_no_subset(source: Source, file: Path) -> None:
    if source.subset:
        name = visible(str(file), 200)
        raise DatasetError(f"data.subset names a configuration of a dataset on the hub, and {name} is a file")


def _from_file(path: Path) -> Records:
    suffix = path.suffix.lower()
    if suffix in COLUMNAR:
        return _columnar_records(path)
    contents = _read(path)
    if suffix in DELIMITERS:
        return _csv_records(path, contents, DELIMITERS[suffix])
    return _json_records(path, contents)


def _from_directory(path: Path, source: Source) -> Records:
    """Read one split of a directory: `SPLIT.jsonl` (or another suffix), or a dataset of the library `datasets`."""
    if not source.split:
        raise DatasetError(f"dataset {path} is a directory: name a split in data.train_split or data.heldout_split")
    for suffix in SUFFIXES:
        if (file := path / f"{source.split}{suffix}").is_file():
            _require_no_subset(source, file)
            return _from_file(file)
    library = _library("datasets", f"dataset {path} is a directory without a file {source.split}.jsonl")
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    def load() -> Any:
        if not saved:
            return library.load_dataset(str(path), name=source.subset or None, split=source.split)
        found = library.load_from_disk(str(path))
        return found[source.split] if isinstance(found, library.DatasetDict) else found

    return _dataset_records(str(path), load)


def _from_hub(source: Source) -> Records:
    name = source.path
    library = _library("datasets", f"dataset {name} is neither a file nor a directory; to read it from the hub")
    split = source.split or "train"
    return _dataset_records(name, lambda: library.load_dataset(name, name=source.subset or None, split=split))


def _library(module: str, reason: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DatasetError(f"{reason}, install the library {module}: {INSTALL}") from error


def _dataset_records(name: str, load: Callable[[], Any]) -> Records:
    """Yield the rows of a dataset of the library `datasets`, which raises arbitrary exceptions for bad input."""
    try:
        rows = load()
    except Exception as error:
        raise DatasetError(f"dataset {name} cannot be loaded: {_one_line(error)}") from error
    for number, row in enumerate(rows):
        yield f"{name}: row {number}", row


def _read(path: Path) -> bytes:
    """Return the contents of a regular file without its byte order mark."""
    with _opened(path) as file:
        return file.read(MAX_BYTES).removeprefix(b"\xef\xbb\xbf")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file of limited size. A pipe is not waited for, and a device is not read. Raises DatasetError."""
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, os.O_RDONLY | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DatasetError(f"dataset {path} is not a regular file")
            if status.st_size > MAX_BYTES:
                raise DatasetError(f"dataset {path} has {status.st_size} bytes; at most {MAX_BYTES} are permitted")
            yield file
    except FileNotFoundError as error:
        raise DatasetError(f"dataset {path} does not exist") from error
    except (OSError, ValueError) as error:  # a ValueError for a NUL in the path
        if isinstance(error, DatasetError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _one_line(error)
        raise DatasetError(f"dataset {visible(str(path), 200)} cannot be read: {reason}") from error


def _json_records(path: Path, text: bytes) -> Records:
    if text.lstrip().startswith(b"["):
        try:
            items = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"dataset {path} starts like a JSON list but is not valid: {error}") from error
        yield from ((f"{path}: item {number}", item) for number, item in enumerate(items, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(f"{path}:{number}: has {len(line)} bytes; at most {MAX_LINE_BYTES} are permitted")
        if not line.strip():
            continue
        record: Any
        try:
            record = msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            record = DatasetError(f"{path}:{number}: not valid JSON: {error}")
        yield f"{path}:{number}", record


def _csv_records(path: Path, contents: bytes, delimiter: str) -> Records:
    """Yield the rows of a CSV file; the first row names the columns. An empty field is no value."""
    try:
        text = contents.decode()
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {path} is not UTF-8 text (byte {error.start})") from error
    csv.field_size_limit(MAX_CSV_FIELD_CHARACTERS)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    try:
        for row in rows:
            if not row:
                continue
            where = f"{path}:{rows.line_num}"
            if names is None:
                names = [name.strip() for name in row]
                if len(set(names)) < len(names):
                    raise DatasetError(f"{where}: the first row names a column twice")
                continue
            if len(row) != len(names):
                raise DatasetError(f"{where}: has {len(row)} fields, and the first row names {len(names)} columns")
            yield where, {name: field for name, field in zip(names, row, strict=True) if field}
    except csv.Error as error:
        raise DatasetError(f"{path}:{rows.line_num}: not valid CSV: {_one_line(error)}") from error


def _columnar_records(path: Path) -> Records:
    """Yield the rows of a Parquet or Arrow file, batch by batch; null is no value."""
    _library("pyarrow", f"to read dataset {path}")
    number, decoded = 0, 0
    try:
        with _opened(path) as file:
            for batch in _batches(file, parquet=path.suffix.lower() == ".parquet"):
                batch.validate(full=True)  # native code does not check the offsets and indices of a damaged file
                decoded += batch.nbytes
                if decoded > MAX_BYTES:
                    raise DatasetError(f"dataset {path} has more than {MAX_BYTES} bytes when decoded")
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", {name: value for name, value in row.items() if value is not None}
                    number += 1
    except DatasetError:
        raise
    except (OSError, ValueError, ArithmeticError, NotImplementedError, LookupError, TypeError, MemoryError) as error:
        raise DatasetError(f"dataset {path} cannot be read: {_one_line(error)}") from error


def _batches(file: BinaryIO, *, parquet: bool) -> Iterator[Any]:
    """Yield the record batches of a file. An Arrow file has the file format or the stream format."""
    import pyarrow
    from pyarrow import ipc
    from pyarrow.parquet import ParquetFile

    if parquet:
        yield from ParquetFile(file).iter_batches(batch_size=1024)
        return
    try:
        reader = ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        yield from ipc.open_stream(file)
        return
    yield from (reader.get_batch(index) for index in range(reader.num_record_batches))


def _one_line(error: Exception) -> str:
    return visible(" ".join(str(error).split()) or type(error).__name__, 300)


HUB_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".txt")


def is_hub_dataset(name: str) -> bool:
    """Whether a dataset that does not exist as a file or directory can be the name of a repository, OWNER/NAME."""
    return HUB_REPOSITORY.fullmatch(name) is not None and not name.lower().endswith(FILE_SUFFIXES)
