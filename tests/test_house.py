"""The house: who imports whom, and what loads when."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from each import each
from refused import refused

import qtoolkit

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(qtoolkit.__file__).resolve().parent

# From the bottom up: each layer imports only from layers before it; those in one row not at all.
LAYERS = (
    ("formats",),
    ("casts",),
    ("scaling",),
    ("gradients", "plots"),
    ("products",),
    ("post_training",),
    ("onnx", "openvino", "pypto", "nnx", "linen", "optim", "checkpoints"),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
EXEMPT = ("__init__", "_names", "_version", "__main__")  # top-level files
# Heavy packages, and the layers that may import them.
ONLY_IN = {
    "jax": set(LEVEL) - {"formats", "cli"},
    "jaxlib": set(LEVEL) - {"formats", "cli"},
    "matplotlib": {"plots"},
    "flax": {"nnx", "linen", "optim", "checkpoints", "plots"},
    "optax": {"nnx", "linen", "optim", "checkpoints", "plots"},
    "orbax": {"checkpoints"},
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
            if target in (layer, "_names", "_version", "__version__"):
                continue
            if target not in LEVEL or LEVEL[target] >= LEVEL[layer]:
                wrong.append(f"{where}: {layer} imports {target} ({name})")
    return wrong


@pytest.mark.quick
def test_every_import_points_down_the_layers():
    assert wrong_arrows(PACKAGE, qtoolkit._HOME_OF) == []
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]
    assert len(files) > 10


def files_in_a_circle(package: Path) -> list[str]:
    """Files of a package from which imports, wherever they stand, lead back to the same file.

    The `__init__` of a package inside it counts, if a name is imported from it.
    """
    files = [path for path in package.rglob("*.py") if path != package / "__init__.py"]
    names = {}
    for path in files:
        parts = path.relative_to(package.parents[1]).with_suffix("").parts
        names[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    arrows = {}
    for name, path in names.items():
        holder = name if path.stem == "__init__" else name.rpartition(".")[0]
        arrows[name] = set()
        for imported in imported_names(path, tuple(holder.split("."))):
            parts = imported.split(".")
            prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            arrows[name] |= {next(filter(names.__contains__, prefixes), name)} - {name}

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        while new := {t for n in found | {name} for t in arrows[n]} - found:
            found |= new
        return found

    return sorted(name for name in names if name in reached(name))


@pytest.mark.quick
@pytest.mark.parametrize("package", sorted(LEVEL))
def test_no_files_of_a_package_import_one_another_in_a_circle(package):
    assert files_in_a_circle(PACKAGE / package) == []


# Two tiers of names: `__init__` for users, `internal.py` for the packages above it. All other files
# of a package are its own.


def attributes_of_imports(path: Path) -> set[str]:
    """What the file reads of imported modules: `from pkg import casts; casts._bits` in full."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        f"{module}{chain.removeprefix(local)}"
        for local, module in modules.items()
        for chain in chains
        if chain.startswith(f"{local}.") and chain.replace(".", "").isidentifier()
    }


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")


def private_names_of_others(folder: Path, package: str) -> list[str]:
    """Where a file under `folder` uses a private name of another part of `package` than its own."""
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        own, *rest = path.relative_to(folder).with_suffix("").parts
        holder = (package, own, *rest[:-1]) if rest else (package,)
        for name in sorted(imported_names(path, holder) | attributes_of_imports(path)):
            first, *parts = name.split(".")
            if first == package and parts[:1] != [own] and any(map(is_private, parts[1:])):
                wrong.append(f"{path.relative_to(folder).as_posix()}: {name}")
    return wrong


