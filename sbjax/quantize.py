"""Symmetric quantization of a matmul operand: `x ~= values * scale`.

An operand is [rows, K], contracted along its last axis. A scale must factor out of that sum,
so it is shared by a row at least: one scale for each row (rowwise) or one for the operand
(tensorwise, or the power of two next to it: tensorwise_pow2). A static scale is a constant, a power
of two. At 1 the values are rounded as they come (unit scaling). A scale for each column
(columnwise) does not factor out: the other operand is `folded` with these scales before it is
rounded.

These functions are the definition; whatever computes faster must give the same numbers.
"""

import contextlib
import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

SCALINGS = ("rowwise", "columnwise", "tensorwise", "tensorwise_pow2", "static")
# The product of two scales of 2**-63 is still a normal float32.
MAX_EXPONENT = 63
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Format:
  """A format of at most 8 bits: what it can hold, and how its products are summed."""

  dtype: jnp.dtype
  max: float  # The largest magnitude that a quantized value takes.
  accumulator: jnp.dtype  # Of sums of products. Formats that share one multiply.
  capability: int  # The least compute capability whose tensor cores take it; 80 is 8.0.
  has_nan: bool = True
  most_terms: int | None = None  # More products can overflow the accumulator.

  @property
  def is_exact(self) -> bool:
    """Whether sums of products are exact: those of integers."""
    return self.accumulator == jnp.int32


INT8 = jnp.dtype(jnp.int8)
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)

_INT32, _FLOAT32 = jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)
FORMATS = {
  # Symmetric: -128 never occurs, so negation is exact. 127 * 127 * most_terms is below 2**31.
  INT8: Format(INT8, 127.0, _INT32, 80, has_nan=False, most_terms=2**17),
  E4M3: Format(E4M3, 448.0, _FLOAT32, 89),
  E5M2: Format(E5M2, 57344.0, _FLOAT32, 89),
}

# What operands, parameters and results may be.
FLOATS = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def format_of(dtype) -> Format:
  """The format of a dtype or its name; a ValueError unless it is one of FORMATS."""
  known = _dtype(dtype)
  if known is None or known not in FORMATS:
    formats = ", ".join(d.name for d in FORMATS)
    raise ValueError(
      f"{getattr(known, 'name', dtype)!r} is not an 8-bit format sbjax knows: {formats}."
    )
  return FORMATS[known]


def floating_dtype(name: str, dtype) -> jnp.dtype:
  """The dtype; a ValueError unless it is one of FLOATS."""
  known = _dtype(dtype)
  if known is None or known not in FLOATS:  # numpy takes None for float64.
    raise ValueError(f"{name}={dtype!r} must be one of {', '.join(d.name for d in FLOATS)}.")
  return known


def _dtype(dtype):
  """The dtype that a name or a type stands for; None for other values."""
  if isinstance(dtype, str | type | np.dtype):
    with contextlib.suppress(TypeError):
      return jnp.dtype(dtype)
  return None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Spec:
  """How one operand of one matmul is quantized; static where a function is traced.

  exponent: of a static scale, 2**-exponent: x is multiplied by 2**exponent and rounded.

  Raises:
    ValueError: not one of the formats, an unknown scaling, or an exponent that is no integer from
      -63 to 63 or belongs to a scaling other than static.

  >>> Spec(jnp.int8, "rowwise") == Spec("int8", "rowwise")
  True
  >>> float(quantize(jnp.ones((2, 3)), Spec(E4M3, "static", exponent=4)).scale[0, 0])
  0.0625
  """

  dtype: jnp.dtype  # INT8, E4M3 or E5M2; `jnp.int8` and the like are made one of these.
  scaling: Literal["rowwise", "columnwise", "tensorwise", "tensorwise_pow2", "static"]
  exponent: int = 0

  def __post_init__(self):
    object.__setattr__(self, "dtype", format_of(self.dtype).dtype)
    if not isinstance(self.scaling, str) or self.scaling not in SCALINGS:
      raise ValueError(f"Unknown scaling {self.scaling!r}; known: {', '.join(SCALINGS)}.")
    if type(self.exponent) is not int or abs(self.exponent) > MAX_EXPONENT:
      raise ValueError(
        f"exponent={self.exponent!r} must be an integer from -{MAX_EXPONENT} to {MAX_EXPONENT}."
      )
    if self.exponent and not self.is_static:
      raise ValueError(f"exponent={self.exponent} needs scaling='static', not {self.scaling!r}.")

  @property
  def format(self) -> Format:
    return FORMATS[self.dtype]

  @property
  def is_rowwise(self) -> bool:
    return self.scaling == "rowwise"

  @property
  def is_columnwise(self) -> bool:
    return self.scaling == "columnwise"

  @property
  def is_static(self) -> bool:
    return self.scaling == "static"

  @property
  def axis(self) -> int | None:
    """The axis along which values share a scale; None: both."""
    return {"rowwise": 1, "columnwise": 0}.get(self.scaling)

  @property
  def T(self) -> "Spec":
    """The Spec of the transpose, whose rows are the columns."""
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}
    return dataclasses.replace(self, scaling=other.get(self.scaling, self.scaling))

  @property
  def takes_absmax(self) -> bool:
    """Whether rounding needs max |x|: a format without NaN shows one by its scale, even static."""
    return not self.is_static or not self.format.has_nan


