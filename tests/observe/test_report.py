"""The report: whole, self-contained, escaped, bounded."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs import write_pipeline, write_run

from verbund.errors import RunFailed
from verbund.observe.events import Journal
from verbund.observe.journal import read
from verbund.observe.report import lanes, write_report
from verbund.observe.report.curve import curve
from verbund.observe.report.pipeline import PASSES, pipeline
from verbund.observe.report.scale import Scale, fit, linear_ticks, number, seconds, size
from verbund.observe.summary import summarise
from verbund.observe.timeline import merge

VOID = {"meta", "br", "line", "circle", "path"}
EVIL = "<script>alert('x')</script>\"'&`<b>`"


class Page(HTMLParser):
    """Collects elements, text and attributes, and checks that elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(run_dir: Path, **more: Any) -> tuple[Page, str]:
    summary = summarise(run_dir, status=more.pop("status", "done"), strategy={"mesh": {"data": 2}}, **more)
    text = write_report(run_dir, summary).read_text(encoding="utf-8")
    return Page(text), text


def test_says_what_was_trained_how_it_went_and_what_held_it_back(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'task = "digits.py"\nseed = 5\n[data]\ntrain = "sklearn:digits"\n'
        '[train]\nprecision = "bf16"\nrandomness = "worker"\nbatch_norm = "global"\n'
    )
    write_run(tmp_path, steps=100, slow=1)
    page, text = report(tmp_path, ended_by="steps")
    for words in (
        "digits.py, trained on sklearn:digits with 2 workers (mesh data=2",
        "100 steps (800 samples)",
        "waiting for worker 1, which spent 1.0 s more per 100 steps computing",
        "forward and backward passes in bf16",
        "Randomness is drawn per worker",
        "over the whole global batch",
        "Seed 5",
        "Energy: no readable counter",
        "Training loss",
        "Validation accuracy",
        "First steps: 0 to 11",
        "Last steps: 88 to 99",
    ):
        assert words in page.text, words
    assert "confusion_matrix" in page.text
    assert text.count("<figure") >= 7


def test_needs_nothing_but_itself(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    page, text = report(tmp_path)
    assert page.count("link") == page.count("img") == page.count("iframe") == 0
    assert not any({"src", "href", "xlink:href", "srcset"} & set(attributes) for _, attributes in page.tags)
    assert "@import" not in text
    assert "url(" not in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_everything_from_the_run_is_escaped(tmp_path: Path) -> None:
    run_dir = tmp_path / "a <i>run<"
    (run_dir / "journal").mkdir(parents=True)
    (run_dir / "job.toml").write_text("task = '''" + EVIL + "'''\n[data]\ntrain = '''" + EVIL + "'''\n")
    write_run(run_dir, steps=3)
    journal = Journal(run_dir / "journal", "supervisor", 0, 1)
    journal.event("note", text=EVIL)
    journal.event("failure", process=EVIL, error={"what": EVIL, "where": EVIL, "fix": EVIL}, trace=EVIL)
    journal.event("validation", step=3, metrics={EVIL: 0.5, EVIL + "2": [[EVIL]], EVIL + "3": {EVIL: EVIL}})
    journal.totals("links", links={EVIL: [1, 2]})
    journal.close()
    page, text = report(run_dir, status=EVIL, cause={"what": EVIL, "where": EVIL, "fix": EVIL}, ended_by=EVIL)
    assert page.count("script") == 1
    assert not any(tag == "i" for tag, _ in page.tags)
    assert "<script>alert" not in text
    assert page.text.count("<script>alert('x')</script>") >= 8


def test_failures_and_their_tracebacks_are_shown(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "supervisor", 0, 1)
    journal.event("failure", process="worker 1", error={"what": "boom"}, secondary=False, trace="Traceback 123")
    journal.event("failure", process="worker 0", error={"what": "broken pipe"}, secondary=True)
    journal.close()
    page, _ = report(tmp_path, status="failed", cause={"what": "boom", "where": "t.py, line 3", "fix": "Mend it"})
    assert "t.py, line 3: boom. Mend it." in page.text
    assert "Traceback 123" in page.text
    assert "As a consequence of another failure." in page.text


def test_a_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    page, _ = report(tmp_path, status="failed")
    assert "no worker's journal was found" in page.text
    assert Page(write_report(tmp_path, {}).read_text(encoding="utf-8")).count("h1") == 1


def test_images_have_text_and_tables_have_headers(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    page, _ = report(tmp_path)
    images = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") != "lanes"]
    assert images
    assert all(attributes.get("role") == "img" and attributes.get("aria-label") for attributes in images)
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in page.tags if tag == "th")
    assert ("html", {"lang": "en"}) in page.tags


def test_a_long_run_of_many_workers_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, workers=70, steps=60, validate_every=20)
    page, text = report(tmp_path)
    assert len(text) < 1_500_000
    timeline = merge(read(tmp_path / "journal"))
    for window in lanes.windows(timeline.lives):
        assert 1 < lanes.timeline(timeline.lives, window).count("<rect") <= lanes.RECTANGLES
    assert "the first 16 of 70 workers" in page.text
    assert "the first 64 of 70" in page.text


