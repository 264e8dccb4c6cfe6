"""A function traced once and run with other matmuls: names, origins, and numbers through each loop.

Oracle of the numbers: `evaluated` computes the jaxpr operation by operation, with loops in Python.
It knows a kernel by what a value depends on, and a layer of a stack by counting runs.
"""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P
from rewritten import program_of

import qtoolkit as qt
from qtoolkit.products._program import Seen
from qtoolkit.products.internal import (
    Parameter,
    Planted,
    Program,
    in_module,
    matching,
    tracing_function,
)

LAYERS = 3


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X, W = draw(4, 4), draw(4, 4, seed=1)
STACK, NESTED, BEHIND = (draw(*shape, seed=2) / 2 for shape in ((3, 4, 4), (2, 3, 4, 4), (4, 3, 4)))


# The oracle.


def evaluated(jaxpr, consts, args, multiply):
    """The results of a jaxpr. `args` and results are pairs: an array, and the inputs it comes from.

    Args:
      multiply: Called with (lhs, rhs) as such pairs, and the result as the user wrote it.
    """
    values = dict(zip(jaxpr.invars, args, strict=True))
    values |= {
        variable: (x, frozenset()) for variable, x in zip(jaxpr.constvars, consts, strict=True)
    }
    read = lambda x: (x.val, frozenset()) if isinstance(x, Literal) else values[x]  # noqa: E731
    for eqn in jaxpr.eqns:
        given = [read(x) for x in eqn.invars]
        known = frozenset().union(*(names for _, names in given))
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            plain = lax.dot_general(*(x for x, _ in given), params["dimension_numbers"])
            outs = [(multiply(*given, plain), known)]
        elif name in UNROLLED:
            outs = UNROLLED[name](params, given, multiply)
        else:
            bound = eqn.primitive.bind(
                *(x for x, _ in given), **eqn.primitive.get_bind_params(params)
            )
            bound = bound if eqn.primitive.multiple_results else [bound]
            outs = [(x, known) for x in bound]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def of_jit(params, given, multiply):
    inner = params["jaxpr"]
    return evaluated(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, multiply)


def of_scan(params, given, multiply):
    fixed, carries = params["num_consts"], params["num_carry"]
    consts, carry, xs = given[:fixed], given[fixed:][:carries], given[fixed + carries :]
    steps = range(params["length"])
    ys = {}
    for i in reversed(steps) if params["reverse"] else steps:
        sliced = [(x[i], names) for x, names in xs]
        outs = of_jit(params, [*consts, *carry, *sliced], multiply)
        carry, ys[i] = outs[:carries], outs[carries:]
    stacked = zip(*(ys[i] for i in steps), strict=True)
    return [*carry, *((jnp.stack([x for x, _ in y]), y[0][1]) for y in stacked)]


def of_while(params, given, multiply):
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_step, carry = given[:first], given[first:][:second], given[first + second :]
    while of_jit({"jaxpr": params["cond_jaxpr"]}, [*of_test, *carry], multiply)[0][0]:
        carry = of_jit({"jaxpr": params["body_jaxpr"]}, [*of_step, *carry], multiply)
    return carry


def of_cond(params, given, multiply):
    branch = params["branches"][int(given[0][0])]
    return of_jit({"jaxpr": branch}, given[1:], multiply)


UNROLLED = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call"), of_jit),
    "scan": of_scan,
    "while": of_while,
    "cond": of_cond,
    "shard_map": of_jit,
    **dict.fromkeys(("pvary", "pcast"), lambda params, given, multiply: given),  # of one shard
}

# The functions.


def in_jit(w, x):
    return jax.jit(lambda w, x: jnp.tanh(x @ w) @ w.T)(w, x)


def in_scan(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, w)


def in_reversed_scan(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, w, reverse=True)


def in_nested_scan(w, x):
    return lax.scan(lambda h, ws: in_scan(ws, h), x, w)


def in_scan_over_axis_1(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.moveaxis(w, 1, 0))[0]


def in_scan_by_fixed_kernel(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=LAYERS)[0]


def in_scan_of_jit(w, x):
    step = jax.jit(lambda h, w: jnp.tanh(h @ w))
    return lax.scan(lambda h, w: (step(h, w), None), x, w)[0]


def in_scan_of_remat(w, x):
    step = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
    return lax.scan(lambda h, w: (step(h, w), None), x, w)[0]


def in_while(w, x):
    def goes_on(carry):
        return carry[0] < LAYERS

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


