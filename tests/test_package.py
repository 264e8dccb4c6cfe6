"""Wheel and sdist, each installed in an environment of its own: `make package-test`.

pip fetches what they depend on. Oracles: numbers of the FP8 paper typed in; mypy for the types.
"""

import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.package

ROOT = Path(__file__).parents[1]
SMOKE = """
    import warnings
    import jax, jax.numpy as jnp
    import qtoolkit as qt
    from importlib.metadata import version

    assert qt.__version__ == version("qtoolkit")
    assert "site-packages" in qt.__file__, qt.__file__
    x = jnp.asarray([0.3, 449.0, jnp.nan])
    assert qt.encode(x, "e4m3fn").tolist() == [42, 126, 127]
    assert qt.quantize(jnp.ones((2, 32)), "mxfp4").dequantize().tolist() == [[1.0] * 32] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flax's own imports warn on some versions
        from flax import nnx
    model = qt.nnx.wrap(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), qt.recipes.te_current)
    assert model(jnp.ones((3, 4))).shape == (3, 2)
    try:
        qt.plots.number_line
    except ModuleNotFoundError as error:
        assert "matplotlib" in str(error)
    else:
        raise AssertionError("matplotlib is here, though the plots extra was not asked for")
"""
USER = """
    import jax
    import jax.numpy as jnp
    import qtoolkit as qt

    fmt: qt.FloatFormat | qt.IntFormat | qt.TableFormat = qt.format("e4m3fn")
    rounding = qt.Stochastic("A", bits=8)
    x: jax.Array = qt.cast(jnp.ones(3), fmt, rounding=rounding, key=jax.random.key(0))
    q: qt.QArray = qt.quantize(x.astype(jnp.float32), qt.BlockFormat.channel("int8"))
    y: jax.Array = q.dequantize()
    recipe: qt.Recipe = qt.Recipe(("e4m3fn", None), gradient="e5m2")
    rules: qt.Rules[qt.Recipe] = qt.Rules({"head": None}, default=recipe)
    z: jax.Array = qt.dot_general(x, x, (((0,), (0,)), ((), ())), recipe=recipe)
"""
WRONG = {
    "qt.cast(jnp.ones(3), 4)": "arg-type",
    "qt.cast(jnp.ones(3), 'e4m3fn', rnd='up')": "call-arg",
    "qt.quantise": "attr-defined",
    "s: str = qt.quantize(jnp.ones(3), 'int8')": "assignment",
}


def call(*command, **options):
    # Without PYTHONPATH: it would put the sources in front of what was installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        **options,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def python(request, built, tmp_path_factory):
    """The interpreter of an environment in which nothing but the package was asked for."""
    folder = tmp_path_factory.mktemp(request.param)
    call(sys.executable, "-m", "venv", folder)
    call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", built[request.param])
    return folder / "bin" / "python"


def test_what_is_in_them(built):
    names = zipfile.ZipFile(built["wheel"]).namelist()
    assert {"qtoolkit/py.typed", "qtoolkit/__init__.pyi", "qtoolkit/casts/_casts.py"} <= {*names}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"qtoolkit"}
    with tarfile.open(built["sdist"]) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "tests/test_package.py"} <= inside
    assert not [name for name in inside if name.startswith(("build/", ".venv"))]


def test_it_runs(python, tmp_path):
    call(python, "-c", textwrap.dedent(SMOKE), cwd=tmp_path)
    command = python.parent / "qtoolkit"
    assert call(command, "--version", cwd=tmp_path).startswith("qtoolkit 0.")
    assert "448" in call(command, "formats", "e4m3fn", cwd=tmp_path)


def test_types_from_outside(python, tmp_path):
    user = tmp_path / "user.py"
    user.write_text(textwrap.dedent(USER))
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python)
    call(*mypy, user, cwd=tmp_path)
    user.write_text("import jax.numpy as jnp\nimport qtoolkit as qt\n" + "\n".join(WRONG) + "\n")
    done = subprocess.run(
        [*map(str, mypy), user], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    for line, (source, code) in enumerate(WRONG.items(), start=3):
        found = [text for text in done.stdout.splitlines() if f":{line}: error" in text]
        assert any(f"[{code}]" in text for text in found), f"{source}\n{done.stdout}"
