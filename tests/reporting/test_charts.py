"""Charts: places against values, and what is left out."""

import itertools
import math
import re

import pytest

from lit_llm.core.html_page import round_numbers
from lit_llm.reporting.charts import Line, chart, thinned


def drawn(lines, **options):
    return chart(lines, label="Loss", x_name="steps", text_of_x=str, **options)


def places(picture):
    """(x, y) of each path's points, in thousandths of the picture, from the upper left."""
    paths = re.findall(r'<path class="curve[^"]*" d="M([^"]*)"', picture)
    return [[tuple(float(v) for v in point.split()) for point in path.split("L")] for path in paths]


def rows(picture):
    """Value → height of its grid line in percent."""
    heights = [float(y) for y in re.findall(r'<line class="grid"[^>]* y1="([\d.]+)%"', picture)]
    values = [float(v.replace(",", "")) for v in re.findall(r'x="-6"[^>]*>([^<]+)<', picture)]
    return dict(zip(values, heights, strict=True))


def test_points_stand_where_the_grid_says_and_ends_touch_the_sides():
    points = [(1.0, 7.3), (50.0, 4.1), (101.0, 2.2)]
    picture = drawn([Line("a", 0, points)])
    found, grid = places(picture)[0], rows(picture)
    assert found[0][0] == 0 and found[-1][0] == 1000 and found[1][0] == pytest.approx(490, abs=0.1)
    (low, at_low), (high, at_high) = min(grid.items()), max(grid.items())
    for (_, value), (_, y) in zip(points, found, strict=True):
        assert y / 10 == pytest.approx(at_low + (value - low) / (high - low) * (at_high - at_low), abs=0.06)


def test_values_that_are_not_finite_are_left_out_and_counted():
    picture = drawn([Line("a", 0, [(1.0, 3.0), (2.0, math.nan), (3.0, math.inf), (4.0, 2.0)])])
    assert [len(path) for path in places(picture)] == [2]
    assert "2 values are not finite and not drawn" in picture
    assert "no finite value was logged" in drawn([Line("a", 0, [(1.0, math.nan)])])
    assert "no finite value was logged" in drawn([])


def test_values_above_the_limit_are_cut_off_and_the_caption_says_so():
    picture = drawn([Line("a", 0, [(1.0, 5.0), (2.0, 1e6), (3.0, 2.0)])], high=10.0)
    found = places(picture)[0]
    assert found[1][1] < 0 < found[0][1] < found[2][1] and max(rows(picture)) <= 10
    assert "Values above 10 are cut off" in picture
    assert "cut off" not in drawn([Line("a", 0, [(1.0, 5.0), (3.0, 2.0)])], high=10.0)


def test_one_point_and_equal_values_have_a_place_inside():
    picture = drawn([Line("a", 0, [(5.0, 0.0)]), Line("b", 1, [(5.0, 0.0)])])
    assert places(picture) == [[(500.0, 500.0)], [(500.0, 500.0)]]
    assert picture.count("<circle") == 2 and "a: 0 at 5<" in picture


def test_names_are_escaped_and_a_legend_is_there_for_two_lines():
    two = drawn([Line("<b>", 0, [(1.0, 1.0)]), Line("c", 1, [(1.0, 2.0)])])
    assert "&lt;b&gt;" in two and "<b>" not in two and 'class="legend"' in two
    assert 'class="legend"' not in drawn([Line("a", 0, [(1.0, 1.0)])])


def test_thinning_keeps_every_spike_the_ends_of_the_range_and_the_order():
    points = [(float(x), math.sin(x / 700)) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[777] = (777.0, -99.0)
    found = thinned(points)
    assert len(found) <= 600 and points[54_321] in found and points[777] in found
    assert [x for x, _ in found] == sorted({x for x, _ in found}) and set(found) <= set(points)
    assert thinned(points[:600]) == points[:600]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.2, 7.3), (-3e-5, 9e-5), (1e9, 1.001e9), (0.1, 0.1000001), (-5, -4.9)])
def test_round_numbers_are_few_even_inside_and_short(low, high):
    found = round_numbers(low, high, 8)
    assert 2 <= len(found) <= 8 and low - 1e-9 * abs(low) <= found[0] and found[-1] <= high + 1e-9 * abs(high)
    step = found[1] - found[0]
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in itertools.pairwise(found))
    digits = f"{step:.1e}"[0:3]
    assert digits in ("1.0", "2.0", "5.0"), step


@pytest.mark.parametrize(
    ("values", "grid"),
    [((0.03, 3.0), [0.05, 0.1, 0.2, 0.5, 1, 2]), ((1e-6, 2.0), [1e-06, 1e-05, 0.0001, 0.001, 0.01, 0.1, 1])],
)
def test_a_logarithmic_axis_has_round_numbers_at_the_places_of_their_logarithms(values, grid):
    picture = drawn([Line("a", 0, [(1.0, values[0]), (2.0, 0.0), (3.0, values[1])])], logarithmic=True)
    assert [len(path) for path in places(picture)] == [2], "0 has no logarithm"
    found = rows(picture)
    assert list(found) == grid
    for value, place in found.items():
        assert place == pytest.approx(100 * math.log(values[1] / value) / math.log(values[1] / values[0]), abs=0.01)


def test_points_are_no_line_have_given_columns_and_those_that_are_cut_off_are_not_drawn():
    points = Line("a", 0, [(1.0, 5.0), (2.0, 1e6), (4.0, 2.0)], "points")
    picture = drawn([points], high=10.0, columns=[1.0, 4.0])
    assert not places(picture) and picture.count("<circle") == 2 and "Values above" in picture
    assert re.findall(r'dy="15"[^>]*>([^<]+)<', picture) == ["1.0", "4.0"]


def test_an_axis_from_zero_and_one_name_for_a_group():
    picture = drawn(
        [Line("a: x", 0, [(1.0, 9.0), (2.0, 10.0)], group="a"), Line("a: y", 0, [(1.0, 9.5)], group="a")], from_zero=True
    )
    assert min(rows(picture)) == 0 and re.findall(r"</i>([^<]+)</li>", picture) == ["a"]


def test_the_axis_begins_at_the_first_place_and_the_lowest_row_is_the_baseline():
    picture = drawn([Line("a", 0, [(1.0, 0.69), (60.0, 0.4), (120.0, 0.33)])])
    assert re.findall(r'dy="15"[^>]*>([^<]+)<', picture)[:2] == ["1.0", "20.0"]
    (base,) = re.findall(r'<line class="base"[^>]* y1="([\d.]+)%"', picture)
    assert float(base) == rows(picture)[0.3] == 100 and min(rows(picture)) == 0.3


def test_values_are_shown_where_the_pointer_is_without_a_script():
    lines = [Line("a", 0, [(float(x), 2.0 * x) for x in range(1, 5)]), Line("b", 1, [(4.0, 7.5)])]
    picture = drawn(lines)
    strips = re.findall(r'<rect class="strip" x="([\d.]+)%"[^>]*width="([\d.]+)%"[^>]*><title>([^<]*)</title>', picture)
    assert [(float(x), float(width)) for x, width, _ in strips] == [(25.0 * i, 25.0) for i in range(4)]
    assert [said for *_, said in strips] == ["a: 2 at 1", "a: 4 at 2", "a: 6 at 3", "a: 8 at 4&#10;b: 7.5 at 4"]
    long = drawn([Line("a", 0, [(float(x), 1.0 + x % 2) for x in range(10_000)])])
    assert long.count('class="strip"') == 60