@pytest.mark.quick
def test_nobody_uses_a_private_name_of_another_package():
    assert private_names_of_others(PACKAGE, "qtoolkit") == []
    assert private_names_of_others(ROOT / "experiments", "qtoolkit") == []
    tiers = {"__init__.py", "internal.py"}
    inside = {path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert {path for path in inside if path.name not in tiers and path.name[0] != "_"} == set()


def private_names_of_tests(tests: Path) -> list[str]:
    """Where a test uses a private name of a module that it is not named after.

    `test_bits.py`, `test_bits_of_nan.py` and `test_casts_bits.py` of tests/casts may use
    `qtoolkit.casts._bits`; tests with other packages, in interop and cuda, any module that they
    are named after.
    """
    wrong = []
    for path in sorted(tests.rglob("*.py")):
        folder = path.relative_to(tests).parts[0]
        names = imported_names(path, ())
        if re.search(r"\w\._[a-z]", path.read_text(encoding="utf-8")):  # the rest takes seconds
            names |= attributes_of_imports(path)
        for name in sorted(names):
            first, *parts = name.split(".")
            private = next(filter(is_private, parts[1:]), None)
            if first != "qtoolkit" or private is None:
                continue
            is_of_folder = folder in (parts[0], "interop", "cuda")
            stems = (f"test{private}_", f"test_{parts[0]}{private}_")
            if not (is_of_folder and f"{path.stem}_".startswith(stems)):
                wrong.append(f"{path.relative_to(tests).as_posix()}: {name}")
    return wrong


@pytest.mark.quick
def test_no_test_uses_a_private_module_but_the_test_of_that_module():
    assert private_names_of_tests(ROOT / "tests") == []


# Bits: one layer reads those of JAX's arrays, and two operators whose pages are about bit patterns.
# Bytes of NumPy's arrays are read on the host, where files and texts are. Each with its reason.
BIT_CASTS = ("bitcast_convert_type", "bitcast_convert_type_p")
VIEWS = ("view", "frombuffer")  # JAX's arrays have a method `view`, too
MAY_CAST_BITS = {
    "casts/": "the layer that knows bits",
    "onnx/_bit_cast.py": "the operator's page says what bits become",
    "openvino/_reference.py": "bit patterns of OpenVINO's core",
}
MAY_VIEW_BYTES = {
    "checkpoints/": "containers hold bytes, which are read and written on the host",
    "onnx/_cast.py": "JAX has no float6, so the result is an array of NumPy",
    "onnx/_strings.py": "numbers become text on the host",
    "scaling/_histogram.py": "edges of bins are constants, made in NumPy",
}


def readers_of_bits(path: Path) -> set[str]:
    """What the file names of `BIT_CASTS`, and what it calls or imports of `VIEWS`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        named = [getattr(node, field, None) for field in ("id", "attr", "name", "value")]
        found |= {name for name in named if isinstance(name, str) and name in BIT_CASTS}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & set(VIEWS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {node.func.attr} & set(VIEWS)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            found |= {getattr(node.args[1], "value", None)} & set(VIEWS)
    return found


def files_with_bit_casts(package: Path) -> set[str]:
    """The files under `package` that read bits, or bytes, and may not."""
    wrong = set()
    for path in package.rglob("*.py"):
        file, found = path.relative_to(package).as_posix(), readers_of_bits(path)
        allowed = set()
        if file.startswith(tuple(MAY_CAST_BITS)):
            allowed |= {*BIT_CASTS, *VIEWS}
        if file.startswith(tuple(MAY_VIEW_BYTES)):
            allowed |= {*VIEWS}
        if found - allowed:
            wrong.add(file)
    return wrong


@pytest.mark.quick
def test_only_casts_reads_bits():
    assert files_with_bit_casts(PACKAGE) == set()
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    for place in (*MAY_CAST_BITS, *MAY_VIEW_BYTES):
        found = [readers_of_bits(path) for name, path in files.items() if name.startswith(place)]
        assert any(found), f"{place} reads neither bits nor bytes: take it off the list"


# One way to know a parameter: a call is traced to a program. What these would be is a second one.
PROGRAMS = ("products", "nnx", "linen", "post_training")
CONTEXTS = ("make_user_context", "ContextVar")  # what code around a call says to code inside
MAY_SET_CONTEXTS = "products/_calls.py"
MAY_WALK_LOOPS = "products/_loops.py"


def of_programs(package: Path) -> dict[str, ast.Module]:
    """The files of `PROGRAMS`, parsed."""
    files = (path for part in PROGRAMS for path in sorted((package / part).rglob("*.py")))
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in files
    }


def called(tree: ast.AST) -> list[str]:
    """The last names of all functions that are called: "make_user_context" of jax's."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(function).rsplit(".", 1)[-1] for function in functions]


def ways_around_a_program(package: Path) -> list[str]:
    """Where a file under `package` knows arrays by identity, or intercepts what JAX traces."""
    wrong = []
    for file, tree in of_programs(package).items():
        if "id" in called(tree):
            wrong.append(f"{file}: id(...)")
        for node in ast.walk(tree):
            names = [getattr(node, field, None) for field in ("id", "attr", "name", "module")]
            if "weakref" in names:
                wrong.append(f"{file}: weakref")
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
                wrong += [f"{file}: {node.name}({base})" for base in bases & {"Trace", "Tracer"}]
    return wrong


def loops_named(tree: ast.AST) -> bool:
    """Whether a file names the primitives of loops, as whoever walks into them does."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {"scan", "while"} <= strings


@pytest.mark.quick
def test_a_model_is_known_by_its_program_alone():
    assert ways_around_a_program(PACKAGE) == []


@pytest.mark.quick
def test_two_contexts_in_one_file():
    made = {
        file: [name for name in called(tree) if name in CONTEXTS]
        for file, tree in of_programs(PACKAGE).items()
    }
    assert {file for file, names in made.items() if names} == {MAY_SET_CONTEXTS}
    assert len(made[MAY_SET_CONTEXTS]) == 2


@pytest.mark.quick
def test_one_file_walks_loops():
    walking = {file for file, tree in of_programs(PACKAGE).items() if loops_named(tree)}
    assert walking == {MAY_WALK_LOOPS}


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
    for name in ("convert", "inspect", "formats"):
        assert name in done.stdout


# The top level: a lazy table for Python, a stub for type checkers.


@pytest.mark.quick
@each("name", dir(qtoolkit))
def test_every_public_name_resolves(name):
    value = getattr(qtoolkit, name)
    assert value is getattr(qtoolkit, name)
    home = qtoolkit._HOME_OF.get(name)
    if home is not None:
        assert value is getattr(getattr(qtoolkit, home), name)


def stub_homes(stub: str) -> dict[str, str]:
    """The module that a stub imports each name from; only `from x import y as y` re-exports y."""
    homes = {}
    for node in ast.parse(stub).body:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            assert node.level == 0, ast.unparse(node)
            assert alias.asname == alias.name, ast.unparse(node)
            assert alias.name not in homes, ast.unparse(node)
            homes[alias.name] = node.module
    return homes


@pytest.mark.quick
def test_the_stub_has_the_names_and_homes_of_the_lazy_table():
    table = {"__version__": "qtoolkit._version"}
    table |= dict.fromkeys(qtoolkit._NAMES_BY_PACKAGE, "qtoolkit")
    table |= {name: f"qtoolkit.{home}" for name, home in qtoolkit._HOME_OF.items()}
    assert stub_homes((PACKAGE / "__init__.pyi").read_text(encoding="utf-8")) == table


@pytest.mark.quick
def test_no_top_level_name_is_given_twice():
    assert len(set(qtoolkit.__all__)) == len(qtoolkit.__all__)
    listed = sum(map(len, qtoolkit._NAMES_BY_PACKAGE.values()))  # a name with two homes has one key
    assert listed == len(qtoolkit._HOME_OF)
    assert dir(qtoolkit) == sorted([*qtoolkit.__all__, "plots"])  # which needs an extra


@pytest.mark.quick
def test_unknown_attributes_raise():
    with refused(AttributeError, "module 'qtoolkit' has no attribute 'nothing'"):
        qtoolkit.nothing  # noqa: B018
    assert not hasattr(qtoolkit, "_HOME")
    with refused(ImportError, "nothing"):
        from qtoolkit import nothing  # noqa: F401
