"""What every test shares."""

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator

import jax
import pytest

import qtoolkit

LAYERS = ("formats", "casts", "scaling", "gradients", "products", "post_training")
OPERATORS = ("onnx", "openvino", "pypto")


# For the meshes. By the configuration, not by XLA_FLAGS: child processes would inherit those.
jax.config.update("jax_num_cpu_devices", 8)

_PROGRAMS = "QTOOLKIT_TESTS_PROGRAMS"  # in the environment of workers, the folder that they share

# The guards of the layers stand against XLA's optimizations, so their tests run as users' programs.
# What is built on them is compiled with few optimizations, in a third of the time.
GUARDED = {"formats", "casts", "scaling", "gradients", "conformance", "exhaustive"}
GUARDED |= {"test_fusion.py", "test_export.py"}
_FEW_OPTIMIZATIONS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):  # 0.12 ends a process that is given this option
    _FEW_OPTIMIZATIONS.append("--xla_cpu_use_fusion_emitters=false")


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        choices=("guarded", "models"),
        help="run what is in GUARDED of tests/conftest.py, or the rest, compiled faster",
    )


def pytest_ignore_collect(collection_path, config):
    """By --part."""
    path = collection_path.relative_to(config.rootpath / "tests")
    part = config.getoption("part")
    if part and path.parts and (path.is_dir() or path.suffix == ".py"):
        return ((path.parts[0] in GUARDED) != (part == "guarded")) or None
    return None


def pytest_configure(config):
    """The workers of pytest-xdist share what they have compiled, for the time of one run.

    Many tests compile programs that others have compiled: a seventh of the suite's CPU time.
    """
    if config.getoption("part") == "models":
        with pytest.MonkeyPatch.context() as patch:  # XLA reads it once; child processes do not
            flags = (os.environ.get("XLA_FLAGS", ""), *_FEW_OPTIMIZATIONS)
            patch.setenv("XLA_FLAGS", " ".join(flags))
            jax.jit(lambda: 0)()
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="qtoolkit-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[_PROGRAMS] = folder.name
        return
    gc.set_threshold(700, 10, 100)  # JAX keeps what it traced: millions of objects, not garbage
    jax.config.update("jax_compilation_cache_dir", os.environ[_PROGRAMS])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Files are not locked: what another worker is still writing is compiled instead.
    config.addinivalue_line("filterwarnings", "ignore:Error .*persistent compilation cache entry")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config, items):
    """Mark as exhaustive the cases of a test that its mark `sample` does not name by their ids.

    Cases named on the command line run in any event.
    """
    for item in items:
        _skip_elsewhere(item)
    if any("[" in argument for argument in config.args):
        return
    families: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        is_exhaustive = item.get_closest_marker("exhaustive") is not None
        if item.get_closest_marker("sample") and not is_exhaustive:
            families.setdefault((str(item.path), item.originalname), []).append(item)
    for (path, name), family in families.items():
        ids = {item.name[len(name) + 1 : -1]: item for item in family}
        sample = family[0].get_closest_marker("sample").args
        if unknown := set(sample) - set(ids):
            raise pytest.UsageError(f"{path}::{name}: sample of {unknown}, expected {list(ids)}")
        for case in set(ids) - set(sample):
            ids[case].add_marker("exhaustive")


def _skip_elsewhere(item: pytest.Item) -> None:
    """Skips what needs more devices than there are, or the arithmetic of XLA's CPU."""
    needed = item.get_closest_marker("devices")
    if needed and needed.args[0] > jax.device_count():
        reason = f"needs {needed.args[0]} devices, {jax.device_count()} here"
        item.add_marker(pytest.mark.skip(reason=reason))
    if item.get_closest_marker("cpu") and jax.default_backend() != "cpu":
        item.add_marker(pytest.mark.skip(reason=f"about XLA's CPU, not {jax.default_backend()}"))


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """No implicit dtype promotion in the layers that are ours alone; Flax and optax promote."""
    layer = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    mode = "strict" if layer in LAYERS + OPERATORS else "standard"
    with jax.numpy_dtype_promotion(mode):
        yield


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """A child that outlives its test fails it, also one that ended and was not waited for."""
    yield
    with contextlib.suppress(ChildProcessError):  # there is none, running or ended
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        raise AssertionError(f"a child process is left: {child or 'running'}")


@pytest.fixture
def run_example() -> Callable[..., None]:
    """Runs the example of a docstring, its first indented paragraph, with what it is given."""

    def run(function: Callable[..., object], **names: object) -> None:
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        example = next(part for part in paragraphs if part.startswith("    "))
        assert len(example.splitlines()) <= 8
        exec(textwrap.dedent(example), {"qtoolkit": qtoolkit, **names})

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """`subprocess.Popen`, with SIGINT as a shell's foreground has it; kills what the test leaves.

    A shell starts background jobs with SIGINT ignored, and their children inherit that.
    """
    started: list[subprocess.Popen] = []

    def popen(command, **options) -> subprocess.Popen:
        # What has a handler here has the default action in the child. `preexec_fn` would fork this
        # process, whose threads JAX warns of.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            started.append(subprocess.Popen(command, process_group=0, **options))
        finally:
            signal.signal(signal.SIGINT, before)
        return started[-1]

    yield popen
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        with process:  # closes its pipes and waits for it
            pass