def in_while_that_ends_at_once(w, x):
    return lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


def in_taken_branch(w, x):
    return lax.cond(x[0, 0] < 1e9, lambda x: jnp.tanh(x @ w), lambda x: 2 * x, x)


def in_other_branch(w, x):
    return lax.cond(x[0, 0] < -1e9, lambda x: jnp.tanh(x @ w), lambda x: 2 * x, x)


def in_branch_of_scan(w, x):
    def step(h, pair):
        w, i = pair
        return lax.cond(i == 1, lambda h: jnp.tanh(h @ w), lambda h: h + 1, h), None

    return lax.scan(step, x, (w, jnp.arange(LAYERS)))[0]


def in_remat(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)(w, x)


def in_shard_map(w, x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    return jax.shard_map(
        lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")
    )(w, x)


KERNELS = {
    in_jit: W, in_scan: STACK, in_reversed_scan: STACK, in_nested_scan: NESTED,
    in_scan_over_axis_1: BEHIND, in_scan_by_fixed_kernel: W, in_scan_of_jit: STACK,
    in_scan_of_remat: STACK, in_while: W, in_while_that_ends_at_once: W, in_taken_branch: W,
    in_other_branch: W, in_branch_of_scan: STACK, in_remat: W, in_shard_map: W,
}  # fmt: skip
functions = pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.__name__)


def named(w, x):
    return "kernel", ""


def times_factor(matmul, call, planted):
    """The matmul times the factor that is planted. Sees the largest element of lhs, and the run."""
    factor = planted.arrays["factor"]
    assert factor.shape == ()
    seen = Seen(jnp.max(jnp.abs(call.lhs)), jnp.ones(()))
    return call.plain() * factor, seen


def stack_of(matmul):
    return np.prod(matmul.stack, dtype=int)


@functions
def test_planted_and_seen_pass_through(function):
    """Each layer of a stack has a factor of its own; each use of a kernel outside of one, too."""
    w = KERNELS[function]
    program, leaves, _ = program_of(function, (w, X), named)
    assert {matmul.parameter for matmul in program.matmuls} == {Parameter("", "kernel")}
    factors = {
        m.key: 1 + np.arange(stack_of(m), dtype=np.float32).reshape(m.stack) / 8 + number / 64
        for number, m in enumerate(program.matmuls)
    }
    planted = {
        m.key: Planted({"factor": jnp.asarray(factors[m.key])}, lead=len(m.stack))
        for m in program.matmuls
    }
    outs, seen = jax.jit(lambda leaves: program.run(leaves, times_factor, planted))(leaves)

    runs = []
    # A scan that slices the kernel has one factor for each run; otherwise a run of the n-th matmul.
    in_order = [(matmul, factors[matmul.key].ravel()) for matmul in program.matmuls]
    order = RUNS.get(function, range)

    def multiply(lhs, rhs, plain):
        kernel = [i for i, (_, names) in enumerate((lhs, rhs)) if names == {"kernel"}]
        assert kernel == [1]
        number, layer = list(order(max(1, expected_runs(function))))[len(runs)], 0
        if program.matmuls[0].stack:
            number, layer = 0, number
        elif len(program.matmuls) == 1:
            number = 0
        matmul, values = in_order[number]
        runs.append((matmul.key, layer, float(np.abs(lhs[0]).max())))
        return plain * values[layer]

    jaxpr = jax.make_jaxpr(function)(w, X)
    pairs = [(w, frozenset({"kernel"})), (X, frozenset({"x"}))]
    expected = evaluated(jaxpr.jaxpr, jaxpr.consts, pairs, multiply)
    for got, (one, _) in zip(outs, expected, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-6, atol=1e-6)
    assert len(runs) == expected_runs(function)
    for matmul in program.matmuls:
        largest, count = np.zeros(stack_of(matmul)), np.zeros(stack_of(matmul))
        for key, layer, amax in runs:
            if key == matmul.key:
                largest[layer], count[layer] = max(largest[layer], amax), count[layer] + 1
        for got, one in zip(seen[matmul.key], (largest, count), strict=True):
            np.testing.assert_allclose(np.ravel(got), one, rtol=1e-6)


# In which order the layers of a stack run, where it is not 0, 1, 2, ...
RUNS = {in_reversed_scan: lambda n: reversed(range(n)), in_branch_of_scan: lambda n: [1]}