def share_accumulator(lhs: Spec, rhs: Spec) -> bool:
  """Whether a matmul takes operands of these Specs."""
  return lhs.format.accumulator == rhs.format.accumulator


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["spec"]
)
@dataclasses.dataclass(frozen=True)
class Quantized:
  """An operand in 8 bits; `scale` always multiplies to dequantize.

  >>> quantize(jnp.ones((2, 3)), Spec(INT8, "rowwise")).T.scale.shape
  (1, 2)
  """

  values: jax.Array  # [rows, K] of spec.dtype
  scale: jax.Array  # float32 [rows, 1] if spec is rowwise, [1, K] if columnwise, else [1, 1]
  spec: Spec

  @property
  def T(self) -> "Quantized":
    return Quantized(self.values.T, self.scale.T, self.spec.T)


def quantize(x: jax.Array, spec: Spec) -> Quantized:
  """Rounds x [rows, K] to `spec.dtype`, the largest magnitude under each scale to its maximum.

  Round half to even; `x * (max / absmax)` with one division a row, which numpy and XLA
  evaluate to the same bits. Zero rows stay zero. A NaN or an infinity anywhere under a scale
  makes that scale NaN, and so every product with it: a diverging run is seen, not rounded away.
  A static scale saturates finite values. In fp8 it makes only the NaN or infinity itself NaN,
  because it takes no maximum.

  Args:
    x: [rows, K], floating point.
    spec: the format and what shares a scale.

  Raises:
    ValueError: x is not floating point or not 2-d, or spec is no Spec.

  >>> quantize(jnp.array([[1.0, -2.0], [0.5, 0.25]]), Spec(INT8, "rowwise")).values
  Array([[  64, -127],
         [ 127,   64]], dtype=int8)
  """
  x = check_quantizable(x)
  if not isinstance(spec, Spec):
    raise ValueError(f"spec must be a Spec, not {spec!r}.")
  return round_to(x, absmax_of(x, spec), spec)


def absmax_of(x: jax.Array, spec: Spec) -> jax.Array:
  """max |x| under each scale, float32 of the scale's shape, infinite where there is a NaN.

  0 if `spec` takes none.
  """
  if not spec.takes_absmax:
    return jnp.zeros((1, 1), jnp.float32)
  return jnp.max(abs_or_inf(x.astype(jnp.float32)), axis=spec.axis, keepdims=True, initial=0.0)


def abs_or_inf(x: jax.Array) -> jax.Array:
  """|x|, infinite for a NaN: XLA's maximum on a CPU may drop a NaN, but not infinity."""
  return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