def test_the_newest_generation_is_shown_from_where_it_went_on(tmp_path: Path) -> None:
    write_run(tmp_path, steps=30)
    write_run(tmp_path, first=20, steps=50, generation=2)
    page, _ = report(tmp_path)
    assert "of the newest generation" in page.text
    assert "First steps: 20 to 31" in page.text
    assert "Last steps: 58 to 69" in page.text


def _section(text: str, title: str) -> str:
    return text[text.index(f">{title}</h2>") :].split("</section>")[0]


def test_a_pipelines_step_is_drawn_pass_by_pass_and_compared_with_its_schedule(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=4, micro_batches=8, message=0.5)
    _, text = report(tmp_path)
    drawn = _section(text, "Pipeline")
    page = Page(drawn.split("</h2>")[1])
    assert "1f1b, 4 stages on 4 workers, 8 micro-batches." in page.text
    assert "% of a step, as measured; 27.3 % by the schedule with the times" in page.text
    assert "The first micro-batch had left the last stage after 9.5 ms." in page.text
    assert "samples per second" in page.text
    passes = [attributes["class"] for tag, attributes in page.tags if tag == "rect"]
    assert (passes.count("forward"), passes.count("backward")) == (32, 32)
    titles = re.findall(r"<title>(.*?)</title>", drawn)
    assert len(titles) == 64
    assert "stage 3, micro-batch 7: backward 4 ms" in titles
    # All lie within the frame, and the numbers are those of micro-batches.
    for x, width in re.findall(r'<rect [^>]*?x="([\d.]+)"[^>]* width="([\d.]+)"', drawn):
        assert 0 <= float(x) <= float(x) + float(width) <= lanes.WIDTH + 0.1
    numbers = re.findall(r'<text class="inside"[^>]*>(\d+)</text>', drawn)
    assert set(numbers) == set(map(str, range(8)))


def test_the_parts_of_a_backward_pass_and_chunks_are_told_apart(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "interleaved_zero_bubble", ranks=2, chunks=2, micro_batches=4)
    page = Page(pipeline(summarise(tmp_path, status="done"), read(tmp_path / "journal")))
    rects = [attributes for tag, attributes in page.tags if tag == "rect"]
    for kind in ("forward", "backward", "weights"):
        shades = [r.get("fill-opacity") for r in rects if r["class"] == kind]
        assert sorted(shades, key=str) == ["0.50"] * 8 + [None] * 8
    assert "stages 0, 2" in page.text
    for words in ("backward for the input", "backward for the weights", "paler: a worker's later stages"):
        assert words in page.text


