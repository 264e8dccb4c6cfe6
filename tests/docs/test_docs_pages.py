"""The documentation: its examples run and print what stands there, its names and pictures exist."""

import ast
import colorsys
import itertools
import re
import subprocess
import sys
from pathlib import Path

import examples
import numpy as np
import pytest
from PIL import Image

import qtoolkit
from qtoolkit.checkpoints.internal import CAUTIONS, TRIED

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
WITH_EXAMPLES = [page for page in PAGES if [*examples.blocks(page.read_text(encoding="utf-8"))]]


def of(page):
    return page.relative_to(ROOT / "docs" / "pages").as_posix()


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=of)
def test_the_examples_of_a_page(page):
    assert examples.run(page) == examples.expected(page)


def hooks_without_mkdocs():
    """The functions of docs/hooks.py that make pages; mkdocs itself is not in the test extra."""
    text = (ROOT / "docs" / "hooks.py").read_text(encoding="utf-8")
    text = text.replace("from mkdocs.structure.files import File\n", "")
    names = {"__file__": str(ROOT / "docs" / "hooks.py"), "__name__": "hooks"}
    exec(compile(text, "hooks.py", "exec"), names)
    return names


@pytest.mark.parametrize("package", qtoolkit._NAMES_BY_PACKAGE)
def test_every_public_name_is_in_the_reference(package):
    page = hooks_without_mkdocs()["reference_page"](package)
    found = re.findall(rf"^::: qtoolkit\.{package}\.(\w+)$", page, re.MULTILINE)
    found += re.findall(rf'id="qtoolkit\.{package}\.(\w+)"', page)
    found += re.findall(rf"{{ #qtoolkit\.{package}\.(\w+) }}", page)
    assert sorted(found) == sorted(getattr(qtoolkit, package).__all__)


def test_constants_are_in_the_reference_as_a_whole():
    pages = {
        name: hooks_without_mkdocs()["reference_page"](name) for name in qtoolkit._NAMES_BY_PACKAGE
    }
    assert f"| `{qtoolkit.checkpoints.DEFAULT_SKIP}` |" in pages["checkpoints"].replace("\\|", "|")
    (names,) = re.findall(r"`FORMATS` \| (.*) \|", pages["formats"])
    assert names == ", ".join(f"`{fmt.name}`" for fmt in qtoolkit.formats.FORMATS)
    assert "| `FloatFormat` or `IntFormat` or `TableFormat` |" in pages["formats"]


def test_the_text_below_a_preset_is_in_the_reference():
    page = hooks_without_mkdocs()["reference_page"]("products")
    assert "### `recipes.te_current` { #qtoolkit.products.recipes.te_current }" in page
    assert "Neither causal nor independent of the batch" in page


def test_top_level_names_are_in_the_index_of_the_reference():
    index = hooks_without_mkdocs()["reference_index"]()
    for name, home in qtoolkit._HOME_OF.items():
        assert f"[`qt.{name}`]({home}.md#qtoolkit.{home}.{name})" in index


def test_the_page_of_loaders_has_every_caution_with_its_date():
    page = hooks_without_mkdocs()["loaders_page"]()
    assert TRIED in page
    for row in CAUTIONS:
        assert f"| {row.who} | {row.layout} | {row.models} | {row.fault} | {row.remedy} |" in page


@pytest.mark.quick
def test_the_pictures_are_those_that_the_command_draws():
    drawn = set()
    for node in ast.parse((ROOT / "docs" / "pictures.py").read_text(encoding="utf-8")).body:
        decorators = getattr(node, "decorator_list", [])
        drawn |= {node.name for d in decorators if getattr(d, "id", "") == "picture"}
    both = drawn | {f"{name}-dark" for name in drawn}
    assert {p.stem for p in (ROOT / "docs/pages/pictures").iterdir()} == both
    texts = [page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"]]
    shown = {name for text in texts for name in re.findall(r"pictures/([\w-]+)\.png", text)}
    assert shown <= both
    assert "fp8-dark" in shown  # in README.md


def test_dark_pictures_reverse_the_lightness():
    """Oracle: Pillow's composition over white, and lightness as `colorsys` says it."""
    for path in (ROOT / "docs/pages/pictures").glob("*-dark.png"):
        light = Image.open(path.with_name(path.name.replace("-dark", ""))).convert("RGB")
        dark = Image.open(path)
        assert (dark.mode, dark.size, dark.getpixel((0, 0))[3]) == ("RGBA", light.size, 0)
        for x, y in itertools.product(range(7, light.width, 97), range(5, light.height, 31)):
            *ink, alpha = (value / 255 for value in dark.getpixel((x, y)))
            hue, lightness, saturation = colorsys.rgb_to_hls(*ink)
            ink = colorsys.hls_to_rgb(hue, 1 - lightness, saturation)
            over_white = [value * alpha + 1 - alpha for value in ink]
            wanted = [value / 255 for value in light.getpixel((x, y))]
            assert np.allclose(over_white, wanted, atol=2 / 255), (path, x, y)


def test_a_page_has_a_picture_for_each_mode():
    page = hooks_without_mkdocs()["in_both_modes"]("Text.\n\n![Two\nlines](../pictures/fp8.png)")
    assert page.split("\n\n")[1] == (
        "![Two\nlines](../pictures/fp8.png#only-light)"
        "![Two\nlines](../pictures/fp8-dark.png#only-dark)"
    )


@pytest.mark.docs
def test_the_pictures_are_as_the_command_draws_them_now(tmp_path):
    """So a figure that is stored anew by an experiment is drawn anew."""
    from matplotlib.testing.compare import compare_images

    command = [sys.executable, str(ROOT / "docs/pictures.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    for expected in sorted((ROOT / "docs/pages/pictures").iterdir()):
        # Other versions of FreeType set letters by fractions of a pixel.
        assert compare_images(str(expected), str(tmp_path / expected.name), tol=3) is None


@pytest.mark.quick
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_links_lead_to_files_of_the_repository(page):
    """As a code host needs it; mkdocs checks the links of the site, into which hooks turn these."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.quick
def test_links_to_files_become_links_to_pages():
    linked = hooks_without_mkdocs()["linked"]
    for page, link, expected in [
        ("howto/a.md", "../../../notebooks/01_x.ipynb", "../notebooks/01_x.md"),
        ("a.md", "../../experiments/RESULTS.md#qat", "results.md#qat"),
        ("howto/a.md", "../../../tests/conformance/README.md", "../conformance.md"),
        ("concepts/a.md", "../../../qtoolkit/products/_presets.py", "../reference/products.md"),
        ("a.md", "howto/b.md#top", "howto/b.md#top"),
        ("a.md", "https://example.org/README.md", "https://example.org/README.md"),
        ("a.md", "#here", "#here"),
    ]:
        assert linked(f"See [it]({link}).", page) == f"See [it]({expected})."