def expected_runs(function):
    runs = {in_jit: 2, in_nested_scan: 6, in_taken_branch: 1, in_other_branch: 0, in_remat: 2}
    runs |= {in_branch_of_scan: 1, in_shard_map: 1, in_while_that_ends_at_once: 0}
    return runs.get(function, LAYERS)


@functions
def test_a_matmul_that_stays_is_that_of_the_user(function):
    w = KERNELS[function]
    program, leaves, _ = program_of(function, (w, X), named)
    run = lambda leaves: program.run(leaves, lambda *given: (None, None), {})  # noqa: E731
    outs, seen = jax.jit(run)(leaves)
    expected = jax.tree.leaves(jax.jit(function)(w, X))
    for got, one in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(got, one)
    assert seen == {}


@pytest.mark.parametrize(
    "function",
    # JAX has no derivative of lax.while_loop.
    [f for f in KERNELS if f not in (in_while, in_while_that_ends_at_once)],
    ids=lambda f: f.__name__,
)
def test_gradients_pass_through(function):
    """Times a constant factor: the gradient of the user's function with kernels times it."""
    w = KERNELS[function]
    program, _, _ = program_of(function, (w, X), named)

    def halved(w, x):
        outs, _ = program.run([w, x], lambda m, call, _: (call.plain() * 0.5, None), {})
        return sum(jnp.sum(jnp.sin(out)) for out in outs)

    def by_hand(w, x):
        return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(function(w / 2, x)))

    for got, one in zip(
        jax.jit(jax.grad(halved, (0, 1)))(w, X), jax.grad(by_hand, (0, 1))(w, X), strict=True
    ):
        np.testing.assert_allclose(got, one * (1 if got is not None else 0), rtol=1e-5, atol=1e-6)


@pytest.mark.devices(2)
def test_shards_share_what_is_planted_and_seen():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))

    def function(w, x):
        specs = {"in_specs": (P(), P("d")), "out_specs": P("d")}
        return jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)(w, x)

    program, leaves, _ = program_of(function, (W, X), named)
    (matmul,) = program.matmuls
    planted = {matmul.key: Planted({"factor": jnp.float32(3)})}
    (out,), seen = jax.jit(lambda x: program.run(x, times_factor, planted))(leaves)
    np.testing.assert_allclose(out, 3 * (np.asarray(X) @ np.asarray(W)), rtol=1e-5, atol=1e-6)
    largest, runs = seen[matmul.key]
    assert float(largest) == np.abs(X).max()  # of both shards
    assert (float(runs), matmul.times) == (2, 2)


# What stays as the user wrote it.


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


with_jvp.defjvp(lambda primals, dots: (with_jvp(*primals), 7 * dots[0]))


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, w), lambda w, ct: (7 * ct, jnp.zeros_like(w)))


def solved(x, w):
    solve = lambda _, b: jnp.linalg.inv(w + 4 * jnp.eye(4)) @ b  # noqa: E731
    matvec = lambda b: w @ b + 4 * b  # noqa: E731
    return lax.custom_linear_solve(matvec, x, solve, transpose_solve=solve)


OPAQUE = {"custom_jvp": with_jvp, "custom_vjp": with_vjp, "custom_linear_solve": solved}


@pytest.mark.parametrize("kind", OPAQUE)
def test_functions_with_derivatives_of_their_own_stay(kind):
    """They are listed, run as they are, and keep their derivative."""
    function = OPAQUE[kind]
    program, _, _ = program_of(lambda w, x: function(x, w) @ w, (W, X), named)
    *inside, outer = program.matmuls
    assert inside
    assert {matmul.around for matmul in inside} == {kind}
    assert outer.around == ""

    def doubled(x):
        (out,), _ = program.run([W, x], lambda m, call, _: (2 * call.plain(), None), {})
        return out

    np.testing.assert_allclose(doubled(X), 2 * (function(X, W) @ W), rtol=1e-5, atol=1e-5)
    got, expected = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(X)
        for f in (doubled, lambda x: 2 * (function(x, W) @ W))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_matmuls_of_a_derivative_that_the_function_takes_are_known_as_such():
    def function(w, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)

    program, _, _ = program_of(function, (W, X), named)
    assert [matmul.is_derivative for matmul in program.matmuls] == [False, True]
    assert len({matmul.key for matmul in program.matmuls}) == 2


# What is no matmul.


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: jnp.einsum("ij,kl->ijkl", x, w),
        lambda w, x: jnp.einsum("ij,ij->ij", x, w),
        lambda w, x: x[:0] @ w,
        lambda w, x: x * w,
    ],
    ids=["outer", "elementwise", "empty", "multiplied"],
)
def test_sums_over_nothing_are_no_matmuls(function):
    program, leaves, _ = program_of(function, (W, X), named)
    assert program.matmuls == []
    (out,), _ = program.run(leaves, None, {})
    np.testing.assert_array_equal(out, function(W, X))


