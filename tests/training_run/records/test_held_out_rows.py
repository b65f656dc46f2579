"""Rows of an evaluation: labels, units, intervals, and values that are missing."""

from __future__ import annotations

from msgspec.structs import replace

from tests.training_run.records.display_examples import MEASURES, evaluation, ungraded_evaluation
from training_run.records.held_out_rows import EvaluationRow, accuracy_text, changed, rows


def test_every_measure_has_a_row_in_its_unit() -> None:
    """Shares are in percent. Rows of single reward functions are left out of short displays."""
    found = {row.label: row.text_with_interval for row in rows(replace(evaluation(1, 0.5), **MEASURES), functions=True)}
    assert found == {
        "reward": "0.750 (0.625 to 0.875)",
        "reward format": "1.000 (0.875 to 1.125)",
        "loss": "0.500 (0.375 to 0.625)",
        "avg@4": "50.0 % (37.5 % to 62.5 %)",
        "pass@2": "62.5 % (50.0 % to 75.0 %)",
        "pass@4": "75.0 % (62.5 % to 87.5 %)",
        "sampled reward": "0.250 (0.125 to 0.375)",
        "length": "21.5",
        "truncated": "25.0 %",
    }
    assert found.keys() - {row.label for row in rows(replace(evaluation(1, 0.5), **MEASURES), functions=False)} == {
        "reward format"
    }


def test_a_value_that_does_not_exist_has_no_row() -> None:
    """No row says 0. An accuracy that does not exist is `-`."""
    assert list(rows(replace(evaluation(1, 0.5), samples=4), functions=True)) == []
    assert accuracy_text(evaluation(1, 0.5)) == "50.0 % of 500"
    assert accuracy_text(ungraded_evaluation(1)) == "- of 0 (500 ungraded, 3 with failed rewards)"


def test_a_change_needs_both_values() -> None:
    """Shares change in percentage points."""
    share, value, tokens = (
        EvaluationRow("a", 0.5, "share"),
        EvaluationRow("a", 0.5, "value"),
        EvaluationRow("a", 12.0, "tokens"),
    )
    assert changed(share, share._replace(value=0.25)) == ("50.0 %", "25.0 %", "-25.0")
    assert changed(value, value._replace(value=0.75)) == ("0.500", "0.750", "+0.250")
    assert changed(tokens, tokens._replace(value=13.5)) == ("12.0", "13.5", "+1.5")
    assert changed(None, share) == ("-", "50.0 %", "-")
