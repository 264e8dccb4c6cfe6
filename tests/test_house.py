"""The house: who imports whom, and what loads when."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import qtoolkit

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(qtoolkit.__file__).resolve().parent

# From the bottom up: each layer imports only from layers before it; those in one row not at all.
LAYERS = (
    ("formats",),
    ("casts",),
    ("scaling",),
    ("gradients",),
    ("products",),
    ("onnx", "openvino", "pypto", "nnx", "linen", "optim", "checkpoints"),
    ("plots",),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
EXEMPT = ("__init__", "_version", "__main__")  # top-level files
# Heavy packages, and the layers that may import them.
ONLY_IN = {
    "jax": set(LEVEL) - {"formats"},
    "jaxlib": set(LEVEL) - {"formats"},
    "matplotlib": {"plots"},
    "flax": {"nnx", "linen", "optim", "checkpoints", "plots", "cli"},
    "optax": {"nnx", "linen", "optim", "checkpoints", "plots", "cli"},
    "orbax": {"checkpoints", "cli"},
}


def imported_names(path: Path, package: tuple[str, ...]) -> set[str]:
    """Every dotted name that the file imports, wherever it stands; relative ones made absolute."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            function = function.id if isinstance(function, ast.Name) else function
            first = node.args[0]
            if function in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names.add(str(first.value))
    return names


def wrong_arrows(package: Path, exports: dict[str, str]) -> list[str]:
    """What breaks the order of the layers under `package`; `exports` maps lazy names to homes."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        layer, where = parts[0], path.relative_to(package.parent).as_posix()
        if len(parts) == 1 and layer in EXEMPT:
            continue
        if layer not in LEVEL:
            wrong.append(f"{where}: {layer!r} has no place in the order of layers")
            continue
        holder = (package.name, *parts[:-1])
        for name in sorted(imported_names(path, holder)):
            first, *rest = name.split(".")
            if layer not in ONLY_IN.get(first, LEVEL):
                wrong.append(f"{where}: {layer} imports {name}")
            if first != package.name:
                continue
            target = exports.get(rest[0], rest[0]) if rest else "everything, lazily"
            if target in (layer, "_version", "__version__"):
                continue
            if target not in LEVEL or LEVEL[target] >= LEVEL[layer]:
                wrong.append(f"{where}: {layer} imports {target} ({name})")
    return wrong


@pytest.mark.quick
def test_every_import_points_down_the_layers():
    assert wrong_arrows(PACKAGE, qtoolkit._HOME_OF) == []
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]
    assert len(files) > 10


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "source", "arrow"),
    [
        ("formats/_a.py", "from pkg.casts import cast", "formats imports casts"),
        ("formats/_a.py", "import jax.numpy as jnp", "formats imports jax.numpy"),
        ("formats/_a.py", "def f():\n    from jax import lax", "formats imports jax.lax"),
        ("casts/_a.py", "import pkg.gradients._fake", "casts imports gradients"),
        ("casts/_a.py", "from pkg import scaling", "casts imports scaling"),
        ("casts/_a.py", "from pkg import fake_cast", "casts imports gradients"),
        ("casts/_a.py", "from ..scaling import amax", "casts imports scaling"),
        ("casts/_a.py", "from .. import products", "casts imports products"),
        ("casts/deep/_a.py", "from ...products import dot", "casts imports products"),
        ("casts.py", "from .plots import draw", "casts imports plots"),
        ("scaling/_a.py", "if T:\n    from pkg.products import Rules", "scaling imports products"),
        ("onnx/_a.py", "from pkg.openvino import convert", "onnx imports openvino"),
        ("nnx/_a.py", "from pkg.linen import wrap", "nnx imports linen"),
        ("nnx/_a.py", "from pkg.onnx import cast", "nnx imports onnx"),
        ("checkpoints/_a.py", "from pkg.nnx import wrap", "checkpoints imports nnx"),
        ("checkpoints/_a.py", "from pkg.optim import report", "checkpoints imports optim"),
        ("plots/_a.py", "from pkg.cli import main", "plots imports cli"),
        ("cli/_a.py", "import matplotlib.pyplot as plt", "cli imports matplotlib.pyplot"),
        (
            "cli/_a.py",
            "import importlib\nimportlib.import_module('matplotlib')",
            "cli imports matp",
        ),
        (
            "casts/_a.py",
            "from importlib import import_module as m\n__import__('flax')",
            "imports flax",
        ),
        ("products/_a.py", "import flax", "products imports flax"),
        ("products/_a.py", "import pkg", "products imports everything"),
        ("utils/_a.py", "", "'utils' has no place"),
        ("_helpers.py", "", "'_helpers' has no place"),
    ],
)
def test_the_check_finds_a_wrong_arrow(tmp_path, file, source, arrow):
    package = tmp_path / "pkg"
    sound = {
        "__init__.py": "from pkg import cli",
        "_version.py": "__version__ = '0'",
        "__main__.py": "from pkg.cli import main",
        "formats/_names.py": "import numpy\nfrom pkg.formats._float import E4M3FN",
        "casts/__init__.py": "import jax\nfrom . import _rounding\nfrom pkg.formats import format",
        "nnx/_wrap.py": "import flax\nfrom pkg.products import dot\nfrom pkg import cast",
        "plots/__init__.py": "import matplotlib.pyplot as plt\nfrom ..checkpoints import plan",
        "cli/_demo.py": "from pkg._version import __version__\nfrom pkg import nnx, plots",
    }
    for name, text in sound.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    exports = {"fake_cast": "gradients", "cast": "casts"}
    assert wrong_arrows(package, exports) == []
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(source)
    (found,) = wrong_arrows(package, exports)
    assert arrow in found
    assert found.startswith(f"pkg/{file}: ")


def run(code: str, *, cwd: Path) -> str:
    """The output of `code` in a fresh interpreter that knows nothing of this one."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "matplotlib")
