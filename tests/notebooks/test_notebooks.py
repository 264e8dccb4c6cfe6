"""Notebooks: small enough for a test when asked, with stored outputs that prove their text."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import notebook_pages
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

NOTEBOOKS = notebook_pages.notebooks()
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.quick
@every_notebook
def test_what_is_stored(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}  # versions are one machine's
    assert path.stat().st_size < 300_000
    first, install, *cells = notebook.cells
    assert first.source.split("\n\n")[1].startswith("**The decision:** ")
    assert install.metadata == {"tags": ["setup"]}
    assert "%pip install" in install.source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Run from top to bottom, whole.
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in cells:
        assert cell.metadata in ({}, {"tags": ["test"]})
        # Asserts stand in cells of their own, for readers to skip.
        lines = [line.strip() for line in cell.source.splitlines()]
        asserts = any(line.startswith(("assert ", "np.testing.")) for line in lines)
        assert cell.cell_type == "markdown" or asserts == bool(cell.metadata), cell.source
        for output in cell.get("outputs", ()):
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            assert not output.get("metadata")


@pytest.mark.quick
@every_notebook
def test_every_figure_of_the_text_stands_in_an_output_above(path):
    assert list(notebook_pages.unproven_figures(path)) == []


@pytest.mark.quick
@every_notebook
def test_its_page_has_its_outputs_and_not_its_tests(path):
    text, pictures = notebook_pages.page(path)
    for cell in nbformat.read(path, as_version=4).cells:
        assert (cell.source in text) == (not cell.metadata), cell.source
        for output in cell.get("outputs", ()):
            assert cell.metadata or (notebook_pages.text_of(output) in text)
    assert pictures
    for name, png in pictures.items():
        assert f"]({name})" in text
        assert png.startswith(b"\x89PNG")


class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        """For `%matplotlib inline`, which has no loop of events."""


# Notebook 02 compiles for a minute, however few its steps: left to `make exhaustive`.
@pytest.mark.docs
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.exhaustive if path.stem[:2] == "02" else ())
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_its_quick_setting_runs(path, tmp_path, monkeypatch):
    """In this process: a kernel of its own would load JAX anew, and compile what others did."""

    monkeypatch.setenv("QTOOLKIT_QUICK", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    shell = Shell()
    try:
        with mpl.rc_context({"backend": "agg"}), capture_output():
            for cell in nbformat.read(path, as_version=4).cells:
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()
    finally:
        plt.close("all")
        shell.history_manager.end_session()


# Jupyter's own: not the notebook's warnings, which its kernel, another process, prints.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(jupyter_client|jupyter_core|nbclient|zmq)")
@pytest.mark.exhaustive
@every_notebook
def test_it_runs_in_full(path):
    """Every test cell among them, in a kernel; and it prints as many outputs as are stored."""
    found, stored = notebook_pages.executed(path), nbformat.read(path, as_version=4)
    for new, old in zip(found.cells, stored.cells, strict=True):
        assert new.source == old.source
        if new.cell_type == "code":
            kinds = [[output.output_type for output in cell.outputs] for cell in (new, old)]
            assert kinds[0] == kinds[1]
