"""The notebooks: executed in full with their outputs written into them, and as pages of the site.

Command: python docs/notebook_pages.py [notebooks/NAME.ipynb ...]   (all of them, if none is named)
Claim: what a notebook shows is what its cells gave, from top to bottom, in a kernel of its own.

Cells with the tag "test" assert what the text says. QTOOLKIT_QUICK=1 in the environment makes the
notebooks small: that is how the test suite runs them.
"""

import base64
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook as its kernel leaves it, run in an empty folder, tidied.

    Raises:
      nbclient.exceptions.CellExecutionError: A cell raised.
      AssertionError: Somebody else's kernel has the name "python3".
    """
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    # Without folders to search, "python3" is ipykernel's own spec: sys.executable, not whichever
    # interpreter a kernel of that name was once installed for.
    specs = KernelSpecManager(kernel_dirs=[])
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(notebook, km=manager, timeout=600, resources=where)
        client.execute(cleanup_kc=True)  # a manager that is handed in is otherwise left running
    return tidied(notebook)


def tidied(notebook: Any) -> Any:
    """Without what differs from run to run or machine to machine; the notebook itself."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # Of stderr: JAX says there that it found no accelerator.
            cell.outputs = _joined([o for o in cell.outputs if o.get("name") != "stderr"])
            for output in cell.outputs:
                output.get("metadata", {}).clear()
                if "image/png" in output.get("data", {}):
                    output.data.pop("text/plain", None)  # an address in memory
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """What is printed in a row as one output; it arrives in parts, as the kernel flushes."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if "name" in output and output["name"] == last.get("name"):
            last["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown of the stored notebook, without tests; and its pictures, by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif not {"test", "setup"} & set(cell["metadata"].get("tags", ())):
            parts.append(_fenced("python", source))
            for output in cell["outputs"]:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                if png := output.get("data", {}).get("image/png"):
                    pictures[name] = base64.b64decode("".join(png))
                    parts.append(f"![Picture of the cell above]({name})")
                elif text := text_of(output):
                    parts.append(_fenced("text", text))
    parts.append(
        f"*This page is `notebooks/{path.name}` with its stored outputs, without the cells that "
        "install and that test what the text says.*"
    )
    return "\n\n".join(parts), pictures


def with_math(text: str) -> str:
    """Markdown whose formulas, `$2^7$`, are MathML: browsers render it without a script."""
    from latex2mathml.converter import convert

    parts = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)
    for place in range(0, len(parts), 2):  # between code
        parts[place] = re.sub(r"\$([^$]+)\$", lambda found: convert(found[1]), parts[place])
    return "".join(parts)


def text_of(output: dict[str, Any]) -> str:
    """What an output shows as text."""
    data = output.get("data", {})
    return "".join(output.get("text", data.get("text/plain", ""))).rstrip()


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def unproven_figures(path: Path) -> Iterator[str]:
    """Decimal figures and percentages of the prose that no cell above shows or contains."""
    above = ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            above += source + "".join(map(text_of, cell["outputs"]))
            continue
        prose = re.sub(r"\$[^$]*\$|`[^`]*`|\]\([^)]*\)", "", source)  # formulas, code, links
        for figure in re.findall(r"\d+\.\d+|\d+(?= ?%)", prose):
            if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", above):
                yield f"{path.name}: {figure}"


def main() -> None:
    import nbformat

    for path in map(Path, sys.argv[1:] or notebooks()):
        nbformat.write(executed(path), path)
        print(f"{path}: {path.stat().st_size:,} bytes", *unproven_figures(path), sep="\n  ")


if __name__ == "__main__":
    main()
