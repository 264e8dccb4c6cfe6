"""Puts the numbers of README.md in their place there: what the tests go through.

Command: python tests/conformance/conformance_table.py   (--check writes nothing, and fails if
    README.md is not what it would write)

Numbers are computed from the tests: from their parametrizations, or by running their own bodies
with stand-ins for the operator and its oracle, which only count what they are given. The words
around the numbers are README.md's own: a new row is written there with any numbers.
"""

import contextlib
import importlib
import itertools
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from qtoolkit import pypto

HERE = Path(__file__).parent
TESTS = HERE.parent
README = HERE / "README.md"
PARAM = type(pytest.param())
NUMBER = re.compile(r"\b\d+(?:,\d{3})*\b")  # whole words: those of "f8e4m3" and "i16" are none
SUM = re.compile(r"\d+ run, \d+ pass,\s+\d+ deviate")


# README.md


def sections(text):
    """By operator: the text below its heading."""
    parts = re.split(r"^(?:### `(.+)`|## .+)$", text, flags=re.MULTILINE)
    return {name: body for name, body in zip(parts[1::2], parts[2::2], strict=True) if name}


def rows(body):
    """The table of a section: what, oracle, cases, deviations."""
    lines = re.findall(r"^\| (.+) \|$", body, flags=re.MULTILINE)
    cells = [line.split(" | ") for line in lines]
    assert cells[:2] == [["What", "Oracle", "Cases", "Deviations"], ["---"] * 4]
    return {what: (oracle, cases, deviations) for what, oracle, cases, deviations in cells[2:]}


def numbers(text):
    return [int(n.replace(",", "")) for n in NUMBER.findall(text)]


def filled(cell, found):
    """A cell with other numbers in the place of its own."""
    assert len(numbers(cell)) == len(found), f"{cell!r} has room for other numbers than {found}"
    left = iter(found)
    return NUMBER.sub(lambda _: f"{next(left):,}", cell)


def with_numbers(text, counted):
    """The text of README.md with the numbers that were counted, of some operators or of all.

    Args:
      counted: By operator and row: the numbers of the cases, and those of the deviations.
    """
    for operator, found in counted.items():
        body = sections(text)[operator]
        table = rows(body)
        assert list(table) == list(found), f"{operator}: rows {list(table)}, expected {list(found)}"
        changed = body
        for what, (oracle, cases, deviations) in table.items():
            line = f"| {what} | {oracle} | {cases} | {deviations} |"
            of_cases, of_deviations = found[what]
            deviate = " and ".join(f"{n:,}" for n in of_deviations) or "none"
            changed = changed.replace(
                line, f"| {what} | {oracle} | {filled(cases, of_cases)} | {deviate} |"
            )
        text = text.replace(body, changed)
    tables = [rows(body) for name, body in sections(text).items() if name.startswith("onnx.")]
    official = [
        row for table in tables for what, row in table.items() if what.startswith("official")
    ]
    run_ = sum(numbers(cases)[0] for _, cases, _ in official)
    failed = sum(sum(numbers(deviations)) for *_, deviations in official)
    shown = SUM.search(text)[0]
    return text.replace(shown, filled(shown, [run_, run_ - failed, failed]))


# What the tests go through


class EnoughError(Exception):
    """Ends a test whose further course needs real results."""