def test_a_large_pipeline_is_drawn_in_part(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=40, micro_batches=60, steps=1)
    drawn = pipeline(summarise(tmp_path, status="done"), read(tmp_path / "journal"))
    assert drawn.count("<rect") == PASSES
    assert f"shown are {PASSES} of 4800 passes" in drawn


def test_a_pipeline_that_could_not_be_measured_is_said_in_words(tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks=2, hosts=True)
    _, text = report(tmp_path)
    drawn = _section(text, "Pipeline")
    assert "Idle (not measured) of a step" in drawn
    assert "<svg" not in drawn
    write_run(tmp_path / "none", steps=3)
    assert pipeline(summarise(tmp_path / "none", status="done"), read(tmp_path / "none" / "journal")) == ""


def test_what_each_worker_holds_is_a_table(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    for rank in range(2):
        journal = Journal(tmp_path / "journal", "worker", rank, 1)
        journal.totals("held", parameters=400, gradients=400, optimizer=800 + rank, ema=0, buffers=0, whole=3200)
        journal.close()
    page, text = report(tmp_path)
    assert "What each worker holds (one process alone: 3.2 kB)" in page.text
    (row,) = re.findall(r"<tr><th scope=\"row\">worker 1</th>(?:(?!</tr>).)*50.0 %.*?</tr>", text)
    cells = re.findall(r"<td>(.*?)</td>", row)
    assert cells == ["400 B", "400 B", "801 B", "1.6 kB", "50.0 %", "2 MB"]


@pytest.mark.parametrize(("steps", "expected"), [(1, 1), (2, 1), (13, 2), (30, 3)])
def test_windows_do_not_overlap(tmp_path: Path, steps: int, expected: int) -> None:
    write_run(tmp_path, steps=steps)
    windows = lanes.windows(merge(read(tmp_path / "journal")).lives)
    assert len(windows) == expected
    assert all(a.end <= b.begin for a, b in itertools.pairwise(windows))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="cannot be written"):
        write_report(tmp_path / "none", {})


# -- charts ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 10**6), st.none() | st.floats()), max_size=130))
@example([(0, 0.0), (1, 1.7e308)])
@settings(max_examples=80, deadline=None)
def test_any_curve_is_drawn_within_its_frame(raw: list[tuple[int, float | None]]) -> None:
    points = sorted(raw, key=lambda point: point[0])
    drawn = curve("x", points, better="larger")
    finite = [y for _, y in points if y is not None and abs(y) < 1e300]
    assert (drawn == "") == (not finite)
    for path in re.findall(r' d="M([^"]*)"', drawn):
        for pair in path.split("L"):
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 520
            assert -1 <= y <= 231


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_are_round_and_within(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = linear_ticks(low, high)
    assert len(ticks) <= 30
    room = (high - low) * 1e-6
    assert all(low - room <= tick <= high + room for tick in ticks)


def test_scales() -> None:
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(1, 100, 0, 2, logarithmic=True)(10) == pytest.approx(1)
    assert fit([1e-3, 1.0], 0, 1).logarithmic
    assert not fit([0.0, 1.0], 0, 1).logarithmic
    assert fit([0.1, 1000.0], 0, 1).ticks() == pytest.approx([0.1, 1, 10, 100, 1000])


def test_numbers_with_units() -> None:
    assert [seconds(v) for v in (None, 0.0, 0.0123, 1.5, 12.34, 150, 7300)] == [
        "not measured", "0.00 s", "12.3 ms", "1.50 s", "12.3 s", "2 min 30 s", "2 h 01 min",
    ]  # fmt: skip
    assert [size(v) for v in (None, 5, 1500, 2.5e9, 3e13)] == ["not measured", "5 B", "1.5 kB", "2.5 GB", "30.0 TB"]
    assert [number(v) for v in (None, 1234567.0, 0.123456, 5739.26, 1e-7)] == [
        "–",
        "1,234,567",
        "0.1235",
        "5,739",
        "1e-07",
    ]
