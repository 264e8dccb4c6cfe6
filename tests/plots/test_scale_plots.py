"""What the pictures of formats and scales show: lines and bars against numpy and ml_dtypes."""

import matplotlib.image
import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit.formats import BlockFormat
from qtoolkit.plots import code_histogram, error_against_magnitude
from qtoolkit.scaling import quantize


def lines(axes):
    return {line.get_label(): line.get_data() for line in axes.lines}


def at(line, magnitude):
    """The height of a line at the place next to `magnitude`."""
    x, y = line
    return y[np.argmin(np.abs(np.log(x) - np.log(magnitude)))]


def saved(axes, path):
    axes.figure.savefig(path)
    pixels = matplotlib.image.imread(path)
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 10


@pytest.mark.exhaustive
def test_error_against_magnitude_of_published_formats(tmp_path):
    axes = error_against_magnitude(["e4m3fn", "int8", "mxfp4", "nvfp4"])
    assert axes.get_xscale() == axes.get_yscale() == "log"
    found = lines(axes)
    assert list(found) == ["e4m3fn by tensor", "int8 by tensor", "mxfp4", "nvfp4"]
    low, high = axes.get_xlim()
    assert (low, high) == (2.0**-24, 1.0)
    # Below half of the smallest step everything becomes zero: E4M3FN 2**-10 / 448, INT8 1 / 254,
    # E2M1 beside 4, the element that amax becomes where scales are powers of two, 0.25 / 4.
    for name, least in zip(found, (2.0**-10 / 448, 1 / 254, 0.25 / 4, 0.25 / 6), strict=True):
        assert at(found[name], least / 4) == 1
        assert at(found[name], least * 8) < 0.5
    # In the normal range, over an octave in equal steps of the logarithm.
    x = np.exp2(np.arange(100000) / 100000)
    y = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    expected = np.sqrt(np.mean(((x - y) / x) ** 2))
    for magnitude in (2.0**-12, 2.0**-7, 2.0**-2):
        np.testing.assert_allclose(at(found["e4m3fn by tensor"], magnitude), expected, rtol=0.03)
    # Integers have one step for all: 1 / 127 / sqrt(12), whatever the number.
    integers = at(found["int8 by tensor"], 2.0**-1.5)
    middle = np.sqrt(np.mean((1 / 127 / np.sqrt(12) / (x * 2.0**-2)) ** 2))
    np.testing.assert_allclose(integers, middle, rtol=0.1)
    saved(axes, tmp_path / "errors.png")


def test_error_against_magnitude_for_any_block_shape():
    specs = [
        BlockFormat.tensor("float16", scale=None),
        BlockFormat.channel("int4"),
        BlockFormat.token("e5m2"),
        "deepseek_128x128",
        BlockFormat(element="e4m3fn", block=(32,), axes=(0,)),
        BlockFormat(element="int8", block=(1,)),
    ]
    axes = error_against_magnitude(specs[0], amax=448.0, octaves=10)
    again = error_against_magnitude(specs[1:], amax=448.0, octaves=10, axes=axes)
    assert again is axes
    found = lines(axes)
    assert len(found) == 6
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 6
    assert axes.get_xlim() == (448 / 2**10, 448)
    for name, line in found.items():
        assert np.nanmax(line[1]) <= 1, name
    e4m3 = [line for name, line in found.items() if name.startswith(("deepseek", "e4m3fn"))]
    for line in e4m3:  # scaled by one: values of E4M3FN as they are
        np.testing.assert_allclose(at(line, 8.0), 0.027, rtol=0.05)
    # A block of one element is its own amax, and exact but for two float32 roundings.
    assert np.nanmax(found["int8 by blocks of 1"][1]) < 2.0**-22


def test_error_against_magnitude_says_what_it_cannot_draw():
    refused(ValueError, r"^error_against_magnitude: no formats", error_against_magnitude, [])
    with refused(ValueError, r"^error_against_magnitude: amax=0"):
        error_against_magnitude("mxfp4", amax=0)
    with refused(ValueError, r"^error_against_magnitude: octaves=0"):
        error_against_magnitude("mxfp4", octaves=0)
    refused(ValueError, r"^spec: unknown format 'nothing'", error_against_magnitude, "nothing")


def bars(axes):
    return [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]


def labels(axes):
    texts = [label.get_text() for label in axes.get_xticklabels()]
    return dict(zip(axes.get_xticks(), texts, strict=True))


@pytest.mark.exhaustive
def test_code_histogram_has_a_bar_for_each_code(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    axes = code_histogram(x, "mxfp4")
    codes = np.asarray(quantize(x, "mxfp4").codes)
    # E2M1: the sign, then magnitudes in rising order.
    order = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    counts = np.bincount(codes.reshape(-1), minlength=16)[order]
    places, heights = zip(*bars(axes), strict=True)
    np.testing.assert_allclose(places, np.arange(16))
    np.testing.assert_allclose(heights, 100 * counts / x.size)
    magnitudes = ["0", "0.5", "1", "1.5", "2", "3", "4", "6"]
    negative = [f"-{magnitude}" for magnitude in reversed(magnitudes)]
    assert list(labels(axes).values()) == negative + magnitudes
    zeros = 100 * np.mean((codes & 7) == 0)
    assert axes.get_title().startswith(f"mxfp4: 0 % saturated, {zeros:.3g} % became zero, SQNR ")
    saved(axes, tmp_path / "codes.png")


@pytest.mark.exhaustive
def test_code_histogram_sets_infinities_and_nans_apart():
    x = np.array([np.nan, np.inf, np.inf, -np.inf, 1e6, 0.0, -0.0, 1.0], np.float32)
    axes = code_histogram(x, "e5m2", scale=1.0, saturation="none")
    assert axes.get_title().startswith("e5m2 by tensor: 50 % saturated, 0 % became zero")
    found = bars(axes)
    assert len(found) == 248 + 3
    named = labels(axes)
    heights = {named[round(at)]: height for at, height in found if round(at) in named}
    assert heights["-Inf"] == 12.5
    assert heights["Inf"] == 37.5  # with the number that overflowed
    assert heights["NaN"] == 12.5
    assert heights["0"] == 12.5
    assert sum(height for _, height in found) == 100
    assert "$2^{13}$" in named.values()
    assert "512" in named.values()
    axes = code_histogram(x[5:], "int8", axes=axes)
    assert axes.get_title().startswith("int8 by tensor: 0 % saturated")


@pytest.mark.sample("e4m3fnuz")
@pytest.mark.parametrize("spec", ["e4m3fnuz", "int8", "nf4", "e8m0fnu"])
def test_labels_are_the_values_below_their_bars(spec):
    axes = code_histogram(np.ones(64, np.float32), spec)
    fmt = quantize(np.ones(64, np.float32), spec).spec.element
    values = np.sort(fmt.values()[np.isfinite(fmt.values())])
    shown = {at: text for at, text in labels(axes).items() if at < len(values)}
    assert 8 <= len(shown) <= 17
    for at, text in shown.items():
        text = text.strip("$").replace("{", "").replace("}", "")
        base, _, power = text.partition("^")
        value = float(base) if not power else np.copysign(2.0 ** float(power), float(base))
        np.testing.assert_allclose(value, values[round(at)], rtol=0.01)
    assert ("0" in shown.values()) == (0 in values)


def test_code_histogram_says_what_it_cannot_draw():
    with refused(ValueError, r"^code_histogram: bfloat16, unscaled has elements of 16"):
        code_histogram(np.ones(3, np.float32), "bfloat16")
    refused(TypeError, r"^metrics: x has dtype int32", code_histogram, np.ones(3, np.int32), "int8")
