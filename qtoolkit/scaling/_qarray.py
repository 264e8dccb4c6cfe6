"""`QArray`: codes, and the scales that make numbers of them."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from qtoolkit.casts import pack, unpack
from qtoolkit.casts.internal import (
    FLOATS,
    broadcast_like,
    differentiable_in_dtype,
    dtype_from_codes,
    linear_in_dtype,
    linear_product,
    serializable,
)
from qtoolkit.formats import BlockFormat, FloatFormat
from qtoolkit.scaling import _views as views
from qtoolkit.scaling._blocks import Blocks
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import dequantized
from qtoolkit.scaling._input_transform import InputTransform, Rotation
from qtoolkit.scaling._scales import differentiable_scale

_LEAVES = ("codes", "scale", "tensor_scale", "zero_point", "factors")
_STATIC = ("spec", "dtype", "lengths", "packed_size", "rotation")


@serializable
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QArray:
    """A quantized array: x ~ (q - zero point) * scale * tensor scale, for the values q of `codes`.

    A pytree: its leaves are codes, scales and zero points that are not None; all else is static.
    `quantize` makes one; so may you, from codes and scales of another system.

    Attributes:
      codes: Unsigned integers as `encode` writes them, dtype `spec.element.code_dtype`, in the
        shape of the array; or packed by `pack` along its last axis, uint8.
      scale: One for each block, with as many axes as the array, in the dtype of `spec.scale`, or
        that of its codes if it has none. None if `spec` has no scale.
      spec: The formats, and how arrays of any shape are cut into blocks; `lengths` has the lengths
        of blocks in this array.
      tensor_scale: In the dtype of `spec.tensor_scale`; a scalar, or one for each index of the
        first axes where arrays were stacked, as `vmap` does. It divides if
        `spec.tensor_scale_divides`.
      zero_point: int32, the shape of `scale`.
      dtype: The dtype of the numbers x: float32, float16 or bfloat16.
      lengths: The length of a block along each of the last axes; axes added in front of them, as
        `vmap` adds them, have length 1. None: as `spec` says.
      packed_size: The length of the last axis where codes are packed, else None.
      factors: For the kernel of a matmul whose inputs are divided by factors first (AWQ,
        SmoothQuant): float32, with as many axes as the array, of length 1 but along those that are
        summed over. Codes and scales are those of x * factors. None: there are none.
      rotation: Likewise, (block, seed, axis): codes and scales are those of the Hadamard transform
        of x (times its factors) along this axis, counted from the end. Products transform the other
        operand in the same way. None: there is none.

    Invariants, checked when you make one and by `dequantize`, not when JAX rebuilds the tree: along
    an axis with n elements and blocks of b, `scale` has ceil(n / b) elements; dtypes are as above;
    a scale or zero point that `spec` does not have is None. `flax.serialization` and `jax.export`
    store it.

    Examples:
      >>> codes = qt.encode(jnp.asarray([[1.0, -2.0], [3.0, 4.0]]), "e4m3fn")
      >>> scale = jnp.asarray([[0.5], [10.0]])  # from elsewhere: one for each row
      >>> q = qt.QArray(codes, scale, qt.BlockFormat.token("e4m3fn"))
      >>> q.dequantize()
      Array([[ 0.5, -1. ],
             [30. , 40. ]], dtype=float32)
      >>> q.shape, q.dtype
      ((2, 2), dtype('float32'))
    """

    codes: jax.Array
    scale: jax.Array | None
    spec: BlockFormat
    tensor_scale: jax.Array | None = None
    zero_point: jax.Array | None = None
    dtype: Any = "float32"
    lengths: tuple[int, ...] | None = None
    packed_size: int | None = None
    factors: jax.Array | None = None
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _float_dtype("QArray", self.dtype))
        if not isinstance(self.spec, BlockFormat):
            raise TypeError(f"QArray: spec is a {type(self.spec).__name__}, expected a BlockFormat")
        self._check_codes()
        if self.lengths is None:
            object.__setattr__(self, "lengths", self.spec.block_lengths(self.shape))
        self._check_lengths()
        counts = self.blocks.counts
        spec = self.spec
        self._check("scale", _stored_dtype(spec.scale), counts)
        self._check("zero_point", np.dtype("int32") if spec.zero_point else None, counts)
        second = self.tensor_scale
        batch = self.shape[: getattr(second, "ndim", 0)]
        self._check("tensor_scale", _stored_dtype(spec.tensor_scale), batch)
        if self.factors is not None:
            got = getattr(self.factors, "shape", ())
            pairs = zip(got, self.shape, strict=False)
            if len(got) != self.ndim or any(n not in (1, m) for n, m in pairs):
                raise ValueError(
                    f"QArray: factors have shape {got}, expected one that broadcasts to "
                    f"{self.shape}, with as many axes"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.codes.shape)
        return shape if self.packed_size is None else (*shape[:-1], self.packed_size)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zero points and factors."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def sharding(self) -> Any:
        """The sharding of the codes."""
        return self.codes.sharding

    @property
    def blocks(self) -> Blocks:
        assert self.lengths is not None
        # `vmap` and `scan` add or remove leading axes of the leaves, and leave `lengths` as it is.
        rank = len(self.shape)
        lengths = (1,) * (rank - len(self.lengths)) + self.lengths[
            max(len(self.lengths) - rank, 0) :
        ]
        return Blocks(self.shape, lengths)

    @property
    def transform(self) -> InputTransform:
        """What the other operand of a product undergoes: `factors` and `rotation`."""
        return InputTransform(self.factors, self.rotation)

    @property
    def elements(self) -> jax.Array:
        """The values `q` in the element format's own dtype: float8_e4m3fn for "e4m3fn".

        Raises:
          TypeError: JAX has no arrays of that format; use `codes`.
        """
        element = self.spec.element
        if element.dtype is None or (element.bits < 8 and element.bits not in (2, 4)):
            raise TypeError(f"QArray: JAX has no arrays of {element.name}; use .unpack().codes")
        return dtype_from_codes(self.unpack().codes, element)

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """The numbers: (q - zero point) * scale, rounded once to float32, then to `dtype`.

        A rotation is undone in float32, and factors divide, before the rounding to `dtype`. Scales
        that are powers of two multiply exactly, subnormal ones and results included.

        Args:
          dtype: float32, float16 or bfloat16; None for that of the array. Finite numbers beyond its
            largest become that: scales that were rounded up may take the largest elements there.

        Returns:
          `dtype`, in the shape of the array.

        Raises:
          TypeError: Another dtype.
          ValueError: The shapes of the leaves do not fit each other, as after a `jax.tree.map` that
            moved axes. Use `transpose` for that; `vmap` may map leading axes.

        Gradient: by float32, float16 and bfloat16 scales that of the product; other scales and
        codes have none.
        """
        target = self.dtype if dtype is None else _float_dtype("dequantize", dtype)
        plain = dataclasses.replace(self).unpack()  # `replace` checks it again
        scales = Scales(self.scale, self.tensor_scale, self.zero_point)
        if not self.transform:
            return _dequantize(plain.codes, scales, self.blocks, self.spec, target)
        numbers = _dequantize(plain.codes, scales, self.blocks, self.spec, np.dtype("float32"))
        return differentiable_in_dtype(self.transform.undone(numbers), target)

    def pack(self) -> "QArray":
        """The same array with several codes to a byte, for elements of 1, 2, 4 or 6 bits."""
        if self.packed_size is not None:
            return self
        codes = pack(self.codes, self.spec.element)
        return dataclasses.replace(self, codes=codes, packed_size=self.shape[-1])

    def unpack(self) -> "QArray":
        """The same array with a code to a byte."""
        if self.packed_size is None:
            return self
        codes = unpack(self.codes, self.spec.element, self.packed_size)
        return dataclasses.replace(self, codes=codes, packed_size=None)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("QArray: len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator["QArray"]:
        return (self[i] for i in range(len(self)))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "QArray: got codes where an array is expected; call .dequantize() first, load with "
            'dtype="float32", or let a model\'s matmuls take them: qtoolkit.nnx.quantize, '
            "qtoolkit.linen.quantize"
        )

    __jax_array__ = __array__

    if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            hint = f"; write .dequantize().{name}" if hasattr(jax.Array, name) else ""
            raise AttributeError(f"QArray has no attribute {name!r}{hint}")

    def __getitem__(self, index: Any) -> "QArray":
        """Takes integers and slices for axes that no block crosses; or integers in one array.

        No block crosses an axis along which blocks have length 1. An axis that is a single block
        may be indexed, too. The last axis of packed codes must stay whole. An array of integers
        selects along axis 0.

        Raises:
          IndexError: An index is out of range, crosses blocks, or selects nothing.
        """
        return views.indexed(self, index)

    def transpose(self, *axes: int | Sequence[int]) -> "QArray":
        """The axes permuted, as `jax.numpy.transpose` does; blocks go with their axes.

        Raises:
          TypeError: Axes that are no integers.
          ValueError: `axes` is no permutation; or it moves the last axis of packed codes, or mixes
            axes that have tensor scales of their own with others.
        """
        return views.transposed(self, axes)

    @property
    def T(self) -> "QArray":  # noqa: N802
        """The axes in reverse order."""
        return self.transpose()

    def reshape(self, *shape: int | Sequence[int]) -> "QArray":
        """The array in another shape, in which every block stays one block.

        Axes may be split and merged if blocks have length 1 along them, or one block covers them.
        Along the last of them blocks may be longer if their length divides it before and after.

        Raises:
          TypeError: Lengths that are no integers.
          ValueError: The size would change; a block would be torn; or codes are packed and the last
            axis changes.
        """
        return views.reshaped(self, shape)

    def __repr__(self) -> str:
        leaves = (
            f"{name} {leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            for name in _LEAVES
            if hasattr(leaf := getattr(self, name), "dtype") and hasattr(leaf, "shape")
        )
        shape = ",".join(map(str, self.shape)) if hasattr(self.codes, "shape") else "?"
        rotated = "" if self.rotation is None else f", rotated in blocks of {self.rotation[0]}"
        return f"QArray({self.spec.name}, {self.dtype}[{shape}]: {', '.join(leaves)}{rotated})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keys = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in _LEAVES)
        return keys, tuple(getattr(self, name) for name in _STATIC)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "QArray":
        # Without checks: JAX also rebuilds trees of shardings, of None and of its own objects.
        new = object.__new__(cls)
        for name, value in zip((*_LEAVES, *_STATIC), (*leaves, *static), strict=True):
            object.__setattr__(new, name, value)
        return new

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "QArray: got an operator, expected .dequantize() first: codes have no arithmetic "
            "without their scales; write q.dequantize() + 1"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rpow__ = __neg__ = __matmul__ = __rmatmul__ = _refuse
    __abs__ = __pos__ = __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def _check_lengths(self) -> None:
        lengths, rank = self.lengths, len(self.shape)
        good = isinstance(lengths, tuple) and all(
            jax.export.is_symbolic_dim(n) or (isinstance(n, int) and n >= 1) for n in lengths
        )
        if not good or 0 in self.shape:
            raise ValueError(
                f"QArray: lengths={lengths!r} for an array of shape {self.shape}, expected a tuple "
                "of positive integers, and no empty axis"
            )
        whole = self.blocks.lengths
        if len(whole) != rank or any(b > n for b, n in zip(whole, self.shape, strict=True)):
            raise ValueError(
                f"QArray: blocks of {lengths} in an array of shape {self.shape}, expected none "
                "longer than its axis"
            )

    def _check_codes(self) -> None:
        element, got = self.spec.element, getattr(self.codes, "dtype", None)
        expected = np.dtype("uint8") if self.packed_size is not None else element.code_dtype
        if got != expected:
            raise TypeError(
                f"QArray: codes have {got or type(self.codes).__name__}, expected {expected}, "
                f"{'packed ' * (self.packed_size is not None)}codes of {element.name}"
            )
        if self.packed_size is not None:
            bits = self.packed_size * element.bits
            if element.bits == 6:  # packed four to three bytes
                bits = -(-self.packed_size // 4) * 24
            if self.codes.ndim < 1 or self.codes.shape[-1] != -(-bits // 8):
                raise ValueError(
                    f"QArray: codes of shape {self.codes.shape} for {self.packed_size} elements of "
                    f"{element.bits} bits along the last axis, expected {-(-bits // 8)} bytes there"
                )

    def _check(self, name: str, dtype: np.dtype | None, shape: tuple[int, ...]) -> None:
        value = getattr(self, name)
        if (value is None) != (dtype is None):
            expected = "None" if dtype is None else f"an array of {dtype}"
            raise ValueError(
                f"QArray: {name} is {'None' if value is None else 'given'}, and {self.spec.name} "
                f"needs {expected}"
            )
        if value is None:
            return
        if getattr(value, "dtype", None) != dtype:
            raise TypeError(
                f"QArray: {name} has {getattr(value, 'dtype', type(value).__name__)}, expected "
                f"{dtype} for {self.spec.name}"
            )
        if tuple(value.shape) != shape:
            raise ValueError(
                f"QArray: {name} has shape {tuple(value.shape)}, expected {shape} for an array of "
                f"shape {self.shape} in blocks of {self.blocks.lengths}"
            )


def _float_dtype(where: str, dtype: Any) -> np.dtype:
    try:
        resolved = np.dtype(dtype)
    except TypeError:
        resolved = None
    if dtype is None or resolved not in FLOATS:
        raise TypeError(
            f"{where}: dtype {resolved or dtype}, expected {', '.join(map(str, FLOATS[:-1]))} or "
            f"{FLOATS[-1]}"
        )
    return resolved


def _stored_dtype(fmt: FloatFormat | None) -> np.dtype | None:
    """The dtype of stored scales of a format."""
    return None if fmt is None else fmt.dtype or fmt.code_dtype


_differentiable = jax.custom_jvp(dequantized, nondiff_argnums=(2, 3, 4))


def _dequantize_jvp(
    blocks: Blocks, spec: BlockFormat, dtype: Any, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (codes, scales), (_, dots) = primals, tangents
    y = _differentiable(codes, scales, blocks, spec, dtype)
    floats = {"scale": scales.scale, "tensor_scale": scales.tensor_scale}
    moving = {n: a for n, a in floats.items() if not isinstance(getattr(dots, n), SymbolicZero)}
    moving = {name: a for name, a in moving.items() if a is not None}
    for name, a in moving.items():
        if a.dtype not in FLOATS:
            raise TypeError(
                f"dequantize: {name} has dtype {a.dtype}, which has no derivative; learn a float32 "
                "scale, e.g. with qtoolkit.gradients.lsq"
            )

    # The numbers are linear in the scales. They are computed again, by operations that have a
    # derivative, because the engine multiplies by powers of two through their bits.
    def product(moving: dict[str, jax.Array]) -> jax.Array:
        q = dequantized(codes, Scales(None, None, scales.zero_point), blocks, spec, jnp.float32)
        scale = differentiable_scale(
            moving.get("scale", scales.scale),
            moving.get("tensor_scale", scales.tensor_scale),
            spec,
        )
        view = blocks.split(q)
        scale = broadcast_like(blocks.spread(scale), view)
        return blocks.join(linear_product(view, scale, zero_absorbs=False))

    _, y_dot = jax.jvp(product, (moving,), ({name: getattr(dots, name) for name in moving},))
    return y, linear_in_dtype(y_dot, y.dtype)


_differentiable.defjvp(_dequantize_jvp, symbolic_zeros=True)
_dequantize = jax.jit(_differentiable, static_argnums=(2, 3, 4))
