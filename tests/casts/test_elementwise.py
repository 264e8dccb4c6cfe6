"""Elementwise functions as operations: whatever JAX does to operations, it does to them.

Oracle: the same function applied without being one operation, or NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refused import refused

import qtoolkit as qt
from qtoolkit.casts._elementwise import elementwise, look_up
from qtoolkit.casts.internal import ieee_quotient

TABLE = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.float32)


@elementwise
def chosen(x, index, offset):
    """Uses constants, a selection by a function with a jit of its own, and a table."""
    entry = look_up(TABLE, index)
    return jnp.where(x > np.float32(0.5), entry, np.float32(2.5)) + offset


def expected(x, index, offset):
    return np.where(x > 0.5, TABLE[index], np.float32(2.5)) + offset


def given(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    return x, rng.integers(0, 8, shape, dtype=np.int32), x - np.float32(1)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)])
def test_values(shape):
    arguments = given(shape)
    for function in (chosen, jax.jit(chosen)):
        np.testing.assert_array_equal(function(*map(jnp.asarray, arguments)), expected(*arguments))


@pytest.mark.parametrize("shape", [(), (1, 1), (3, 5), (0, 2)])
def test_functions_of_jax_with_a_jit_of_their_own(shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    def function(x):
        return jnp.where(x.astype(bool), jnp.round(x) + x**3, jnp.sign(x))

    np.testing.assert_array_equal(jax.jit(elementwise(function))(x), jax.jit(function)(x))


def test_trees_of_arrays_and_constants():
    x, index, offset = map(jnp.asarray, given((6,)))
    parts = {"index": index, "offset": offset, "limit": "not an array"}

    @elementwise
    def function(x, parts, limit):
        assert parts["limit"] == "not an array"
        entry = look_up(TABLE, jnp.clip(parts["index"], 0, 7))
        return {"sum": jnp.where(x > limit, entry, 2.5) + parts["offset"], "is": x < 0}, None

    out, nothing = jax.jit(lambda x, index, offset: function(x, parts, 0.5))(x, index, offset)
    np.testing.assert_array_equal(out["sum"], expected(*given((6,))))
    np.testing.assert_array_equal(out["is"], np.asarray(x) < 0)
    assert nothing is None


def test_traced_once_for_all_shapes():
    traced = []

    @elementwise
    def function(x, by):
        traced.append(x.shape)
        return x * by

    for shape in ((3,), (4, 5), ()):
        jax.jit(function, static_argnums=1)(jnp.ones(shape), 2.0)
        function(jnp.ones(shape), 2.0)
    assert traced == [()]
    function(jnp.ones(3), 3.0)
    function(jnp.ones(3, jnp.float16), 3.0)
    assert traced == [(), (), ()]


def test_equal_constants_of_other_kinds_are_told_apart():
    @elementwise
    def function(x, by):
        return x.astype(jnp.result_type(by)) * jnp.asarray(by)

    x = jnp.ones(2, jnp.int32)
    assert [function(x, by).dtype for by in (2, 2.0, np.float16(2))] == [
        jnp.int32,
        jnp.float32,
        jnp.float16,
    ]
    signs = [np.signbit(function(jnp.ones(2), np.float32(by))).all() for by in (0.0, -0.0)]
    assert signs == [False, True]


def test_one_operation_in_another_is_part_of_it():
    @elementwise
    def outer(x, index, offset):
        return chosen(x, index, offset) * np.float32(2)

    arguments = given((4,))
    np.testing.assert_array_equal(outer(*map(jnp.asarray, arguments)), 2 * expected(*arguments))
    (equation,) = jax.make_jaxpr(outer)(*arguments).jaxpr.eqns
    assert equation.primitive.name == "elementwise"
    inside = [e.primitive.name for e in equation.params["jaxpr"].jaxpr.eqns]
    assert "elementwise" not in inside
    assert "mul" in inside


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, 0, None), (None, 2, 0), (None, None, 0)])
def test_batches(axes):
    x, index, offset = given((4, 4, 4))
    arguments = [
        a if axis is not None else a[0] for a, axis in zip((x, index, offset), axes, strict=True)
    ]
    got = jax.vmap(chosen, axes)(*arguments)
    rows = [
        np.moveaxis(a, 0 if axis is None else axis, 0)
        for a, axis in zip(arguments, axes, strict=True)
    ]
    for i in range(4):
        one = [
            a if axis is None else row[i]
            for a, row, axis in zip(arguments, rows, axes, strict=True)
        ]
        np.testing.assert_array_equal(got[i], expected(*one))


def test_derivatives_are_zero():
    x, index, offset = map(jnp.asarray, given((3,)))

    def total(x):
        return jnp.sum(chosen(x, index, offset) * x)

    np.testing.assert_array_equal(jax.grad(total)(x), chosen(x, index, offset))
    np.testing.assert_array_equal(jax.hessian(total)(x), np.zeros((3, 3)))
    tangent = jax.jvp(lambda x: chosen(x, index, offset), (x,), (x,))[1]
    np.testing.assert_array_equal(tangent, np.zeros(3))


def test_in_control_flow():
    x, index, offset = map(jnp.asarray, given((3,)))

    def step(carry, _):
        return chosen(carry, index, offset), carry

    last, kept = jax.lax.scan(step, x, None, length=3)
    want = np.asarray(x)
    for i in range(3):
        np.testing.assert_array_equal(kept[i], want)
        want = expected(want, *map(np.asarray, (index, offset)))
    np.testing.assert_array_equal(last, want)
    again = jax.checkpoint(lambda x: jnp.sum(chosen(x, index, offset) * x))
    np.testing.assert_array_equal(jax.grad(again)(x), chosen(x, index, offset))


def test_without_jit():
    arguments = given((5,))
    with jax.disable_jit():
        got = chosen(*map(jnp.asarray, arguments))
    np.testing.assert_array_equal(got, expected(*arguments))


def test_arrays_are_broadcast_to_one_shape():
    x, index, offset = given((3, 5))
    for arguments in ((x, index[:1], offset[:, :1]), (x[0], index, offset[0, 0])):
        got = chosen(*map(jnp.asarray, arguments))
        np.testing.assert_array_equal(got, expected(*arguments))
    with pytest.raises(ValueError, match=r"\(3, 5\).*\(4,\)"):
        chosen(*map(jnp.asarray, (x, index, offset.ravel()[:4])))


def test_arrays_of_operations_by_platform_are_of_one_shape():
    x = jnp.ones(5)
    refused(TypeError, r"elementwise: .*\(5,\) and \(\)", ieee_quotient, x, x[0])


@pytest.mark.devices(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_one_array_sharded(kind):
    arguments = given((4, 6))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x, index, offset = map(jnp.asarray, arguments)
        index = jax.device_put(index, NamedSharding(mesh, PartitionSpec("d")))
        got = jax.jit(chosen)(x, index, offset)
    np.testing.assert_array_equal(got, expected(*arguments))
    assert len(got.sharding.device_set) == 2


@pytest.mark.devices(2)
@pytest.mark.quick
@pytest.mark.parametrize("first", [AxisType.Auto, AxisType.Explicit])
def test_one_mesh_after_another(first):
    """What is traced under one mesh is replayed under the other; not traced before, in any test."""

    @elementwise
    def doubled(x):
        return jnp.full_like(jnp.abs(x), np.float32(2)) * x

    x, _, _ = given((4, 6))
    other = {AxisType.Auto: AxisType.Explicit, AxisType.Explicit: AxisType.Auto}[first]
    for kind in (first, other):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
            got = jax.jit(lambda x: doubled(x))(placed)
        np.testing.assert_array_equal(got, 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: doubled(x))(jnp.asarray(x)), 2 * x)


@pytest.mark.devices(2)
def test_in_shard_map_one_array_varying():
    x, index, offset = given((4, 6))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(
        lambda index: chosen(jnp.asarray(x[:2]), index, jnp.asarray(offset[:2])),
        mesh=mesh,
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec("d"),
    )
    got = np.asarray(jax.jit(function)(index))
    for half in (slice(0, 2), slice(2, 4)):
        np.testing.assert_array_equal(got[half], expected(x[:2], index[half], offset[:2]))


def test_of_symbolic_shape():
    shape = jax.export.symbolic_shape("b, 3")
    structs = [jax.ShapeDtypeStruct(shape, x.dtype) for x in given((1, 3))]
    exported = jax.export.export(jax.jit(chosen))(*structs)
    arguments = given((5, 3))
    np.testing.assert_array_equal(exported.call(*arguments), expected(*arguments))


def test_with_64_bit_types_and_without():
    x = np.array([1, -3], np.int32)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(qt.encode(x, "int64"), x.astype(np.int64).view(np.uint64))
        assert qt.encode(x, "int8").tolist() == [1, 253]
    assert qt.encode(x, "int8").tolist() == [1, 253]


def test_64_bit_constants_in_a_program_without_64_bit_types():
    """An array of NumPy is rounded from its 64 bits, also where a jit meets it."""
    x = np.array([1 + 2.0**-30, -3e300, 0.1])
    want = np.asarray(qt.encode(x, "bfloat16", rounding="toward_positive"))
    got = jax.jit(lambda: qt.encode(x, "bfloat16", rounding="toward_positive"))()
    np.testing.assert_array_equal(got, want)
