"""The still picture is well-formed, safe, and shown by any viewer."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

import pytest

from nbdist.telemetry.collector import Collector
from nbdist.widgets.picture import MOST_POINTS, picture
from nbdist.wire import Batch, Mark, Sample

SVG = "{http://www.w3.org/2000/svg}"


def collector(ranks: int, values: list[float], metric: str = "loss") -> Collector:
    made = Collector()
    for rank in range(ranks):
        made.receive(Batch(rank, "source", 0, 0, tuple(
            Sample(rank, step, 0.0, {metric: value + rank})
            for step, value in enumerate(values)
        )))  # fmt: skip
    return made


def chart(html: str) -> ElementTree.Element:
    source = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert source is not None
    return ElementTree.fromstring(base64.b64decode(source[1]))


def test_up_to_12_ranks_are_drawn_as_lines() -> None:
    html = picture(collector(12, [3.0, 2.0, 1.0]).snapshot(), ["loss"], name="still")
    assert html.startswith('<div class="still">')
    lines = chart(html).findall(f"{SVG}polyline")
    assert len(lines) == 12
    tops = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert tops == sorted(tops), "a falling loss falls"
    assert html.count("<tr>") == 13


def test_more_ranks_are_drawn_as_a_median_within_a_band() -> None:
    svg = chart(picture(collector(13, [3.0, 2.0]).snapshot(), ["loss"]))
    assert len(svg.findall(f"{SVG}polyline")) == 1
    assert len(svg.findall(f"{SVG}polygon")) == 1


def test_a_long_run_keeps_its_spike() -> None:
    values = [1.0] * 2000
    values[777] = 50.0
    svg = chart(picture(collector(1, values).snapshot(), ["loss"]))
    (line,) = svg.findall(f"{SVG}polyline")
    tops = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(tops) <= MOST_POINTS
    assert min(tops) == 28.0


@pytest.mark.parametrize(
    "values", [[1.0], [2.0, 2.0], [math.nan], [math.inf, 1.0], [-1.0, 0.0], [1e-300]]
)
@pytest.mark.parametrize("log", [False, True])
def test_extreme_values_can_be_drawn(values: list[float], log: bool) -> None:
    for ranks in (1, 13):
        svg = chart(picture(collector(ranks, values).snapshot(), ["loss"], log=log))
        assert "nan" not in ElementTree.tostring(svg, encoding="unicode")


def test_marks_are_drawn_at_the_step_before_them() -> None:
    made = Collector()
    records = [Sample(0, step, 10.0 + step, {"loss": 1.0}) for step in range(9)]
    records += [Sample(0, step, 10.0 + step, {"loss": math.nan}) for step in (9, 10)]
    marks = [
        Mark(9.0, "interrupted", "In[1] was interrupted"),
        Mark(12.5, "commit", "commit 1"),
        Mark(15.5, "lost", "rank 1 <has died>", (1,)),
        Mark(99.0, "nan", "x has NaNs", (0,)),
    ]
    made.receive(Batch(0, "source", 0, 0, (*records, *marks)))
    html = picture(made.snapshot(), ["loss"])
    assert re.findall("<li>(.*?)</li>", html) == [
        "step 5: rank 1 &lt;has died&gt;", "step 10: rank 0: x has NaNs"
    ]  # fmt: skip
    lines = {
        path.attrib["stroke"]: float(path.attrib["d"][1:].split()[0])
        for path in chart(html).findall(f"{SVG}path")
    }
    left, right = 64, 708
    assert lines["#999"] == pytest.approx(left + 0.2 * (right - left), abs=0.1)
    assert lines["#D55E00"] == pytest.approx(left + 0.5 * (right - left), abs=0.1)
    assert lines["#CC79A7"] == right, "a NaN is within the chart"
    assert "#E69F00" not in lines, "it was before the first value"


def test_marks_of_two_kinds_at_one_step_are_both_seen() -> None:
    made = Collector()
    records = [Sample(0, step, 10.0 + step, {"loss": 1.0}) for step in range(3)]
    marks = [
        Mark(11.5, "lost", "rank 1 has died", (1,)),
        Mark(11.6, "replaced", "rank 1 was replaced", (1,)),
        Mark(11.7, "lost", "rank 2 has died", (2,)),
    ]
    made.receive(Batch(0, "source", 0, 0, (*records, *marks)))
    html = picture(made.snapshot(), ["loss"])
    paths = [p.attrib for p in chart(html).findall(f"{SVG}path")]
    lines = [p for p in paths if p["stroke"] in ("#009E73", "#D55E00")]
    assert len({p["d"] for p in lines}) == 1
    assert [(p["stroke"], p.get("stroke-dasharray")) for p in lines] == [
        ("#009E73", None), ("#D55E00", "6 6")
    ]  # fmt: skip
    assert html.count("<li>") == 3


def test_names_are_escaped() -> None:
    evil = collector(1, [1.0], metric="<script>&\"'")
    html = picture(evil.snapshot(), ["<script>&\"'"])
    assert "<script>" not in html
    assert chart(html).find(f"{SVG}text") is not None


def test_each_metric_has_a_chart_and_a_column() -> None:
    made = collector(2, [3.0, 2.0])
    made.receive(Batch(0, "source", 1, 0, (Sample(0, 9, 1.0, {"accuracy": 0.5}),)))
    html = picture(made.snapshot(), ["accuracy", "later", "loss"])
    alts = re.findall('alt="([a-z]+) of (\\d) ranks', html)
    assert alts == [("accuracy", "1"), ("loss", "2")]
    assert re.findall("<th>(.*?)</th>", html) == [
        "rank", "device", "step", "accuracy", "loss"
    ]  # fmt: skip
    rows = [re.findall("<td>(.*?)</td>", row) for row in html.split("<tr>")[2:]]
    assert rows == [["0", "", "9", "0.5", "2"], ["1", "", "1", "", "3"]]


def test_an_unknown_metric_is_replaced_by_another() -> None:
    assert "loss of 1 ranks" in picture(collector(1, [1.0]).snapshot(), ["accuracy"])
    assert "Nothing was logged" in picture(Collector().snapshot(), ["loss"])
