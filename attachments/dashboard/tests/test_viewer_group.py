"""The page `#/groups/ID` in Chromium: records, values of tokens, differences and hostile texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from attachments.dashboard.tests.browser import visit
from attachments.dashboard.tests.synthetic_run import EPISODES
from attachments.dashboard.tests.viewed_groups import (
    COLUMNS,
    DASH,
    LONG,
    TIMES,
    Group,
    newest,
    open_group,
    read_groups,
    token_values,
    wait_for_list,
    write_viewed_run,
)
from bench.chromium import viewing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

PANEL = "[...document.querySelectorAll('.panel [data-value]')].map((one) => [one.dataset.value, one.textContent])"
STYLES = """(all) => all.map((one) => {
    const style = getComputedStyle(one);
    return [style.backgroundColor, style.textDecorationLine];
})"""
TEXTS = "[...document.querySelectorAll('article pre')].map((one) => [one.dataset.key, one.textContent])"
COMPARE = """async ([a, b, level]) => {
    const { compare } = await import(new URL('dashboard/static/diff.js', document.baseURI));
    return compare({text: a}, {text: b}, level);
}"""
TURNS = """async () => {
    const { inTurns } = await import(new URL('dashboard/static/text.js', document.baseURI));
    const turns = [[true, 2], [false, 2], [true, 0]].map(([sampled, characters]) => ({sampled, characters, tokens: 1}));
    const page = (start, stop) => inTurns(turns, 'characters', start, stop, (from, to) => [from, to]);
    return [page(0, 2), page(2, 4)].map((turns) => turns.map((turn) => turn && turn[1]));
}"""
MESSAGE = "async () => (await (await fetch('dashboard/api/runs/0/groups/2/tokens')).json()).reason"
OVERLAYS = ("sampled_logprob", "learner_logprob", "ratio", "version", "advantage", "cut", "gradient_share")
CUTS = ("not cut", "clip range", "importance correction", "mask", "not trained on")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile completions."""
    return write_viewed_run(tmp_path_factory.mktemp("viewer") / "run")


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    """Address of the dashboard."""
    with viewing(run) as found:
        yield found


@pytest.fixture(scope="module")
def groups(run: Path) -> list[Group]:
    """The lines of rollouts.jsonl."""
    return read_groups(run)


def test_a_group_shows_its_record(browser: Browser, address: str, groups: list[Group]) -> None:
    """Prompt, answer, outcome and detail are complete; completions are in the order of their rewards.

    A part of the reward has a column if it applies to one of them.
    """
    with visit(browser, address) as page:
        for group in (newest(groups), newest(groups, trained=False), groups[2]):
            open_group(page, str(group["group_id"]))
            assert page.texts("pre.prompt") == [group["prompt"]]
            assert page.texts("pre.answer") == [group["answer"]]
            assert page.find("h1 + p .result").inner_text() == COLUMNS["outcome"](group).replace("_", " ")
            assert page.texts(".error") == ([group["detail"]] if group["detail"] else [])
            order = sorted(range(4), key=lambda i: (-(group["completions"][i]["reward"] or 0.0), i))
            assert page.texts("article pre") == [group["completions"][i]["text"] for i in order]
            parts = [part for one in group["completions"] for part, value in one["parts"].items() if value is not None]
            applied = tuple(dict.fromkeys(parts))
            for i, row in zip(order, page.texts(".completions tbody tr"), strict=True):
                one = group["completions"][i]
                values = [one["reward"], *(one["parts"].get(part) for part in applied), one["advantage"]]
                cells = [DASH if value is None else f"{value:.4g}" for value in values]
                stop = "length: truncated" if one["finish_reason"] == "length" else one["finish_reason"]
                first, last = one["first_version"], one["last_version"]
                versions = str(first) if first == last else f"{first}{DASH}{last}"
                assert row == "".join([f"#{i}", *cells, stop, str(one["tokens"]), versions])


