"""Every notebook runs from top to bottom, in this interpreter, and is committed without outputs."""

import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


@every_notebook
def test_it_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}  # versions are one machine's
    for index, cell in enumerate(notebook.cells):
        where = f"{path.name}, cell {index}"
        assert not cell.metadata, where
        assert not cell.get("outputs"), where
        assert cell.get("execution_count") is None, where


# Jupyter's own: not the notebook's warnings, which its kernel, another process, prints.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(jupyter_client|jupyter_core|nbclient|zmq)")
@every_notebook
def test_it_runs(path, tmp_path, monkeypatch):
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))  # nobody's profile or start-up files
    # Without folders to search, "python3" is ipykernel's own spec: sys.executable, not whichever
    # interpreter a kernel of that name was once installed for.
    specs = KernelSpecManager(kernel_dirs=[])
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(cleanup_kc=True)  # a manager that is handed in is otherwise left running

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                # JAX logs there that it found no accelerator; a warning carries its class.
                assert not re.search(r"\w+Warning: ", output.text), output.text
    # The folder it ran in is as it was: what a notebook shows, it shows inside.
    assert not [entry for entry in tmp_path.iterdir() if entry.is_file()]
