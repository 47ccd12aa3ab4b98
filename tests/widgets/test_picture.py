"""The still picture is well-formed, safe, and shown by any viewer."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

import pytest

from nbdist.telemetry.collector import Collector
from nbdist.widgets.picture import MOST_POINTS, picture
from nbdist.wire import Batch, Sample

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
    html = picture(collector(12, [3.0, 2.0, 1.0]).snapshot(), "loss", name="still")
    assert html.startswith('<div class="still">')
    lines = chart(html).findall(f"{SVG}polyline")
    assert len(lines) == 12
    tops = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert tops == sorted(tops), "a falling loss falls"
    assert html.count("<tr>") == 13


def test_more_ranks_are_drawn_as_a_median_within_a_band() -> None:
    svg = chart(picture(collector(13, [3.0, 2.0]).snapshot(), "loss"))
    assert len(svg.findall(f"{SVG}polyline")) == 1
    assert len(svg.findall(f"{SVG}polygon")) == 1


def test_a_long_run_keeps_its_spike() -> None:
    values = [1.0] * 2000
    values[777] = 50.0
    svg = chart(picture(collector(1, values).snapshot(), "loss"))
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
        svg = chart(picture(collector(ranks, values).snapshot(), "loss", log=log))
        assert "nan" not in ElementTree.tostring(svg, encoding="unicode")


def test_names_are_escaped() -> None:
    evil = collector(1, [1.0], metric="<script>&\"'")
    html = picture(evil.snapshot(), "<script>&\"'")
    assert "<script>" not in html
    assert chart(html).find(f"{SVG}text") is not None


def test_an_unknown_metric_is_replaced_by_another() -> None:
    assert "loss of 1 ranks" in picture(collector(1, [1.0]).snapshot(), "accuracy")
    assert "Nothing was logged" in picture(Collector().snapshot(), "loss")