def test_the_values_of_every_token_equal_the_file(
    browser: Browser, address: str, run: Path, groups: list[Group]
) -> None:
    """The arrow keys go through all tokens of a completion. The panel shows the numbers of the file."""
    group = newest(groups)
    expected = token_values(run, group, 2)
    with visit(browser, address) as page:
        open_group(page, f"{group['group_id']}/2/0")
        page.page.wait_for_selector(".panel table")
        page.find("[data-key='text 2']").focus()
        for at in range(len(expected["token"])):
            values = dict(page.evaluate(PANEL))
            assert page.place == f"#/groups/{group['group_id']}/2/{at}"
            assert values.pop("position") == f"{at + 1} of {len(expected['token'])}"
            assert values.pop("cut") == CUTS[expected["cut"][at]]
            text = group["completions"][2]["text"][4 * at : 4 * at + 4]
            assert values.pop("text") == text.replace(" ", "·").replace("\n", "↵\n")
            assert values.keys() == expected.keys() - {"cut"}
            for name, text in values.items():
                assert np.float32(text) == np.float32(expected[name][at])
            page.page.keyboard.press("ArrowRight")


@pytest.mark.parametrize(("group", "index"), EPISODES)
def test_an_episode_is_shown_in_turns(
    browser: Browser, address: str, groups: list[Group], group: int, index: int
) -> None:
    """Each turn has a title with its tools and number of tokens, with and without token values."""
    text = groups[group]["completions"][index]["text"]
    first, inserted, last = (turn["tokens"] for turn in groups[group]["completions"][index]["turns"])
    titles = (
        f"policy, message 1 (add): {first} tokens",
        f"environment (add): {inserted} tokens, not trained on",
        f"policy, message 2: {last} tokens",
    )
    with visit(browser, address) as page:
        open_group(page, f"{group}/{index}")
        assert page.texts("article .turn") == list(titles)
        (shown,) = [shown for key, shown in page.evaluate(TEXTS) if key == f"text {index}"]
        assert shown == f"{titles[0]}{text[:12]}{titles[1]}{text[12:20]}{titles[2]}{text[20:]}"


def test_a_page_of_an_episode_has_the_turns_in_it(browser: Browser, address: str) -> None:
    """A message without text is on the page that ends with it."""
    with visit(browser, address) as page:
        page.open("#/")
        assert page.evaluate(TURNS) == [[[0, 2], None, None], [None, [2, 4], [4, 4]]]


def test_token_values_that_do_not_exist_are_dashes(
    browser: Browser, address: str, run: Path, groups: list[Group]
) -> None:
    """A group that was not trained on has no values of the learner, which is shown as missing."""
    group = newest(groups, trained=False)
    with visit(browser, address) as page:
        open_group(page, f"{group['group_id']}/0/1?overlay=ratio")
        assert page.find(".panel [data-value=ratio]").inner_text() == DASH
        assert page.find(".panel [data-value=learner_logprob]").inner_text() == DASH
        assert page.find("section .muted").filter(has_text="No token of this group has this value").is_visible()
        sampled = float(page.find(".panel [data-value=sampled_logprob]").inner_text())
        assert np.float32(sampled) == np.float32(token_values(run, group, 0)["sampled_logprob"][1])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_colours_of_tokens_follow_their_values(
    browser: Browser, address: str, run: Path, groups: list[Group], overlay: str
) -> None:
    """The strength of the colour grows with the distance from the middle of the scale; cut tokens are underlined."""
    group = newest(groups)
    with visit(browser, address) as page:
        open_group(page, f"{group['group_id']}?overlay={overlay}")
        for i in range(4):
            values = token_values(run, group, i)
            shown = page.find(f"[data-key='text {i}'] .t").evaluate_all(STYLES)
            strengths = [float(colour.rstrip(")").split(", ")[3]) if "rgba" in colour else 1.0 for colour, _ in shown]
            numbers = np.asarray(values[overlay], dtype=np.float64)
            distances = (
                np.maximum(-numbers, 0)
                if overlay.endswith("logprob")
                else np.abs(np.log(numbers) if overlay == "ratio" else numbers)
            )
            by_distance = [strengths[at] for at in np.argsort(distances, kind="stable")]
            assert all(a <= b + 0.002 for a, b in pairwise(by_distance))
            assert [line == "underline" for _, line in shown] == [cut > 0 for cut in values["cut"]]
        assert len(page.texts(".scale li")) >= 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_colour(
    browser: Browser, address: str, groups: list[Group], scheme: Literal["light", "dark"]
) -> None:
    """Text on the colours of all overlays and of the diff has a contrast of at least 4.5 (WCAG 2.1, 1.4.3)."""
    group = newest(groups)
    script = """(selector) => [...document.querySelectorAll(selector)].map((one) => {
        const layers = [];
        for (let at = one; at; at = at.parentElement) layers.push(getComputedStyle(at).backgroundColor);
        return [getComputedStyle(one).color, layers];
    })"""
    with visit(browser, address, scheme=scheme) as page:
        for overlay in OVERLAYS:
            open_group(page, f"{group['group_id']}?overlay={overlay}&diff=0-1")
            for colour, layers in page.evaluate(script, ".t, .swatch, del, ins, .result, .chip, .muted"):
                assert contrast(rgba(colour), [rgba(layer) for layer in layers]) >= 4.5


