"""Displays: the live screen, the plain lines, and the choice between the two."""

from __future__ import annotations

import io
import re

import pytest
from msgspec.structs import replace
from rich.console import Console

from protocols.finding import CHECK, Finding
from protocols.summary import RunGauges
from tests.training_run.records.display_examples import (
    GAUGES,
    HOSTILE,
    MEASURES,
    UPDATE,
    discarded,
    evaluation,
    facts,
    step,
    ungraded_evaluation,
)
from training_run.records.display import (
    REMINDER_SECONDS,
    Display,
    LiveDisplay,
    PlainDisplay,
    RunView,
    Sample,
    Screen,
    evaluation_pieces,
    fact_lines,
    machine_lines,
    make_display,
    sparkline,
)
from training_run.records.metrics import Measurement, step_metrics

FINDING = Finding(
    name="no_reward", severity="error", fact="[b]every reward is 0", consequence="nothing", advice="state the format",
    remedy=CHECK,
)  # fmt: skip
ALARMED = replace(GAUGES, findings=(FINDING,), waiting_for="64 completions that are being decoded")
START = Measurement(seconds=0.0, gauges=RunGauges())


def view(number: int = 40, seconds: float = 20.0) -> RunView:
    """Return the view of a run in progress."""
    report = step(number, discarded=(discarded(),))
    return RunView(
        step=number,
        seconds=seconds,
        seconds_left=30.0,
        trained=600,
        discarded={"zero_variance": 30, "stale": 2},
        rewards=tuple(i / 40 for i in range(40)),
        evaluations=(evaluation(0, 0.43), evaluation(20, 0.6)),
        tokens_per_second=1733.0,
        latest=step_metrics(report, now=Measurement(seconds=seconds, gauges=GAUGES), before=START),
        sample=Sample(prompt=HOSTILE, answer="4", completion=HOSTILE, reward=1.2),
    )


