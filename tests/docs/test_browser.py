"""The built site in a headless Chromium: `make docs-test`. Oracle of the explorer: the library."""

import functools
import http.server
import itertools
import math
import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import qtoolkit as qt

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="make docs-test installs it")

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = (
    *("index.html", "concepts/rounding.html", "reference/casts.html", "explorer.html"),
    "notebooks/04_block_formats.html",
)
PHONE = {"width": 390, "height": 844}
FORMATS = (
    *("e4m3fn", "e5m2", "e4m3fnuz", "e4m3_ieee", "e2m1fn", "e8m0fnu", "ue4m3", "float16"),
    *("bfloat16", "nf4", "posit8", "hifloat8", "int8", "uint4", "binary8p3se", "binary6p2uf"),
)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """Instead of the one that all tests share: the browser outlives its tests."""


@pytest.fixture(scope="module")
def site():
    """The address of a server of the built site, on a free port of this machine."""
    assert (SITE / "index.html").exists(), f"{SITE} is not there; run `make docs` first"
    handler = functools.partial(QuietHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium found; `apt-get install chromium`, or set CHROMIUM to the path of one"
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, site):
    """A page of the explorer; an error in its scripts fails the test."""
    opened = browser.new_page()
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(f"{site}/explorer.html")
    yield opened
    opened.close()
    assert errors == []


def numbers_for(fmt, rng):
    """Numbers at which roundings differ: values, midpoints, one beyond the end, zero, infinity."""
    finite = np.unique(fmt.values()[np.isfinite(fmt.values())])
    middle = (finite[1:] + finite[:-1]) / 2
    largest = float(fmt.max_finite)
    picked = [*rng.choice(middle, 1), rng.uniform(-1.2, 1.2) * largest, 1.06 * largest]
    return [*map(float, picked), math.inf]


def text_of(x):
    return "inf" if x == math.inf else repr(x)


def test_a_thousand_roundings(page):
    rng = np.random.default_rng(0)
    compared = 0
    for name in FORMATS:
        fmt = qt.format(name)
        page.select_option("#format", name)
        xs = numbers_for(fmt, rng)
        shown = []
        for x in xs:
            page.fill("#number", text_of(x))
            cells = page.locator("#roundings td")
            shown.append(cells.evaluate_all("cells => cells.map(c => Number(c.dataset.code))"))
        choices = itertools.product(qt.casts.DETERMINISTIC, qt.casts.SATURATIONS)
        for column, (rounding, saturation) in enumerate(choices):
            codes = qt.encode(np.array(xs), fmt, rounding=rounding, saturation=saturation)
            found = [row[column] for row in shown]
            assert found == [int(code) for code in codes], (name, rounding, saturation, xs)
            compared += len(xs)
    assert compared >= 1000


def test_every_value_of_every_format(page):
    names = page.evaluate("[...explorer.formats.keys()]")
    assert len(names) > 140
    for name in names:
        values = page.evaluate(
            """name => { const format = explorer.formats.get(name);
                return Array.from({length: 2 ** format.bits}, (_, code) => {
                    const value = format.value(code);
                    if (Object.is(value, -0)) return "-0.0";
                    return String(value).replace("Infinity", "inf");
                }); }""",
            name,
        )
        found = np.array([float(value) for value in values])
        expected = qt.format(name).values()
        np.testing.assert_array_equal(found, expected, err_msg=name)
        signs = np.signbit(found) == np.signbit(expected)
        assert (signs | np.isnan(expected)).all(), name


def test_stochastic_probabilities(page):
    random = np.arange(2**16, dtype=np.uint32)
    for name, x in (("e4m3fn", 0.3), ("e5m2", -1.07), ("int8", 2.4), ("e4m3fn", 1.0)):
        page.select_option("#format", name)
        page.fill("#number", str(x))
        codes = qt.encode(np.full(2**16, x), name, rounding="stochastic", random_bits=random)
        away = page.evaluate(
            "([name, x]) => explorer.formats.get(name).stochastic(x).high", [name, x]
        )
        shown = float(page.locator("#stochastic").get_attribute("data-probability"))
        low = page.evaluate(
            "([name, x]) => explorer.formats.get(name).stochastic(x).low", [name, x]
        )
        expected = 0.0 if low == away else float((np.asarray(codes) == away).mean())
        assert shown == expected, (name, x)