def rgba(text: str) -> tuple[float, ...]:
    """Red, green, blue and opacity of a computed colour."""
    values = [float(value) for value in re.findall(r"[\d.]+", text)]
    return (*values[:3], values[3] if len(values) > 3 else 1.0)


def contrast(colour: tuple[float, ...], layers: list[tuple[float, ...]]) -> float:
    """Contrast of a text with the layers under the text, the uppermost first."""
    below = np.zeros(3)
    for layer in reversed(layers):
        below = layer[3] * np.asarray(layer[:3]) + (1 - layer[3]) * below

    def luminance(channels: np.ndarray) -> float:
        scaled = np.asarray(channels) / 255
        linear = np.where(scaled <= 0.04045, scaled / 12.92, ((scaled + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    first, second = sorted((luminance(np.asarray(colour[:3])), luminance(below)))
    return (second + 0.05) / (first + 0.05)


def test_the_link_of_a_token_restores_the_view(browser: Browser, address: str, groups: list[Group]) -> None:
    """A click on a token, a chosen colour and visible spaces are in the address, which shows the same in a new page."""
    group = newest(groups)
    with visit(browser, address) as page:
        open_group(page, f"{group['group_id']}?outcome=trained")
        page.find("[data-key='Colour tokens by']").select_option("ratio")
        page.find("[data-key=symbols]").check()
        page.find("[data-key='text 1'] .t").nth(3).click()
        view = ("article.chosen", ".panel", ".t.selected", ".scale", ".links")
        page.page.wait_for_selector("[rel=prev]")
        before = [page.texts(selector) for selector in view]
        link = str(page.find(".panel a").get_attribute("href"))
        assert link == page.place == f"#/groups/{group['group_id']}/1/3?outcome=trained&overlay=ratio&symbols=yes"
    with visit(browser, address) as other:
        open_group(other, link.removeprefix("#/groups/"))
        other.page.wait_for_selector("[rel=prev]")
        assert [other.texts(selector) for selector in view] == before
        assert other.find(".t.selected").count() == 1


def test_groups_link_to_their_neighbours_in_the_filtered_list(
    browser: Browser, address: str, groups: list[Group]
) -> None:
    """Previous and next are those of the list with the same filters and the same order."""
    ids = [group["group_id"] for group in groups if group["type"] == "sum" and group["reason"] is None]
    with visit(browser, address) as page:
        page.open(f"#/groups/{ids[3]}?type=sum&outcome=trained&sort=group_id")
        page.page.wait_for_selector("[rel=next]")
        assert page.texts("[rel=prev], [rel=next]") == [f"↑ group {ids[2]}", f"↓ group {ids[4]}"]
        page.find("[rel=next]").click()
        page.page.wait_for_selector(f"h1:text-is('Group {ids[4]}')")
        page.page.wait_for_selector(f"[rel=next]:text-is('↓ group {ids[5]}')")


def test_a_diff_contains_both_completions(browser: Browser, address: str, groups: list[Group]) -> None:
    """Common text and deletions are the left completion, common text and insertions the right one, at every level."""
    group = newest(groups)
    left, right = group["completions"][0]["text"], group["completions"][2]["text"]
    with visit(browser, address) as page:
        open_group(page, str(group["group_id"]))
        page.find("[data-key=Compare]").select_option("0")
        page.find("[data-key=with]").select_option("2")
        for level in ("word", "token", "line"):
            page.find("[data-key=by]").select_option(level)
            assert "".join(page.texts(".diff .left span, .diff .left del")) == left
            assert "".join(page.texts(".diff .right span, .diff .right ins")) == right
            assert page.find("section").filter(has_text=f"compared by {level}").count()
        assert page.place == f"#/groups/{group['group_id']}?diff=0-2&level=line"


def test_the_best_and_the_worst_completion_are_compared_at_first(
    browser: Browser, address: str, groups: list[Group]
) -> None:
    """The comparison is the first box after the prompt. The address that chooses nothing shows none."""
    group = newest(groups)
    rewards = [one["reward"] for one in group["completions"]]
    best, worst = rewards.index(max(rewards)), len(rewards) - 1 - rewards[::-1].index(min(rewards))
    with visit(browser, address) as page:
        open_group(page, str(group["group_id"]))
        assert [page.find(f"[data-key={key}]").input_value() for key in ("Compare", "with")] == [str(best), str(worst)]
        assert "".join(page.texts(".diff .left span, .diff .left del")) == group["completions"][best]["text"]
        page.find("[data-key=Compare]").select_option("none")
        assert page.find(".diff").count() == 0
        assert page.place == f"#/groups/{group['group_id']}?diff=none"


def test_equal_completions_are_shown_once(browser: Browser, tmp_path: Path) -> None:
    """The others can be unfolded, and an address of one of them unfolds them."""
    run = write_viewed_run(tmp_path / "run")
    group = read_groups(run)[0]
    texts = ["equal", "other", "equal", "equal"]
    group["completions"] = [
        one | {"text": text, "reward": 1.0} for one, text in zip(group["completions"], texts, strict=True)
    ]
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    (run / "rollouts.jsonl").write_text("\n".join([json.dumps(group), *lines[1:]]) + "\n")
    with viewing(run) as found, visit(browser, found) as page:
        open_group(page, str(group["group_id"]))
        assert page.texts("summary") == [f"2 {TIMES} the same text:  #2 #3"]
        assert [one.is_visible() for one in page.find("article").all()] == [True, False, False, True]
        page.find("summary").click()
        assert all(one.is_visible() for one in page.find("article").all())
        open_group(page, f"{group['group_id']}/3")
        assert page.find("article.chosen").is_visible()


def test_ranks_colour_the_least_probable_tokens_of_any_group(
    browser: Browser, address: str, run: Path, groups: list[Group]
) -> None:
    """The most probable token has no colour, the least probable one the full colour, however small the difference."""
    group = newest(groups)
    values = [token_values(run, group, i)["sampled_logprob"] for i in range(4)]
    with visit(browser, address) as page:
        open_group(page, str(group["group_id"]))
        page.find("[data-key=Scale]").select_option("rank")
        assert page.place == f"#/groups/{group['group_id']}?scale=rank"
        shown = [page.find(f"[data-key='text {i}'] .t").evaluate_all(STYLES) for i in range(4)]
        colours = [rgba(colour)[3] for texts in shown for colour, _ in texts]
        by_value = [colours[at] for at in np.argsort(-np.concatenate(values), kind="stable")]
        assert (by_value[0], by_value[-1]) == (0.0, pytest.approx(0.6, abs=0.002))
        assert all(a <= b + 0.002 for a, b in pairwise(by_value))


def test_a_diff_is_shortest_and_bounded(browser: Browser, address: str) -> None:
    """Random texts have the longest common part of an independent computation; very long texts are not divided."""
    source = np.random.default_rng(5)
    with visit(browser, address) as page:
        page.open("#/groups")
        for _ in range(60):
            a, b = (" ".join(source.choice(list("xyz"), source.integers(0, 12))) for _ in range(2))
            found = page.evaluate(COMPARE, [a, b, "word"])
            assert "".join(text for kind, text in found["runs"] if kind <= 0) == a
            assert "".join(text for kind, text in found["runs"] if kind >= 0) == b
            assert sum(len(text) for kind, text in found["runs"] if kind == 0) == common_length(a, b)
        words = ["".join(source.choice(list("abcdefgh \n"), 30_000)) for _ in range(2)]
        assert page.evaluate(COMPARE, [*words, "word"])["level"] == "line"
        assert page.evaluate(COMPARE, ["a\n" * 9000, "b\n" * 9000, "word"])["level"] == "text"


def common_length(a: str, b: str) -> int:
    """Length of the longest common subsequence of two texts of single characters."""
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    for i, j in np.ndindex(len(a), len(b)):
        table[i + 1, j + 1] = table[i, j] + 1 if a[i] == b[j] else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def test_hostile_completions_are_shown_as_text(browser: Browser, address: str, groups: list[Group]) -> None:
    """Markup, control characters and direction overrides are text: the page has no element, title or script of them."""
    group = groups[64]
    with visit(browser, address) as page:
        open_group(page, "64")
        texts = {int(key.split()[1]): text for key, text in page.evaluate(TEXTS)}
        assert texts == {i: one["text"] for i, one in enumerate(group["completions"])}
        assert page.find("main script, main img, main svg, main iframe").count() == 0
        assert "executed" not in page.page.title()
        page.find("[data-key=symbols]").check()
        assert "⟨U+202E⟩right·to·left⟨U+202C⟩" in page.texts("[data-key='text 2']")[0]
        assert "⟨U+0000⟩·bell·⟨U+0007⟩" in page.texts("[data-key='text 3']")[0]
        assert (
            page.find("article:has([data-key='text 2']) .chip")
            .inner_text()
            .startswith(f"U+202E {TIMES} 1, U+202C {TIMES} 1")
        )
        wait_for_list(page, "text=executed")
        assert page.find("main script, main img").count() == 0


def test_a_completion_of_one_megabyte_is_shown_in_pages(browser: Browser, address: str) -> None:
    """A text without a line break is cut into pages and does not make the page wider; its diff is bounded."""
    with visit(browser, address, size=(390, 844)) as page:
        open_group(page, "65?diff=0-1")
        shown = page.texts("article.chosen pre")[0]
        assert LONG.startswith(shown)
        page.page.get_by_role("button", name="after").click()
        assert page.texts("article.chosen pre")[0] == LONG[len(shown) : 2 * len(shown)]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.find("section").filter(has_text="compared by").count()


def test_absent_token_values_are_explained(browser: Browser, address: str, groups: list[Group]) -> None:
    """Without per-token values, the page says why, with the message of the API, and shows the plain text."""
    with visit(browser, address) as page:
        open_group(page, "2")
        message = page.evaluate(MESSAGE)
        assert page.page.get_by_text(message).is_visible()
        assert set(page.texts("article pre")) == {one["text"] for one in groups[2]["completions"]}
        assert page.find(".t").count() == 0


def test_the_pages_fit_a_narrow_screen(browser: Browser, address: str, groups: list[Group]) -> None:
    """At 390 pixels nothing is wider than the screen, in the list, a group, its diff and the panel of a token."""
    group = newest(groups)
    with visit(browser, address, size=(390, 844)) as page:
        wait_for_list(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        open_group(page, f"{group['group_id']}/1/3?diff=0-1")
        assert page.find(".panel").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert not page.find(".diff .right").first.is_visible()
