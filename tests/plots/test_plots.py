"""The pictures are PNGs with something in them, and leave pyplot's state alone."""

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_hex

from qtoolkit.formats import format
from qtoolkit.plots import loss_curves, number_line


def test_loss_curves(tmp_path):
    path = tmp_path / "loss.png"
    loss_curves(path, [1, 2, 3], {"float32": [3.0, 2.0, 1.5], "FP8": [3.1, 2.1, 1.6]})
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 400
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 10


def test_every_curve_is_drawn_however_many(tmp_path):
    pictures = []
    for count in range(1, 10):
        path = tmp_path / f"{count}.png"
        loss_curves(path, [1, 2], {f"curve {i}": [i, i + 1.0] for i in range(count)})
        pictures.append(path.read_bytes())
    assert len(set(pictures)) == len(pictures)


def test_gaps_have_a_panel_of_their_own(tmp_path):
    curves = {"float32": [3.0, 2.0, 1.5], "FP8": [3.1, 2.1, 1.6], "astype": [4.0, np.nan, np.nan]}
    heights = []
    for gap_to in (None, "float32"):
        path = tmp_path / f"{gap_to}.png"
        loss_curves(path, [1, 2, 3], curves, gap_to=gap_to)
        heights.append(matplotlib.image.imread(path).shape[0])
    assert heights[1] > 1.4 * heights[0]


def ticks(axes, colour):
    """Where the vertical ticks of that colour stand: sorted (row, value)."""
    found = []
    for lines in axes.collections:
        if to_hex(lines.get_colors()[0]) == colour:
            found += [(round((a[1] + b[1]) / 2), a[0]) for a, b in lines.get_segments()]
    return sorted(found)


NORMAL, SUBNORMAL, ZERO = "#1f4e79", "#d1495b", "#222222"


@pytest.mark.sample("symlog")
@pytest.mark.parametrize("scale", ["symlog", "linear"])
def test_number_line_draws_every_value(scale, tmp_path):
    names = ["e4m3fn", "hifloat8", "ue4m3", "int4"]
    figure = number_line(names, scale=scale)
    (axes,) = figure.axes
    assert axes.get_xscale() == scale
    drawn = [ticks(axes, colour) for colour in (NORMAL, SUBNORMAL, ZERO)]
    for row, name in enumerate(names):
        fmt = format(name)
        values = fmt.values()
        expected = np.unique(values[np.isfinite(values)])
        found = sorted(value for kind in drawn for r, value in kind if r == row)
        np.testing.assert_array_equal(found, expected)
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels[row] == f"{name}\n{fmt.finite_count} values"
    low, high = axes.get_xlim()
    assert low < -448
    assert high > 448
    # E4M3FN and UE4M3 have seven subnormals; integers and tables have none.
    assert [r for r, _ in drawn[1]] == [0] * 14 + [2] * 7
    assert [r for r, _ in drawn[2]] == [0, 1, 2, 3]
    figure.savefig(tmp_path / "line.png")
    pixels = matplotlib.image.imread(tmp_path / "line.png")
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 10


def test_number_line_of_one_format_in_any_spelling():
    for spec in ("F8_E8M0", "e8m0fnu", format("e8m0")):
        figure = number_line(spec)
        (axes,) = figure.axes
        assert len(ticks(axes, NORMAL)) == 255
        assert ticks(axes, SUBNORMAL) == ticks(axes, ZERO) == []
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["normal"]
        assert axes.get_xlim()[0] > -1e-37  # no room for negative values there are none of


def test_number_line_says_what_it_cannot_draw():
    with pytest.raises(ValueError, match=r"^number_line: scale='log', expected 'symlog' or"):
        number_line("e4m3fn", scale="log")
    with pytest.raises(ValueError, match=r"^number_line: no formats, expected one or more"):
        number_line([])
    with pytest.raises(ValueError, match=r"^float32: 2\*\*32 codes are too many to list"):
        number_line("float32")
    with pytest.raises(ValueError, match=r"^format: unknown format 'nothing'"):
        number_line(["e4m3fn", "nothing"])