def terminal(width: int, height: int = 50, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    """Return a console on a terminal of this size and encoding, and its output."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=screen, width=width, height=height, force_terminal=True, color_system=None), screen


def written(screen: io.TextIOWrapper) -> str:
    """Return everything that was written to the terminal."""
    buffer = screen.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(screen.encoding)


@pytest.mark.parametrize("width", [200, 80, 40, 20, 9])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_frame_fits_every_width_and_neutralizes_untrusted_text(width: int, encoding: str) -> None:
    """Markup, escape sequences and control characters in prompts and completions have no effect."""
    console, screen = terminal(width, encoding=encoding)
    console.print(Screen(facts(), view(), ALARMED, 21.0))
    text = written(screen)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert all(len(line) <= width for line in text.splitlines())
    if width == 200:
        for expected in (
            "step 40/100  0:21 elapsed, 0:29 left",
            "43.0 % (step 0)  60.0 % (step 20)",
            "2 API requests",
            "600 trained  32 discarded",
            "50 % of the completions truncated",
            "solved by all 0 %, none 0 %, mixed 100 %",
            "clipped low 0.000, high 0.000",
            "no_reward: [b]every reward is 0; state the format",
            "64 completions that are being decoded",
            "format 0.500 sd 0.500",
            "1733 tokens/s  decoding alone 2000  during updates 1100  64 sequences",
            "[bold red]x[/]",
            "staleness 1.0",
        ):
            assert expected in text


@pytest.mark.parametrize("kind", ["live", "plain"])
def test_an_evaluation_is_shown_with_its_measures(kind: str) -> None:
    """Rewards, held-out loss, avg@k and pass@k as far as measured; an accuracy without graded problems is `-`."""
    measured = replace(evaluation(20, 0.6), **MEASURES, ungraded=7, failed=2)
    console, screen = terminal(200)
    console.print(Screen(facts(), RunView(evaluations=(measured,)), RunGauges(), 0.0))
    text = written(screen) if kind == "live" else "  ".join(evaluation_pieces(measured))
    for expected in (
        "60.0 %",
        "7 ungraded",
        "reward 0.750",
        "loss 0.500",
        "avg@4 50.0 %",
        "pass@2 62.5 %",
        "truncated 25.0 %",
    ):
        assert expected in text
    assert next(iter(evaluation_pieces(ungraded_evaluation(1)))) == (
        "held-out accuracy - of 0 (500 ungraded, 3 with failed rewards)"
    )


def test_both_displays_show_what_attachments_show_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before the first step."""
    monkeypatch.setattr("training_run.records.display.SHOWN", lambda line: [(f"attached {line['step']}",)])
    for shown, expected in ((replace(view(), latest=None), False), (view(), True)):
        texts = []
        for live in (True, False):
            console, screen = terminal(200)
            if live:
                console.print(Screen(facts(), shown, GAUGES, 1.0))
            else:
                plain = PlainDisplay(console, facts(), lambda: GAUGES)
                plain.show(shown)
                plain.close()
            texts.append(written(screen))
        assert ["attached 40" in text for text in texts] == [expected] * 2


def test_a_frame_with_findings_fits_24_lines() -> None:
    """The first finding is complete, the others have their names, and the sample takes what is left."""
    text = "54 % of the completions of the last 8 steps reached sampling.max_tokens = 32, the limit of the profile"
    advice = "set sampling.max_tokens to 128, or state the expected length of the answer in data.system"
    longest = replace(FINDING, name="truncated", fact=text, advice=advice)
    console, screen = terminal(80, 24)
    console.print(Screen(facts(), view(), replace(ALARMED, findings=(longest, FINDING)), 21.0))
    lines = written(screen).splitlines()
    assert len(lines) < 24
    words = " ".join(written(screen).split())
    assert all(part in words for part in (f"truncated: {text}; {advice} (also: no_reward)", "waiting for", "sample"))
    assert not any(line.rstrip().endswith("tokens per") for line in lines)


def test_only_full_queues_are_shown() -> None:
    """A full queue names the slower of its two ends; prompts always wait, and one place is often taken."""
    full = replace(
        GAUGES, queues=tuple(replace(queue, depth=3, capacity=3 * (n + 1)) for n, queue in enumerate(GAUGES.queues))
    )
    for gauges, names in ((GAUGES, []), (full, ["rollouts"])):
        console, screen = terminal(120)
        console.print(Screen(facts(), view(), gauges, 21.0))
        assert [queue.name for queue in gauges.queues if f"queue {queue.name}" in written(screen)] == names


def test_the_last_frame_has_the_speed_of_the_run_and_no_remaining_time() -> None:
    """While the run continues, the speed is that of the last steps."""
    console, screen = terminal(120)
    console.print(Screen(facts(), replace(view(), has_ended=True), ALARMED, 21.0))
    text = written(screen)
    assert "1733 tokens/s over the run" in text
    assert not {"left", "waiting", "sequences"} & set(text.split())


def test_an_empty_view_is_drawn() -> None:
    """Before the first batch."""
    console, screen = terminal(80)
    console.print(Screen(facts(), RunView(), RunGauges(), 0.0))
    assert "step 0/100  0:00 elapsed, - left" in written(screen)


@pytest.mark.parametrize(("width", "height"), [(40, 5), (200, 60)])
def test_the_live_display_works_on_small_terminals(width: int, height: int) -> None:
    """The end of a frame that is too tall is cropped."""
    console, screen = terminal(width, height)
    display = LiveDisplay(console, facts(), lambda: GAUGES)
    display.start()
    try:
        display.show(view())
    finally:
        display.close()
    display.close()
    text = written(screen)
    assert text.count("http://127.0.0.1:8000/\n") == 1
    for expected in (
        "http://127.0.0.1:8000/v1",
        "Apple M3, 8 cores, 16 GiB",
        "Accelerate",
        "40k trained",
        "step 40/100",
    ):
        assert expected in text


def test_an_error_while_drawing_leaves_an_empty_screen() -> None:
    """Rich draws in its own thread, where nobody would catch the exception."""

    def broken() -> RunGauges:
        raise RuntimeError("no gauges")

    display = LiveDisplay(terminal(80)[0], facts(), broken)
    assert str(display.frame()) == ""
    assert str(display.frame()) == ""


def test_plain_lines_are_limited_and_aligned() -> None:
    """At most one step line every two seconds, which is said once, but every evaluation and the last step."""
    seconds = 0.0
    screen = io.StringIO()
    display = PlainDisplay(Console(file=screen, width=80), facts(steps=42), lambda: ALARMED, clock=lambda: seconds)
    display.start()
    head = len(screen.getvalue().splitlines())
    for number, seconds in ((38, 0.0), (39, 1.0), (40, 2.0), (41, 2.5), (42, 2.6)):
        display.show(view(number, seconds))
    display.close()
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "page     http://127.0.0.1:8000/" in lines[:head]
    notes = [line for line in lines[head:] if "metrics.jsonl has all steps" in line]
    assert len(notes) == 1
    starts = [line for line in lines[head:] if line.startswith("step")]
    assert [line[:10] for line in starts] == ["step 20/42", "step 38/42", "step 40/42", "step 42/42"]
    assert "held-out accuracy 60.0 % of 500  in 0:02" in starts[0]
    assert len({line.index("tokens/s") for line in starts[1:]}) == 1
    written = screen.getvalue()
    for expected in (
        "loss -0.0100",
        "truncated  50 %",
        "discarded 1",
        "mixed 100 %",
        "format 0.500 sd 0.500",
        "alarm no_reward",
    ):
        assert expected in written
    assert "\x1b" not in written


def test_the_plain_display_says_what_the_run_waits_for() -> None:
    """If nothing was written for a while; an update of the policy is named too."""
    seconds, gauges, screen = 0.0, ALARMED, io.StringIO()
    display = PlainDisplay(Console(file=screen, width=80), facts(), lambda: gauges, clock=lambda: seconds)
    display.remind()
    assert screen.getvalue() == ""
    seconds = REMINDER_SECONDS
    display.remind()
    display.remind()
    assert screen.getvalue() == "step   0/100  waiting for 64 completions that are being decoded\n"
    seconds, gauges = 2 * REMINDER_SECONDS, GAUGES
    display.remind()
    assert screen.getvalue().endswith("waiting for the update of the policy\n")


def test_values_that_were_not_computed_are_missing() -> None:
    """KL without a penalty, a step without an update, and a reward function that failed for every group."""
    failed = replace(discarded(reason="reward_error"), rewards=(), failed_rewards=("mine",))
    report = step(1, groups=(), discarded=(failed, failed), update=None)
    penalized = step(2, update=replace(UPDATE, kl=0.0, kl_beta=0.0))
    screen = io.StringIO()
    rewarded = replace(facts(), rewards=("mine",))
    display = PlainDisplay(Console(file=screen, width=80), rewarded, lambda: GAUGES, clock=lambda: 0.0)
    for one in (report, penalized):
        latest = step_metrics(one, now=Measurement(seconds=1.0, gauges=GAUGES), before=START)
        display.show(RunView(step=one.step, seconds=1.0, latest=latest))
        display.close()
    first = screen.getvalue().split("step   2/100")[0]
    assert "reward      -" in first
    assert "loss       -" in first
    assert "mine - sd - (2 failed)" in first
    assert "kl" not in screen.getvalue()
    assert "0.0000" not in screen.getvalue()
    console, live = terminal(200)
    console.print(Screen(facts(), RunView(step=2, latest=latest), GAUGES, 1.0))
    assert not re.search(r"kl|mismatch|jaccard", written(live))


def test_the_display_depends_on_the_terminal() -> None:
    """`auto` is live on a terminal with cursor control."""
    redirected = Console(file=io.StringIO())
    assert isinstance(make_display("auto", terminal(80)[0], facts(), RunGauges), LiveDisplay)
    assert isinstance(make_display("auto", redirected, facts(), RunGauges), PlainDisplay)
    assert isinstance(make_display("plain", terminal(80)[0], facts(), RunGauges), PlainDisplay)
    assert type(make_display("none", redirected, facts(), RunGauges)) is Display


def test_a_sparkline_spans_its_range_and_averages_values() -> None:
    """Values that are not finite are skipped."""
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([float(i) for i in range(80)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([float("nan"), 1.0, float("inf")], 10) == "▁"
    assert sparkline([], 10) == ""
    assert sparkline([0.0, 1.0], 0) == ""
    assert sparkline([0.0, 1.0], 2, ascii_only=True).isascii()


def test_the_plain_display_shows_the_last_step_of_a_drained_run() -> None:
    """The last step is written at the end, even if the line before is recent and steps remain."""
    screen = io.StringIO()
    display = PlainDisplay(Console(file=screen, width=80), facts(steps=42), lambda: GAUGES, clock=lambda: 0.0)
    display.show(view(20))
    display.show(view(21))
    assert "step 21/42" not in screen.getvalue()
    for _ in range(2):
        display.close()
    assert screen.getvalue().count("step 21/42") == 1


def test_the_facts_name_processor_and_blas_once() -> None:
    """A device or a BLAS of another name is named beside them."""
    machine = replace(facts().machine, processor="AMD EPYC", device="AMD EPYC", backend="CPU", blas="MKL")
    text = "\n".join(machine_lines(machine, "host: NumPy/BLAS decode, MKL"))
    assert (text.count("AMD EPYC"), text.count("MKL")) == (1, 1)
    text = "\n".join(machine_lines(replace(machine, device="NVIDIA H100"), "GPU: MLX"))
    assert all(words in text for words in ("on CPU (NVIDIA H100)", "BLAS MKL"))


def test_the_facts_name_the_compute_path_and_the_step_of_a_resumed_run() -> None:
    """A new run has no line about resuming."""
    assert any(line.startswith("compute  MLX") for line in fact_lines(facts()))
    assert not any(line.startswith("resumed") for line in fact_lines(facts()))
    resumed = replace(facts(), resumed_from=37)
    assert list(fact_lines(resumed))[-1] == "resumed  from the checkpoint of step 37"
    assert "no checkpoint" in list(fact_lines(replace(resumed, resumed_from=0)))[-1]


def test_the_facts_have_the_system_message_and_what_the_rewards_expect() -> None:
    """A user sees at the start whether the message states the format. Without rewards, environments compute them."""
    known = replace(facts(), system_message="Answer inside <answer>.", rewards=("0.2 format: tags", "1 mine.py:reward"))
    lines = list(fact_lines(known))
    assert "system   Answer inside <answer>." in lines
    assert lines[lines.index("rewards  0.2 format: tags") + 1] == "         1 mine.py:reward"
    assert {"system   no system message", "rewards  none of the run itself"} <= set(fact_lines(facts()))
