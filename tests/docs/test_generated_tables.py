"""Generated parts of the pages are up to date."""

from __future__ import annotations

import sys

import pytest

from tests.docs import (
    command_reference,
    configuration_reference,
    memory_reference,
    message_reference,
    migration_reference,
    model_reference,
    name_reference,
)
from tests.docs.pages import between


def test_the_message_reference_is_up_to_date() -> None:
    """Regenerate it with `python -m tests.docs.message_reference`."""
    assert between(message_reference.PAGE, "messages") == message_reference.reference()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="argparse wraps its texts differently")
def test_the_help_texts_of_the_commands_are_up_to_date() -> None:
    """Regenerate them with `python -m tests.docs.command_reference`."""
    assert between(command_reference.PAGE, "commands") == command_reference.reference()


def test_the_table_of_names_is_up_to_date() -> None:
    """Regenerate it with `python -m tests.docs.name_reference`."""
    assert between(name_reference.PAGE, "names") == name_reference.table()


def test_the_tables_of_earlier_systems_are_up_to_date() -> None:
    """Regenerate them with `python -m tests.docs.migration_reference`."""
    assert between(migration_reference.PAGE, "systems") == migration_reference.tables()
    assert between(migration_reference.PAGE, "lines") == migration_reference.command_lines()
    assert between(migration_reference.COMING, "lines") == migration_reference.command_lines("mlx_lm")
    assert between(migration_reference.COMING, "keys") == migration_reference.tables(["mlx_lm"])


def test_the_table_of_architectures_is_up_to_date() -> None:
    """Regenerate it with `python -m tests.docs.model_reference`."""
    assert between(model_reference.PAGE, "models") == model_reference.table()


def test_the_configuration_page_is_up_to_date() -> None:
    """Regenerate it with `python -m tests.docs.configuration_reference`."""
    page = configuration_reference.PAGE.read_text(encoding="utf-8")
    assert page == configuration_reference.configuration_page()


def test_the_memory_estimates_of_the_recipes_are_up_to_date() -> None:
    """Regenerate them with `python -m tests.docs.memory_reference`."""
    assert between(memory_reference.PAGE, "memory") == memory_reference.profile_table()
    assert between(memory_reference.PAGE, "macs") == memory_reference.mac_table()
