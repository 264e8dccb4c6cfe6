"""What mkdocs makes while it builds: the reference, conformance, results, notebooks, explorer data.

None of it is kept in the repository, so it cannot be out of date. The pages of the reference follow
from the public names of the packages, each of which stands on one of them. Pages link to files of
the repository, as a code host needs it; here these links lead to what is made of the files.
"""

import ast
import importlib
import inspect
import itertools
import posixpath
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import examples
import explorer_data
import notebook_pages
from dark_pictures import dark
from mkdocs.structure.files import File

import qtoolkit
from qtoolkit.checkpoints.internal import ASK_FOR_WEIGHTS, CAUTIONS, PACKED_OPTION, TRIED

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^()#\s:]+)(#[^()\s]*)?\)")


def on_config(config: Any) -> Any:
    """Puts the pages of notebooks and reference into the navigation."""
    for entry in config["nav"]:
        if "Reference" in entry:
            entry["Reference"] = ["reference/index.md"]
            entry["Reference"] += [f"reference/{name}.md" for name in packages()]
        if "Notebooks" in entry:
            entry["Notebooks"] = [f"notebooks/{p.stem}.md" for p in notebook_pages.notebooks()]
    return config


def on_files(files: Any, config: Any) -> Any:
    made: dict[str, str | bytes] = {}
    made.update({f"reference/{name}.md": reference_page(name) for name in packages()})
    made["reference/index.md"] = reference_index()
    made["howto/loaders.md"] = loaders_page()
    made.update({page: (ROOT / file).read_text(encoding="utf-8") for file, page in COPIED.items()})
    made["explorer/data.js"] = explorer_data.javascript()
    for notebook in notebook_pages.notebooks():
        text, pictures = notebook_pages.page(notebook)
        made[f"notebooks/{notebook.stem}.md"] = notebook_pages.with_math(text)
        for name, png in pictures.items():
            made[f"notebooks/{name}"] = png
            made[f"notebooks/{name.replace('.png', '-dark.png')}"] = dark(png)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


# Files of the repository, and the pages that show them; copies are made of the first ones.
COPIED = {
    "tests/conformance/README.md": "conformance.md",
    "experiments/RESULTS.md": "results.md",
    "experiments/results/tables.md": "results-tables.md",
}
SHOWN = {**COPIED, "qtoolkit/products/_presets.py": "reference/products.md"}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return linked(in_both_modes(markdown), page.file.src_uri)


def in_both_modes(markdown: str) -> str:
    """A page with two pictures for each, of which the theme shows one."""
    both = r"![\1](\2.png#only-light)![\1](\2-dark.png#only-dark)"
    return re.sub(r"!\[([^\]]*)\]\((\S+)\.png\)", both, markdown)


def linked(markdown: str, page: str) -> str:
    """A page with its links to files of the repository turned into links to pages of the site."""
    folder = posixpath.dirname(page)

    def at_home(found: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join("docs/pages", folder, found[1]))
        shown = page_of(file)
        if shown is None:
            return found[0]
        return f"]({posixpath.relpath(shown, folder or '.')}{found[2] or ''})"

    return _LINK.sub(at_home, markdown)


def page_of(file: str) -> str | None:
    """The page that shows a file of the repository; None for pages themselves and other files."""
    if file.endswith(".ipynb"):
        return f"notebooks/{posixpath.basename(file)[: -len('.ipynb')]}.md"
    return SHOWN.get(file)


# What most readers look for, in the order of use; what is not here follows, functions first.
BY_USE = {
    "nnx": ("wrap", "value_and_grad", "report", "numerics", "calibrate", "freeze", "quantize"),
    "linen": ("wrap", "value_and_grad", "report", "numerics", "calibrate", "freeze", "quantize"),
    "checkpoints": ("convert", "load", "export", "dequantize", "save", "verify", "compare"),
    "casts": ("cast", "encode", "decode", "round_to_format"),
    "scaling": ("quantize", "QArray", "metrics"),
    "gradients": ("fake_cast", "fake_quantize", "fake_convert"),
    "formats": ("format", "FloatFormat", "IntFormat", "TableFormat", "BlockFormat"),
    "products": ("Recipe", "Operand", "recipes", "policies", "dot_general", "einsum"),
}


def packages() -> list[str]:
    rest = [name for name in qtoolkit._NAMES_BY_PACKAGE if name not in BY_USE]
    return [*BY_USE, *rest]


def names_by_use(package: str) -> list[str]:
    module, first = _package(package), BY_USE.get(package, ())
    rest = [name for name in module.__all__ if name not in first]
    rest.sort(key=lambda name: inspect.isclass(getattr(module, name)))
    return [*first, *rest]