# Names.


def two_uses(w, x):
    return (x @ w) @ w


def names_in(function, path=""):
    return [m.key for m in program_of(function, (W, X), named, path)[0].matmuls]


def test_several_uses_of_a_kernel_are_named_by_their_places():
    """By what is computed there; the second of two that are alike has a number."""

    def both(w, x):
        x = jnp.tanh(x @ w)
        return jnp.tanh(x @ w) @ jnp.eye(4)

    def loop(w, x):
        for _ in range(3):
            x = x @ w
        return x

    assert names_in(lambda w, x: x @ w, "mlp") == [("mlp", "kernel")]
    (path, first), (_, second), *_ = names_in(both, "mlp")
    assert path == "mlp"
    assert first.split(".")[-1] == "both@matmul(x,w)"
    assert second.split(".")[-1] == "both@matmul(x,w)[2]"
    assert first.startswith("kernel@")
    in_loop = [name for _, name in names_in(loop)]
    assert in_loop == [in_loop[0], f"{in_loop[0]}#2", f"{in_loop[0]}#3"]
    assert in_loop[0].endswith("loop@matmul(x,w)")


def test_states_belong_to_the_same_uses_in_other_calls():
    """`matching`: of the states that one call has made, to the matmuls of another call."""

    def function(w, x, *, twice=True, skips=False):
        h = x if skips else x @ x
        h = h @ w
        return (h @ w if twice else h) @ h

    def uses(**options):
        call = lambda w, x: function(w, x, **options)  # noqa: E731
        return program_of(call, (W, X), named)[0].matmuls

    every = [m.key for m in uses()]
    assert len(set(every)) == 4
    assert matching(uses(), every) == {key: key for key in every}
    fewer = matching(uses(skips=True), every)
    assert fewer == {key: key for key in every[1:]}
    # The only use of a kernel has another name in the call that knows of one.
    once = matching(uses(twice=False), every)
    assert once[every[0]] == every[0]
    assert once["", "kernel"] == every[1]
    alone = [m.key for m in uses(twice=False)]
    assert matching(uses(), alone).keys() & {every[1], every[2]} == set()
    assert matching(uses(twice=False), []) == {}


def test_two_activations_are_named_by_their_place():
    """No other matmul and no other line of the file shifts it."""

    def attend(x):
        return x @ x.T

    def function(w, x, *, skips=False):
        h = x if skips else x @ x
        return attend(h) + attend(h @ w)

    of = lambda **options: [  # noqa: E731
        matmul.key
        for matmul in program_of(lambda w, x: function(w, x, **options), (W, X), named)[0].matmuls
    ]
    every, fewer = of(), of(skips=True)
    assert [key for key in every if key in fewer] == fewer
    assert len(every) == len(set(every)) == len(fewer) + 1 == 4
    assert [name for _, name in fewer if "attend@matmul(x,x_T)" in name]
    assert ("", "kernel") in fewer


ATTENTION = """
import jax.numpy as jnp

def attention(w, x):
    weights = jnp.einsum("bd,cd->bc", x @ w, x)
    return weights @ x
"""
MOVED = ATTENTION.replace("    weights", "    # Another line.\n\n    weights")
MOVED = MOVED.replace("einsum(", "einsum(\n        ")


def names_in_file(path, source):
    path.write_text(source)
    linecache.checkcache()
    module = {}
    exec(compile(source, path, "exec"), module)
    return [name.split(".")[-1] for _, name in names_in(module["attention"])]


def test_names_stay_when_lines_move(tmp_path):
    names = names_in_file(tmp_path / "first.py", ATTENTION)
    assert names[1:] == ["attention@einsum(bd,cd-bc,xw,x)", "attention@matmul(weights,x)"]
    assert names_in_file(tmp_path / "second.py", MOVED) == names


def test_without_source_lines_and_columns_name_a_place(tmp_path):
    module = {}
    source = "def attention(w, x):\n    return (x @ w) @ x\n"
    exec(compile(source, tmp_path / "none.py", "exec"), module)
    assert names_in(module["attention"])[1][1].endswith(".attention@1:11")