def folded(x: jax.Array, fold: jax.Array | None) -> jax.Array:
  """x [rows, K] times fold [K] in float32, the scales of a columnwise operand that x meets.

  sum over k of x[k] * (values[k] * scale[k]) is that of (x * scale)[k] * values[k].
  """
  return x if fold is None else x.astype(jnp.float32) * fold[None, :]


def group_size(width: int, most: int) -> int:
  """How many neighbours of a row share a scale: the largest divisor of `width` up to `most`."""
  return next(n for n in range(min(width, most), 0, -1) if width % n == 0)


def round_to(x: jax.Array, absmax: jax.Array, spec: Spec) -> Quantized:
  """x with the scales that follow from `absmax`, which may be that of a larger array."""
  factor, scale = factor_and_scale(absmax, spec)
  limit = spec.format.max
  x = x.astype(jnp.float32)
  values = jnp.clip(x * factor, -limit, limit)  # Beyond its range e4m3 has NaN.
  if not spec.takes_absmax:
    values = jnp.where(jnp.isfinite(x), values, jnp.nan)
  if spec.format.is_exact:
    values = jnp.round(values)
  return Quantized(values.astype(spec.dtype), scale, spec)


def check_quantizable(x) -> jax.Array:
  """x as `quantize` takes it, or a ValueError."""
  x = as_floating("x", x)
  if x.ndim != 2:
    raise ValueError(f"quantize takes x [rows, K], not shape {x.shape}.")
  return x


def as_floating(name: str, x) -> jax.Array:
  """x as JAX's array; a ValueError unless it is an array of a dtype in FLOATS."""
  if isinstance(x, Quantized):
    raise ValueError(f"{name} is Quantized: pass the array, or dequantize({name}).")
  if not (isinstance(x, jax.Array | np.ndarray | np.generic) or hasattr(x, "__jax_array__")):
    raise ValueError(f"{name} must be an array, not a {type(x).__name__}.")
  if x.dtype not in FLOATS:
    known = ", ".join(dtype.name for dtype in FLOATS)
    raise ValueError(f"{name} must be floating point, not {x.dtype.name}: {known}.")
  return jnp.asarray(x)


def factor_and_scale(absmax: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
  """What multiplies x before it is rounded, and what multiplies the values to dequantize.

  Args:
    absmax: float32, the largest magnitude under each scale; infinite or NaN where one was.
  """
  limit = spec.format.max
  if spec.is_static:
    factor = jnp.full_like(absmax, 2.0**spec.exponent)
    scale = jnp.full_like(absmax, 2.0**-spec.exponent)
  elif spec.scaling == "tensorwise_pow2":
    # floor(log2(limit / absmax)): the difference of two floats' bits is that of their logarithms.
    bits = jax.lax.bitcast_convert_type(absmax, jnp.int32)
    exponent = jnp.minimum((np.float32(limit).view(np.int32) - bits) >> 23, 126)
    factor, scale = _power_of_two(exponent), _power_of_two(-exponent)
  else:
    # Zeros, and magnitudes near underflow, would overflow the factor: it is bounded before.
    too_small = absmax < limit / _LARGEST
    factor = jnp.where(too_small, _LARGEST, limit / jnp.where(too_small, 1.0, absmax))
    scale = absmax * (1.0 / limit)  # A product: XLA replaces a division by one when it likes.
  return factor, jnp.where(jnp.isfinite(absmax), scale, jnp.nan)


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """2**exponent for int32 from -126 to 127, exactly: XLA's exp2 may be off."""
  return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def dequantize(x: Quantized, dtype=jnp.float32) -> jax.Array:
  """`values * scale` [rows, K], multiplied in float32 and cast once.

  >>> dequantize(quantize(jnp.array([[1.0, -2.0]]), Spec(INT8, "rowwise")))
  Array([[ 1.007874, -2.      ]], dtype=float32)
  """
  check_quantized("x", x)
  return (x.values.astype(jnp.float32) * x.scale).astype(floating_dtype("dtype", dtype))


def check_quantized(name: str, x) -> None:
  if not isinstance(x, Quantized):
    raise ValueError(f"{name} must be Quantized, not a {type(x).__name__}; see quantize.")