LOADED = f"print(sorted({{name.split('.')[0] for name in sys.modules}} & set({HEAVY!r})))"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "loads"),
    [
        ("import qtoolkit", []),
        ("import qtoolkit; dir(qtoolkit); qtoolkit.__version__; qtoolkit.__all__", []),
        ("import qtoolkit as qt; qt.format('e4m3fn').max_finite; qt.FloatFormat", []),
        ("from qtoolkit.formats import E4M3FN", []),
        ("import qtoolkit; qtoolkit.cast", ["jax", "jaxlib"]),
        ("import qtoolkit, numpy; qtoolkit.encode(numpy.float32(1), 'e5m2')", ["jax", "jaxlib"]),
        ("import qtoolkit; qtoolkit.fake_cast, qtoolkit.dot_general", ["jax", "jaxlib"]),
        ("from qtoolkit import scaling, gradients, products", ["jax", "jaxlib"]),
    ],
)
def test_what_an_import_loads(tmp_path, code, loads):
    assert run(f"import sys\n{code}\n{LOADED}", cwd=tmp_path) == str(loads)


def test_subpackages_import_like_any_package(tmp_path):
    """Each way as the first import of the toolkit, in one interpreter: Flax takes seconds."""
    code = """
        import sys, warnings
        warnings.simplefilter("ignore")  # Flax's own imports warn on some versions
        for code in (
            "from qtoolkit.nnx import wrap; wrap",
            "import qtoolkit.nnx; qtoolkit.nnx.wrap",
            "import qtoolkit; qtoolkit.nnx.wrap",
            "from qtoolkit import nnx; nnx.wrap",
        ):
            for name in [name for name in sys.modules if name.split(".")[0] == "qtoolkit"]:
                del sys.modules[name]
            exec(code, {})
            assert "qtoolkit.nnx" in sys.modules
    """
    run(code, cwd=tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("arguments", [["--help"], ["formats"], ["formats", "--help"]])
def test_light_commands_do_not_load_jax(tmp_path, arguments):
    code = f"""
        import runpy, sys
        sys.argv = ["qtoolkit", *{arguments!r}]
        try:
            runpy.run_module("qtoolkit", run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        print()
        {LOADED}
    """
    output = run(code, cwd=tmp_path)
    assert output.splitlines()[-1] == "[]"
    assert "qtoolkit" in output or "e4m3fn" in output


@pytest.mark.quick
def test_help_of_the_command(tmp_path):
    command = [sys.executable, "-m", "qtoolkit", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("convert", "inspect", "formats", "demo"):
        assert name in done.stdout


# The top level: an explicit list, a lazy table, and imports for tools. All three agree.


@pytest.mark.quick
@pytest.mark.parametrize("name", qtoolkit.__all__)
def test_every_public_name_resolves(name):
    value = getattr(qtoolkit, name)
    assert value is getattr(qtoolkit, name)
    home = qtoolkit._HOME_OF.get(name)
    if home is not None:
        assert value is getattr(getattr(qtoolkit, home), name)


@pytest.mark.quick
def test_the_lists_of_public_names_agree():
    homes = qtoolkit._HOMES
    listed = [name for names in homes.values() for name in names]
    assert len(set(listed)) == len(listed)
    assert sorted(qtoolkit.__all__) == sorted([*homes, *listed, "__version__"])
    assert len(set(qtoolkit.__all__)) == len(qtoolkit.__all__)
    assert set(dir(qtoolkit)) >= set(qtoolkit.__all__)

    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    (block,) = blocks
    for_tools = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 0
        assert all(alias.asname in (None, alias.name) for alias in node.names)
        for_tools[node.module] = {alias.name for alias in node.names}
    assert for_tools.pop("qtoolkit") == set(homes)
    table = {f"qtoolkit.{home}": set(names) for home, names in homes.items() if names}
    assert for_tools == table


@pytest.mark.quick
def test_unknown_attributes_raise():
    with pytest.raises(AttributeError, match="module 'qtoolkit' has no attribute 'nothing'"):
        qtoolkit.nothing  # noqa: B018
    assert not hasattr(qtoolkit, "_HOME")
    with pytest.raises(ImportError, match="nothing"):
        from qtoolkit import nothing  # noqa: F401
