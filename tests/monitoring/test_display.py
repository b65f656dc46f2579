"""What is sampled, at any width, whatever the policy writes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from clotho.monitoring.display import NoDisplay, RunView, Sample
from clotho.monitoring.live_display import LiveDisplay, Screen, curve
from clotho.monitoring.make_display import make_display
from clotho.monitoring.metrics import Moment, step_metrics
from clotho.monitoring.plain_display import PlainDisplay
from clotho.monitoring.summary import print_summary
from clotho.monitoring.terminal_text import duration, memory, size
from protocols.accounting import Balance
from protocols.summary import RunGauges, RunSummary
from tests.monitoring.examples import GAUGES, HOSTILE, discarded, evaluation, facts, step

BALANCE = Balance(
    prompted=800, trained=612, discarded=188, by_reason={"stale": 8, "zero_variance": 180}, carried_over=0
)
START = Moment(seconds=0.0, gauges=RunGauges())


def view(number: int = 40, seconds: float = 20.0) -> RunView:
    """A run in its middle."""
    report = step(number, lost=(discarded(),))
    return RunView(
        step=number,
        seconds=seconds,
        trained=600,
        discarded={"zero_variance": 30, "stale": 2},
        rewards=tuple(i / 40 for i in range(40)),
        evaluations=(evaluation(0, 0.43), evaluation(20, 0.6)),
        latest=step_metrics(report, now=Moment(seconds=seconds, gauges=GAUGES), before=START),
        sample=Sample(prompt=HOSTILE, answer="4", completion=HOSTILE, reward=1.2),
    )


def terminal(width: int, height: int = 50, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    """A terminal of a size, which takes no character that its encoding lacks."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=screen, width=width, height=height, force_terminal=True, color_system=None), screen


def written(screen: io.TextIOWrapper) -> str:
    """Everything a terminal was sent."""
    buffer = screen.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(screen.encoding)


@pytest.mark.parametrize("width", [200, 80, 40, 20, 9])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_frame_fits_any_width_and_shows_foreign_text_as_it_is(width: int, encoding: str) -> None:
    """Markup-like text, escape sequences and odd characters in prompts and completions neither act nor break."""
    console, screen = terminal(width, encoding=encoding)
    console.print(Screen(100, view(), GAUGES, 21.0))
    text = written(screen)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert all(len(line) <= width for line in text.splitlines())
    if width == 200:
        for expected in (
            "step 40/100  0:21 elapsed, 0:29 left",
            "43.0 % (step 0)  60.0 % (step 20)",
            "rollouts 3/16  scored 0/16  2 API requests",
            "600 trained  32 discarded",
            "idle 2000, learning 1100  64 rows",
            "[bold red]x[/]",
            "1.0 mean, 1 most",
        ):
            assert expected in text


def test_an_empty_view_is_drawn_too() -> None:
    """Before the first batch, nothing is known yet."""
    console, screen = terminal(80)
    console.print(Screen(100, RunView(), RunGauges(), 0.0))
    assert "step 0/100  0:00 elapsed, - left" in written(screen)


@pytest.mark.parametrize(("width", "height"), [(40, 5), (200, 60)])
def test_the_live_display_survives_small_terminals(width: int, height: int) -> None:
    """A frame taller than the window is cut at its end."""
    console, screen = terminal(width, height)
    display = LiveDisplay(console, facts(), lambda: GAUGES)
    display.start()
    try:
        display.show(view())
    finally:
        display.close()
    display.close()
    text = written(screen)
    for expected in (
        "http://127.0.0.1:8000/v1",
        "Apple M3, 8 cores, 16 GiB",
        "Accelerate",
        "40k trained",
        "step 40/100",
    ):
        assert expected in text


def test_an_error_in_drawing_blanks_the_screen_and_nothing_else() -> None:
    """Rich draws in a thread of its own, where nobody would catch it."""

    def broken() -> RunGauges:
        raise RuntimeError("no gauges")

    display = LiveDisplay(terminal(80)[0], facts(), broken)
    assert str(display.frame()) == ""
    assert str(display.frame()) == ""