def test_a_kernel_belongs_to_its_owner_and_two_activations_to_who_runs():
    def function(w, x):
        with in_module("head"):
            return (x @ w) @ x

    program, _, _ = program_of(function, (W, X), named, path="embed")
    first, second = program.matmuls
    assert (first.path, first.name, first.module) == ("embed", "kernel", "head")
    assert (second.path, second.module) == ("head", "head")
    assert second.parameter is None


def test_each_call_of_a_function_has_the_same_names():
    """A loss that calls a model twice: both calls read the same state."""
    other = draw(4, 4, seed=3)

    def function(leaves):
        w, x = leaves
        outs = []
        for _ in range(2):
            with in_module("model"):
                outs.append(two_uses(w, x))
        return outs, None

    with tracing_function():
        program = Program.of(function, [other, X], [Parameter("model", "kernel"), None])
    keys = [matmul.key for matmul in program.matmuls]
    assert keys[:2] == keys[2:]
    assert len(set(keys)) == 2
    assert [matmul.call for matmul in program.matmuls] == [0, 0, 1, 1]


# Origins.

ORIGINS = {
    "cast": (lambda w, x: w.astype(jnp.bfloat16), "w", ()),
    "transpose": (lambda w, x: w.T, "w", (1, 0)),
    "twice": (lambda w, x: w.T.T, "w", (0, 1)),
    "scaled": (lambda w, x: 2 * w + jnp.arange(4.0), "w", None),
    "sliced": (lambda w, x: w[:2], "w", None),
    "in_jit": (lambda w, x: jax.jit(lambda w: w * 2)(w), "w", None),
    "in_cond": (lambda w, x: lax.cond(x[0, 0] > 0, lambda w: w, lambda w: 2 * w, w), None, None),
    "mixed": (lambda w, x: w * x, None, None),
    "input": (lambda w, x: jnp.tanh(x), None, None),
    "constant": (lambda w, x: jnp.eye(4) + 1, None, None),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_where_an_operand_comes_from(name):
    """Oracle: which inputs move it, by derivatives."""
    function, parameter, order = ORIGINS[name]
    ones = jnp.ones((1, 4))
    names = lambda w, x, ones: ("w", "", "")  # noqa: E731

    def with_matmul(w, x, ones):
        y = function(w, x).astype(jnp.float32)
        return jnp.sum(x) * ones @ (y.T if y.shape[0] != 4 else y)

    program, _, _ = program_of(with_matmul, (W, X, ones), names)
    (matmul,) = program.matmuls
    origin = matmul.origins[1]
    assert (None if origin.parameter is None else origin.parameter.name) == parameter
    by_w, by_x = (
        bool(jnp.any(jax.jacfwd(lambda a, put=put: function(*put(a)).astype(jnp.float32))(at)))
        for at, put in ((W, lambda a: (a, X)), (X, lambda a: (W, a)))
    )
    is_choice = name == "in_cond"  # whose index is no operand of a derivative
    assert (parameter is not None) == (by_w and not by_x and not is_choice)
    assert origin.is_constant == (not by_w and not by_x)
    assert origin.is_trained == by_w
    if name != "cast":  # the test casts it back
        assert origin.order == order


def test_the_origin_of_a_loop_holds_for_all_of_its_steps():
    """A carry that begins as the kernel and goes on as an activation is none."""

    def function(w, x):
        return lax.scan(lambda h, _: (x @ h, None), w, None, length=2)[0]

    program, _, _ = program_of(function, (W, X), named)
    (matmul,) = program.matmuls
    assert matmul.parameter is None
    assert matmul.origins[1].is_trained


def test_parameters_that_something_else_uses_are_noted():
    def names(a, b, c, d, x):
        return "a", "b", "c", "d", ""

    def function(a, b, c, d, x):
        return x @ a + c, x.astype(jnp.bfloat16) @ b.T.astype(jnp.bfloat16), d

    program, _, _ = program_of(function, (W, W, W, W, X), names)
    assert {parameter.name for parameter in program.other_uses} == {"c", "d"}


MOVES = {
    "swapaxes": lambda x: x.swapaxes(-1, -2),
    "transposed": lambda x: x.transpose(2, 0, 1),
    "elementwise": lambda x: jnp.tanh(x) * 2,
    "squeezed": lambda x: x[:, None].swapaxes(2, 3)[:, 0],
    "broadcast": lambda x: jnp.broadcast_to(x.mT[:, None], (2, 5, 4, 3)),
    "padded": lambda x: jnp.pad(x.mT, ((0, 0), (0, 1), (0, 0))),
}


@pytest.mark.parametrize("name", MOVES)
def test_where_features_lie(name):
    """A number in one feature of all tokens: the results differ along no other axis alone."""
    function = MOVES[name]
    x = np.zeros((2, 3, 4), np.float32)
    x[..., 3] = 1

    def with_matmul(w, x):
        y = function(x)
        return jnp.einsum("...i,...i->...", y, y)

    program, _, _ = program_of(with_matmul, (W, jnp.asarray(x)), named)
    place = program.matmuls[0].origins[0].features
    out = np.asarray(function(jnp.asarray(x)))
    others = tuple(axis for axis in range(out.ndim) if axis - out.ndim != place)
    assert np.ptp(out, axis=place).max() > 0
    assert np.ptp(out, axis=others).max() == 0


# What a matmul rounds.


def operands_of(function, w, x=X):
    """(lhs, rhs) of the first matmul, as a recipe gets them."""
    program, leaves, _ = program_of(function, (w, x), named)
    look = lambda matmul, call, _: (None, Seen((call.lhs, call.rhs)))  # noqa: E731
    _, seen = program.run(leaves, look, {})
    return next(iter(seen.values())).largest


def test_kernels_are_rounded_from_their_own_dtype():
    """A bfloat16 copy from its float32 original, also behind a transpose and in a loop."""
    half = lambda a: a.astype(jnp.bfloat16)  # noqa: E731
    functions = {
        "cast": lambda w, x: half(x) @ half(w),
        "transposed": lambda w, x: half(x) @ half(w).T,
        "in jit": lambda w, x: jax.jit(lambda x, w: x @ w.T)(half(x), half(w)),
        "in remat": lambda w, x: jax.checkpoint(lambda x, w: x @ w)(half(x), half(w)),
    }
    for name, function in functions.items():
        _, rhs = operands_of(function, W)
        expected = W.T if name in ("transposed", "in jit") else W
        assert rhs.dtype == jnp.float32, name
        np.testing.assert_array_equal(rhs, expected, err_msg=name)
    _, changed = operands_of(lambda w, x: half(x) @ -half(w), W)
    np.testing.assert_array_equal(changed, -half(W))
    assert changed.dtype == jnp.bfloat16


def test_activations_are_rounded_as_the_function_gives_them():
    lhs, _ = operands_of(lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), W)
    assert lhs.dtype == jnp.bfloat16