def module(path):
    """A test file, by its name: as pytest imports it, so that nobody imports it twice."""
    file = TESTS / path
    for folder in (file.parent, TESTS / "casts"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for the oracles beside the tests
    return importlib.import_module(file.stem)


def values(test, name):
    """What `test` is parametrized with under `name`."""
    (found,) = (m.args[1] for m in test.pytestmark if m.args and m.args[0] == name)
    return list(found)


def parameters(test):
    """The arguments of every item that pytest makes of `test`."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, choices = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        lone = len(names) == 1
        sets = [
            getattr(v, "values", v) if isinstance(v, PARAM) else (v,) if lone else v
            for v in choices
        ]
        axes.append([dict(zip(names, v, strict=True)) for v in sets])
    for combination in itertools.product(*axes):
        yield {name: value for part in combination for name, value in part.items()}


def run(path, test, **stand_ins):
    """Every item of a test, with names of its module replaced."""
    loaded = module(path)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for name, value in stand_ins.items():
            patch.setattr(loaded, name, value)
        function = getattr(loaded, test)
        for arguments in parameters(function):
            with contextlib.suppress(EnoughError):
                function(**arguments)


class Counter:
    """Stands for an operator or an oracle: counts the elements of one argument."""

    def __init__(self, result=None, *, place=0, ends=False):
        self.total, self.calls = 0, 0
        self.result, self.place, self.ends = result, place, ends

    def __call__(self, *args, **kwargs):
        self.total += np.size(args[self.place])
        self.calls += 1
        if self.ends:
            raise EnoughError
        return args[0] if self.result is None else self.result(*args, **kwargs)


def nothing(*args, **kwargs):
    pass


def elements(path, tests, name, place=0, ends=True, **others):
    """How many elements the tests give to what they call `name`."""
    counter = Counter(place=place, ends=ends)
    for test in [tests] if isinstance(tests, str) else tests:
        run(path, test, **{name: counter}, **others)
    return counter.total


def combinations(path, test, name):
    """How many tuples the test takes from a function of itertools, over all of its items."""
    total = 0

    def taken(*args, **kwargs):
        nonlocal total
        total += sum(1 for _ in getattr(itertools, name)(*args, **kwargs))
        raise EnoughError

    run(path, test, itertools=types.SimpleNamespace(**{name: taken}))
    return total


# ONNX

CAST = "onnx/test_onnx_cast.py"
TEXTS = "onnx/test_onnx_strings.py"
QUANTIZE = "onnx/test_onnx_quantize.py"
RANGE = "onnx/test_onnx_range_bit_cast.py"
NODE_TESTS = "onnx/test_onnx_conformance.py"


def official(prefix):
    """Cases of the installed onnx, as that test counts them, and those it knows to deviate."""
    loaded = module(NODE_TESTS)
    return [loaded.CASES[prefix]], [
        n for n in [sum(x.startswith(prefix) for x in loaded.NAN_TO_FLOAT4)] if n
    ]


def every_number_cast():
    tests = (
        "test_every_16_bit_input_to_the_small_floats",
        "test_every_16_bit_input_to_e8m0",
        "test_every_16_bit_input_to_the_other_types",
        "test_every_code_of_the_narrow_types_to_every_type",
    )
    eager = types.SimpleNamespace(jit=lambda f: f, enable_x64=jax.enable_x64)
    given = {"cast": lambda x, *_, **__: x, "assert_codes": nothing, "jax": eager}
    return elements(CAST, tests, "expected", ends=False, **given)


def texts_read(test):
    """Types and numbers of a test that reads text."""
    return [
        len(list(parameters(getattr(module(TEXTS), test)))),
        elements(TEXTS, test, "cast"),
    ]


def texts_written():
    tests = (
        "test_ieee_floats_print_the_fewest_digits_in_plain_notation",
        "test_narrow_floats_print_the_fewest_digits",
        "test_e8m0_prints_its_numbers_in_full",
    )
    return elements(TEXTS, tests, "cast")


def quantized(test, oracle):
    """Elements whose quantized values are compared; each is zero here."""
    dtypes = module(QUANTIZE).DTYPES

    def zeros(x, scale, zero=None, *, output_dtype=None, **_):
        return np.zeros(x.shape, dtypes[output_dtype] if zero is None else zero.dtype)

    counter = Counter(lambda quotient, *_, **__: np.zeros(quotient.shape, np.int64))
    run(QUANTIZE, test, quantize_linear=zeros, **{oracle: counter})
    return counter.total


def ranges(test, **others):
    def counted(*arguments, **_):
        dtype = arguments[0].dtype
        return np.array(list(range(*map(int, arguments))) if dtype.kind == "i" else [], dtype)

    counter = Counter(counted)
    run(RANGE, test, onnx_range=counter, **others)
    return counter.calls


def marks(path, test, *names):
    function = getattr(module(path), test)
    return [len(values(function, name)) for name in names]


def wide_integers():
    test = "test_integers_keep_low_bits_and_floats_round_once"
    return [*marks(CAST, test, "source"), len(module(CAST).INTEGERS)]


# OpenVINO

FAKE_CONVERT = "openvino/test_openvino_fake_convert.py"
CONVERT = "openvino/test_openvino_convert.py"
PROMOTE = "openvino/test_openvino_promote.py"
OV_RANGE = "openvino/test_openvino_range.py"


def fake_converted():
    counter = Counter()
    core = types.SimpleNamespace(fake_convert=counter, assert_same_numbers=nothing)
    given = {"core": core, "fake_convert": lambda x, *_, **__: x}
    run(FAKE_CONVERT, "test_openvino_arithmetic_has_the_bits_of_the_core", **given)
    return counter.total


def fake_converted_exactly():
    counter = Counter()
    core = types.SimpleNamespace(assert_same_numbers=nothing)
    given = {"fake_convert": lambda x, *_, **__: x, "exact": counter, "core": core}
    library = types.SimpleNamespace(fake_convert=lambda x, *_, **__: x)
    test = "test_exact_arithmetic_rounds_every_written_operation_once"
    run(FAKE_CONVERT, test, qtoolkit=library, **given)
    return counter.total


def converted(test):
    return elements(CONVERT, test, "convert")


def converted_from_integers():
    """Values, the same ones to each type, and types."""
    test = "test_exact_from_integers"
    (targets,) = marks(CONVERT, test, "target")
    total = converted(test)
    assert total % targets == 0
    return [total // targets, targets]


def promoted():
    loaded = module(PROMOTE)
    test = loaded.test_every_pair_of_types_at_every_setting
    return len(list(loaded.cells())) * len(list(parameters(test)))


# PyPTO

PYPTO = "pypto/test_pypto_cast.py"


def pypto_elements(*tests):
    """Elements times modes, whatever oracle each test has."""
    loaded, total = module(PYPTO), 0
    check = loaded.check

    def in_every_mode(x, to, modes=tuple(loaded.CastMode), **options):
        nonlocal total
        total += x.size * len(modes)
        raise EnoughError

    def checked(*args, **kwargs):  # a test may check twice
        with contextlib.suppress(EnoughError):
            check(*args, **kwargs)

    for test in tests:
        run(PYPTO, test, in_every_mode=in_every_mode, check=checked)
    return total


def extended():
    new = {(a, b) for a, more in pypto._cast.EXTENDED_PAIRS.items() for b in more}
    known = {(a, b) for a, more in pypto._cast.PAIRS.items() for b in more}
    tests = (
        "test_extended_small_floats",
        "test_extended_pairs_by_the_bit_rule",
        "test_extended_wraps_where_the_page_does_not",
        "test_extended_int32_to_float16_as_torch_in_all_modes",
        "test_extended_int4",
        "test_extended_float32_to_integral_float32",
    )
    return [len(new - known), pypto_elements(*tests)]


# By operator and row: the numbers of the columns "Cases" and "Deviations".
ROWS = {
    "onnx.cast": {
        "official": lambda: official("test_cast_"),
        "every float16, bfloat16 and code of 8 bits and less, to every type": lambda: [
            every_number_cast()
        ],
        "integers of 16 to 64 bits": wide_integers,
        "text to floats": lambda: texts_read("test_text_is_rounded_once_to_every_float_type"),
        "text to integers": lambda: texts_read("test_text_to_integers"),
        "floats to text": lambda: [texts_written()],
        '`arithmetic="reference"`': lambda: marks(
            CAST,
            "test_reference_arithmetic_equals_the_evaluator",
            "target",
            "source",
        ),
    },
    "onnx.cast_like": {
        "official, plain and expanded to Cast": lambda: official("test_castlike_"),
    },
    "onnx.quantize_linear": {
        "official": lambda: official("test_quantizelinear"),
        "to integers, with and without zero point": lambda: [
            quantized("test_integers_by_tensor", "quantized")
        ],
        "to floats": lambda: [quantized("test_floats_are_casts_of_the_quotient", "expected")],
    },
    "onnx.dequantize_linear": {
        "official": lambda: official("test_dequantizelinear"),
        "every code": lambda: marks(QUANTIZE, "test_dequantize_every_code", "name", "dtype"),
    },
    "onnx.dynamic_quantize_linear": {
        "official, plain and expanded": lambda: official("test_dynamicquantizelinear"),
        "eager and jitted": lambda: marks(QUANTIZE, "test_dynamic_quantize_linear", "kind"),
    },
    "onnx.range": {
        "official, plain and expanded": lambda: official("test_range_"),
        "floats": lambda: [ranges("test_every_number_is_rounded_once", exact_range=lambda *_: [])],
        "integers": lambda: [ranges("test_integers")],
    },
    "onnx.bit_cast": {
        "official": lambda: official("test_bitcast"),
        "every pattern of 16 bits and less, random ones of more bits": lambda: [
            sum(len(names) ** 2 for names in module(RANGE).WIDTHS.values())
        ],
    },
    "openvino.fake_convert": {
        '`arithmetic="openvino"`': lambda: [fake_converted()],
        '`arithmetic="exact"`': lambda: [fake_converted_exactly()],
    },
    "openvino.convert": {
        '`arithmetic="openvino"`': lambda: [
            converted("test_openvino_arithmetic_has_the_bits_of_the_core")
        ],
        "exact, floats to floats": lambda: [converted("test_exact_to_floats")],
        "exact, floats to integers and boolean": lambda: [
            converted("test_exact_floats_to_integers")
        ],
        "exact, from integers and boolean": converted_from_integers,
        "exact, float16 and bfloat16 to f4e2m1": lambda: [converted("test_exact_to_f4e2m1")],
        "exact, int16 to i4, u4, u2": lambda: [converted("test_integers_of_few_bits_wrap")],
        "exact, every code of f8e4m3 and f8e5m2": lambda: marks(
            CONVERT, "test_exact_from_float8", "target"
        ),
    },
    "openvino.promoted_type": {
        "every pair of types, ranks known and not, every flag": lambda: [promoted()],
    },
    "openvino.convert_promote_types": {
        "pairs of dtypes, safe and unsafe": lambda: [
            combinations(PROMOTE, "test_pairs_of_dtypes", "combinations_with_replacement")
        ],
    },
    "openvino.range": {
        "argument sets of mixed types, times output types": lambda: [
            combinations(OV_RANGE, "test_1000_ranges", "product")
        ],
    },
    "pypto.cast": {
        "every pair": lambda: [
            len(module(PYPTO).PAIRS),
            len(pypto.CastMode),
            pypto_elements("test_every_pair_in_every_mode"),
        ],
        "printed examples": lambda: [
            sum(name.endswith("printed_example") for name in vars(module(PYPTO)))
        ],
        "documented values, in six modes": lambda: [
            len(list(parameters(module(PYPTO).test_documented_values)))
        ],
        "`satmode=OFF`": lambda: [
            len(module(PYPTO).WRAPPING),
            pypto_elements("test_low_bits_without_saturation"),
        ],
        "`extended=True`": extended,
        "`extended=True`, every code of FP8 and FP4": lambda: [
            len(list(parameters(module(PYPTO).test_extended_small_floats_to_bfloat16_and_float32)))
        ],
    },
}


def counted(operator):
    """By row: the numbers of both columns, as the tests have them."""
    found = {what: count() for what, count in ROWS[operator].items()}
    return {what: n if isinstance(n, tuple) else (n, []) for what, n in found.items()}


def main(arguments):
    text = README.read_text(encoding="utf-8")
    with jax.numpy_dtype_promotion("strict"):  # as in the tests
        new = with_numbers(text, {operator: counted(operator) for operator in ROWS})
    if "--check" not in arguments:
        README.write_text(new, encoding="utf-8")
    elif new != text:
        pairs = zip(text.splitlines(), new.splitlines(), strict=True)
        lines = [f"is       {a}\nexpected {b}" for a, b in pairs if a != b]
        sys.exit("\n".join(["README.md is out of date; run conformance_table.py", *lines]))


if __name__ == "__main__":
    main(sys.argv[1:])