def test_plain_lines_are_few_and_aligned() -> None:
    """One per step, at most one every two seconds; measurements and the last step always; no cursor movements."""
    seconds = 0.0
    screen = io.StringIO()
    display = PlainDisplay(Console(file=screen, width=80), facts(steps=42), clock=lambda: seconds)
    display.start()
    head = len(screen.getvalue().splitlines())
    assert head == 5
    for number, seconds in ((38, 0.0), (39, 1.0), (40, 2.0), (41, 2.5), (42, 2.6)):
        display.show(view(number, seconds))
    display.close()
    lines = screen.getvalue().splitlines()[head:]
    assert [line[:10] for line in lines] == ["step 20/42", "step 38/42", "step 40/42", "step 42/42"]
    assert "held-out accuracy 60.0 % of 500  in 0:02  arithmetic 60.0 %  word 25.0 %" in lines[0]
    assert len({line.index("tokens/s") for line in lines[1:]}) == 1
    assert "discarded 1" in lines[1]
    assert "\x1b" not in screen.getvalue()


def test_a_display_is_chosen_for_the_terminal() -> None:
    """`auto` is live where the cursor can move."""
    redirected = Console(file=io.StringIO())
    assert isinstance(make_display("auto", terminal(80)[0], facts(), RunGauges), LiveDisplay)
    assert isinstance(make_display("auto", redirected, facts(), RunGauges), PlainDisplay)
    assert isinstance(make_display("plain", terminal(80)[0], facts(), RunGauges), PlainDisplay)
    assert isinstance(make_display("none", redirected, facts(), RunGauges), NoDisplay)


def summary(*, measured: bool = True) -> RunSummary:
    """A finished run."""
    return RunSummary(
        steps=100,
        version=98,
        before=evaluation(0, 0.43) if measured else None,
        after=evaluation(100, 0.96, final=True) if measured else None,
        balance=Balance(
            prompted=800, trained=612, discarded=188, by_reason={"stale": 8, "zero_variance": 180}, carried_over=0
        ),
        gauges=GAUGES,
        training_seconds=100.0,
        update_seconds=40.0,
        evaluation_seconds=12.0,
        total_seconds=125.0,
        base_model="/models/my base",
        adapter="runs/local-m3/adapters",
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_final_table_says_what_was_learnt_and_where_it_lies(encoding: str) -> None:
    """Accuracy before and after, the conservation line, timings, rates, swaps, and a command that can be copied."""
    console, screen = terminal(60, encoding=encoding)
    print_summary(console, summary())
    text = written(screen)
    for expected in (
        "prompted 800 = trained 612 + discarded 188 + carried over 0",
        "stale 8, zero_variance 180",
        "training 1:40 (by turns: decoding 0:08, updates from start to end 0:40), evaluation 0:12, total 2:05",
        "988 tokens/s over the whole run; alone 2000, while learning 1100 (55 %)",
        "9, median 0.5 ms, longest 2 ms",
        "mlx_lm.chat --model '/models/my base' --adapter-path runs/local-m3/adapters\n",
    ):
        assert expected in text
    rows = [line.split() for line in text.splitlines() if " % " in line]
    assert any("43.0" in row and "96.0" in row and "+53.0" in row for row in rows)
    assert any("word" in row and "+0.0" in row for row in rows)


def test_a_run_without_measurements_has_no_table() -> None:
    """And everything else all the same."""
    console, screen = terminal(80)
    print_summary(console, summary(measured=False))
    assert "held-out" not in written(screen)
    assert "prompted 800" in written(screen)


def test_a_curve_spans_its_range_and_averages_what_does_not_fit() -> None:
    """Oldest first; values that are no numbers are left out."""
    assert curve([0.0, 1.0], 10) == "▁█"
    assert curve([float(i) for i in range(80)], 8) == "▁▂▃▄▅▆▇█"
    assert curve([0.5, 0.5], 10) == "▁▁"
    assert curve([float("nan"), 1.0, float("inf")], 10) == "▁"
    assert curve([], 10) == ""
    assert curve([0.0, 1.0], 0) == ""
    assert curve([0.0, 1.0], 2, ascii_only=True).isascii()


def test_numbers_are_worded_for_people() -> None:
    """Durations, counts and bytes."""
    assert [duration(s) for s in (None, 7, 61, 3723)] == ["-", "0:07", "1:01", "1:02:03"]
    assert [size(n) for n in (950, 1_234, 999_800, 14_800_000_000)] == ["950", "1.23k", "1M", "14.8B"]
    assert [memory(n) for n in (12, 3 << 20, 16 << 30)] == ["12 B", "3 MiB", "16 GiB"]