STORED = qt.quantize(W, "int8")
OF_STORED = {
    "plain": (lambda w, x: x @ w, True),
    "transposed": (lambda w, x: x @ w.T, True),
    "in jit": (lambda w, x: jax.jit(lambda w, x: x @ w)(w, x), True),
    "reshaped": (lambda w, x: x @ w.reshape(2, 8).reshape(4, 4), True),
    "cast": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), True),
    "doubled": (lambda w, x: x @ (2 * w), False),
}


@pytest.mark.parametrize("name", OF_STORED)
def test_stored_kernels_come_as_codes(name):
    function, is_stored = OF_STORED[name]
    _, rhs = operands_of(function, STORED)
    assert isinstance(rhs, qt.QArray) == is_stored
    dense = np.asarray(STORED.dequantize())
    expected = {"transposed": dense.T, "doubled": 2 * dense}.get(name, dense)
    np.testing.assert_array_equal(rhs.dequantize() if is_stored else rhs, expected)
    program, leaves, _ = program_of(function, (STORED, X), named)
    (out,), _ = program.run(leaves, lambda *given: (None, None), {})
    np.testing.assert_array_equal(out, function(STORED.dequantize(), X))


STACKS = {
    "one scale for all": ("int8", False),
    "a scale for each layer": (qt.BlockFormat.channel("int8", 0), True),
    "blocks": ("mxfp8_e4m3", True),
}


@pytest.mark.parametrize("name", STACKS)
def test_scans_slice_stored_kernels(name):
    """To codes, if each slice has scales of its own; else to arrays of the same values."""
    spec, is_stored = STACKS[name]
    stored = qt.quantize(draw(3, 32, 32), spec)
    x = draw(2, 32, seed=4)
    program, leaves, _ = program_of(in_scan, (stored, x), named)
    kinds = []

    def look(matmul, call, planted):
        kinds.append(isinstance(call.rhs, qt.QArray))
        return None, None

    outs, _ = program.run(leaves, look, {})
    expected = jax.tree.leaves(in_scan(stored.dequantize(), x))
    for got, one in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(got, one)
    assert set(kinds) == {is_stored}