def loaders_page() -> str:
    """What loaders are known to do wrong: the table by which `convert` warns."""
    rows = [
        f"| {row.who} | {row.layout} | {row.models} | {row.fault} | {row.remedy} |"
        for row in CAUTIONS
    ]
    models = ", ".join(f"`{name}`" for name in sorted(ASK_FOR_WEIGHTS))
    return "\n".join(
        [
            "# What loaders misread",
            "",
            "`qtoolkit convert` writes what a layout says. Some loaders do not read all of it. "
            "`convert` prints a note where a row of this table applies, with the names of the "
            f"tensors. Each row with a version was tried on {TRIED}, on CPUs, by "
            "`make interop`: what a row names fails or has wrong numbers, what it does not name "
            "loads. A row without a version follows from the loader's source.",
            "",
            "| loader | layout | models | what it does | what to do |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"The code of models whose `model_type` is {models} asks layers for `weight`, which "
            "layers in packed formats have not. These models run with "
            f"`{PACKED_OPTION}`, which `convert` prints.",
        ]
    )


def reference_index() -> str:
    rows = [
        f"| [`qtoolkit.{name}`]({name}.md) | {_first_line(_package(name))} |" for name in packages()
    ]
    top = ", ".join(
        f"[`qt.{name}`]({home}.md#qtoolkit.{home}.{name})"
        for name, home in sorted(qtoolkit._HOME_OF.items(), key=lambda pair: pair[0].lower())
    )
    return "\n".join(
        [
            "# Reference",
            "",
            f"These pages list every public name of qtoolkit {qtoolkit.__version__}, with its "
            "docstring. All other names are private.",
            "",
            "CI runs each example in a new namespace and folder, and compares what it prints.",
            "The examples need these imports:",
            "",
            "```python",
            *examples.DOCSTRING_IMPORTS.splitlines(),
            "```",
            "",
            "| package | what |",
            "| --- | --- |",
            *rows,
            "",
            f"At the top level, as `import qtoolkit as qt` has them: {top}.",
        ]
    )


def reference_page(package: str) -> str:
    """Functions and classes by docstrings; constants, such as `formats.E4M3FN`, in a table."""
    module = _package(package)
    lines = [f"# qtoolkit.{package}", "", _described(module), ""]
    documented, constants = [], []
    for name in names_by_use(package):
        value = getattr(module, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            documented.append(name)
        elif isinstance(value, types.ModuleType):
            lines += _module_section(package, name, value)
        else:
            constants.append((name, value))
    if constants:
        lines += ["## Constants", "", "| name | what |", "| --- | --- |"]
        lines += [_constant_row(package, name, value) for name, value in constants]
        lines.append("")
    for name in documented:
        lines += [f"::: qtoolkit.{package}.{name}", ""]
    return "\n".join(lines)


def _package(name: str) -> types.ModuleType:
    return importlib.import_module(f"qtoolkit.{name}")


def _module_section(package: str, name: str, module: types.ModuleType) -> list[str]:
    """A module of data, such as `products.recipes`: names with the texts below definitions."""
    texts = _texts_below_definitions(module)
    lines = [f"## `qtoolkit.{package}.{name}` {{ #qtoolkit.{package}.{name} }}", ""]
    lines += [_described(module), ""]
    for key in module.__all__:
        lines += [f"### `{name}.{key}` {{ #qtoolkit.{package}.{name}.{key} }}", ""]
        value = getattr(module, key)
        text = inspect.getdoc(value) if inspect.isroutine(value) else texts.get(key, str(value))
        lines += [text or "", ""]
    return lines


def _texts_below_definitions(module: types.ModuleType) -> dict[str, str]:
    body = ast.parse(inspect.getsource(module)).body
    return {
        target.id: inspect.cleandoc(text.value.value)
        for definition, text in itertools.pairwise(body)
        if isinstance(definition, ast.Assign) and isinstance(text, ast.Expr)
        for target in definition.targets
        if isinstance(target, ast.Name) and isinstance(text.value, ast.Constant)
    }


def _constant_row(package: str, name: str, value: Any) -> str:
    anchor = f'<a id="qtoolkit.{package}.{name}"></a>'
    return f"| {anchor}`{name}` | {_shown(value)} |"


def _shown(value: Any) -> str:
    if hasattr(value, "finite_count"):
        return f"{type(value).__name__} `{value.name}`, {value.bits} bits, to {_number(value)}"
    if hasattr(value, "block_lengths"):
        return f"BlockFormat `{value.name}`, elements in `{value.element.name}`"
    if kinds := typing.get_args(value):  # FormatLike
        return " or ".join(f"`{kind.__name__.lstrip('_')}`" for kind in kinds)
    if isinstance(value, tuple | Mapping):
        return ", ".join(f"`{getattr(item, 'name', item)}`" for item in value)
    text = " ".join(str(value).split()).replace("|", "\\|")
    return f"`{text}`"


def _number(fmt: Any) -> str:
    largest = fmt.max_finite
    return (
        f"{int(largest)}"
        if largest.denominator == 1 and largest < 10**6
        else f"{float(largest):.6g}"
    )


def _described(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def _first_line(thing: Any) -> str:
    return _described(thing).splitlines()[0]