def test_blocks(page):
    """An element beside the largest one of its block, beside the largest one of the tensor."""
    rng = np.random.default_rng(1)
    for spec in qt.formats.BLOCK_FORMATS:
        for _ in range(6):
            tensor_amax, amax, x = np.float32(np.sort(rng.lognormal(0, 4, 3))[::-1])
            shape = tuple(2 * n for n in spec.block) if len(spec.block) > 1 else (2, *spec.block)
            array = np.zeros(shape, np.float32)
            array[-1, -1] = tensor_amax if spec.tensor_scale else 0
            array[0, :2] = amax, x
            q = qt.quantize(array, spec)
            page.select_option("#block", spec.name)
            for field, value in (("amax", amax), ("element", x)):
                page.fill(f"#{field}", repr(float(value)))
            if spec.tensor_scale:
                page.fill("#tensor-amax", repr(float(tensor_amax)))
            cells = page.locator("#block-table td")
            shown = cells.evaluate_all("cells => cells.map(c => Number(c.dataset.value))")
            assert shown[0] == x
            assert shown[1] == float(np.asarray(q.scale).astype(np.float64)[0, 0]), spec.name
            assert shown[-1] == float(q.dequantize()[0, 1]), (spec.name, amax, x)


def test_errors_by_octave(page):
    for name, exponent in (("e4m3fn", 0), ("e4m3fn", -12), ("e5m2", 3), ("nf4", -4)):
        x = (1 + (np.arange(64) + 0.5) / 64) * 2.0**exponent
        q = np.asarray(qt.round_to_format(x.astype(np.float32), name), np.float64)
        expected = math.sqrt(np.mean(((x - q) / x) ** 2))
        shown = page.evaluate(
            "([name, e]) => explorer.relativeError(explorer.formats.get(name), e)", [name, exponent]
        )
        assert shown == pytest.approx(expected, rel=1e-12)  # sums of 64 squares


def test_keys_alone_choose_a_code(page):
    page.focus("#code")
    page.keyboard.press("ArrowUp")
    before = page.input_value("#code")
    page.locator("summary", has_text="Table of codes").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")  # the region that scrolls
    page.keyboard.press("Tab")  # the current code: the one button of 256 that Tab reaches
    assert page.evaluate("document.activeElement.dataset.code") == before
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert int(page.input_value("#code")) == int(before) + 1
    assert page.evaluate("document.activeElement.dataset.code") == str(int(before) + 1)


def test_a_screen_reader_is_told(page):
    for field in page.locator("#explorer input, #explorer select").all():
        assert field.evaluate("field => field.labels.length") == 1
    for drawing in page.locator("#explorer svg").all():
        assert drawing.get_attribute("aria-label")
    assert page.locator("#summary").get_attribute("aria-live") == "polite"
    page.fill("#number", "three")
    assert page.locator("#number").get_attribute("aria-invalid") == "true"
    assert "“three” is not a number; write" in page.locator("#summary").inner_text()
    page.fill("#element", "1e9")
    assert "larger than the largest of its block" in page.locator("#block-status").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_wider_than_a_phone(browser, site, path, scheme, tmp_path):
    opened = browser.new_page(viewport=PHONE, color_scheme=scheme)
    opened.goto(f"{site}/{path}")
    assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    used = opened.evaluate("document.body.dataset.mdColorScheme")
    assert used == {"light": "default", "dark": "slate"}[scheme]
    for image in opened.locator("article img").all():
        assert image.evaluate("image => image.complete && image.naturalWidth > 0")
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    opened.screenshot(path=folder / f"{path.replace('/', '-')}-{scheme}-phone.png", full_page=True)
    opened.close()


def test_every_public_name_has_an_anchor():
    for package in qt._NAMES_BY_PACKAGE:
        text = (SITE / "reference" / f"{package}.html").read_text(encoding="utf-8")
        for name in getattr(qt, package).__all__:
            assert f'id="qtoolkit.{package}.{name}"' in text, f"{package}.{name}"


def test_each_parameter_has_a_row_of_its_own():
    """Also where a docstring describes several at once: "rounding, saturation: As in `cast`."."""
    for package in qt._NAMES_BY_PACKAGE:
        text = (SITE / "reference" / f"{package}.html").read_text(encoding="utf-8")
        assert not re.findall(r"<td>\s*<code>\w+, [\w, ]+</code>\s*</td>", text), package


def test_formulas_are_rendered():
    for page in (SITE / "notebooks").glob("*.html"):
        article = page.read_text(encoding="utf-8").split("<article", 1)[1].split("</article>")[0]
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        assert "$" not in prose, page.name
    first = (SITE / "notebooks" / "01_formats_and_rounding.html").read_text(encoding="utf-8")
    assert "<msup><mn>2</mn><mn>7</mn></msup>" in first
