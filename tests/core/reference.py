"""An independent reference for the recipes, in float64 numpy from the paper.

Wortsman et al. 2023, https://arxiv.org/abs/2304.13013. The last two recipes leave the paper in the
weight gradient, which it keeps in 16 bits. Nothing here is imported from sbjax, so that agreement
is evidence. Matrices are multiplied as `a [m, k] @ b [k, n]`; a "row" scale is shared along k, a
"tensor" scale by the whole operand, a "power" scale too, which is a power of two. "one" is 1.
"folded" are scales of b, one for each k, that multiply a before it is rounded.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

LARGEST = {"int8": 127, "e4m3": 448, "e5m2": 57344}
DTYPES = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

UNIT = {
  "float32": 2.0**-24,
  "bfloat16": 2.0**-8,
  "float16": 2.0**-11,
}  # half a unit in the last place


class Method(NamedTuple):
  y: tuple | None  # formats and scales of x @ w; None: not quantized
  dx: tuple | None  # of dy @ w.T
  dw: tuple | None  # of x.T @ dy
  saves_rounded_x: bool = False


_INT8_ROW, _INT8_TENSOR = ("int8", "row"), ("int8", "tensor")
_INT8_FOLDED = ("int8", "folded")
_SWITCHBACK = Method((_INT8_ROW, _INT8_TENSOR), (_INT8_ROW, _INT8_TENSOR), None)
_SWITCHBACK_C = Method((_INT8_ROW, _INT8_ROW), (_INT8_ROW, _INT8_FOLDED), None)
METHODS = {
  "full": Method(None, None, None),
  "switchback": _SWITCHBACK,
  "switchback_m": _SWITCHBACK._replace(saves_rounded_x=True),
  "switchback_q": Method((_INT8_ROW, _INT8_ROW), (_INT8_ROW, _INT8_ROW), None),
  "switchback_c": _SWITCHBACK_C,
  "switchback_cm": _SWITCHBACK_C._replace(saves_rounded_x=True),
  "llm_int8": Method(*[(_INT8_ROW, _INT8_ROW)] * 3),
  "fp8_tensorwise": Method(
    (("e4m3", "tensor"), ("e4m3", "tensor")),
    (("e5m2", "tensor"), ("e4m3", "tensor")),
    (("e4m3", "tensor"), ("e5m2", "tensor")),
  ),
  "fp8_switchback": Method(
    (("e4m3", "row"), ("e4m3", "tensor")), (("e5m2", "row"), ("e4m3", "tensor")), None
  ),
  "fp8_dinov3": Method(
    (("e4m3", "row"), ("e4m3", "row")), (("e4m3", "row"), ("e4m3", "tensor")), None
  ),
  "fp8_amax": Method(
    (("e4m3", "power"), ("e4m3", "power")),
    (("e5m2", "power"), ("e4m3", "power")),
    (("e4m3", "power"), ("e5m2", "power")),
  ),
  "fp8_static": Method(
    (("e4m3", "one"), ("e4m3", "one")),
    (("e5m2", "one"), ("e4m3", "one")),
    (("e4m3", "one"), ("e5m2", "one")),
  ),
  "switchback_fp8_wgrad": _SWITCHBACK._replace(dw=(("e4m3", "row"), ("e5m2", "row"))),
  "switchback_e4m3_wgrad": _SWITCHBACK._replace(dw=(("e4m3", "row"), ("e4m3", "row"))),
}


def rounded(a, fmt, axis, shares="absmax"):
  """a in 8 bits, and its exact scale (float64), shared along `axis`; with None by all of a."""
  a = np.asarray(a).astype(np.float32)
  absmax = np.max(np.abs(a), axis=axis, keepdims=True)
  if shares in ("power", "one"):
    power = shares == "power" and math.floor(math.log2(LARGEST[fmt] / absmax.item()))
    values = np.clip(a * np.float32(2.0**power), -LARGEST[fmt], LARGEST[fmt])
    return values.astype(DTYPES[fmt]), np.array([[2.0**-power]])
  factor = np.float32(LARGEST[fmt]) / np.where(absmax == 0, np.float32(1), absmax)
  values = np.clip(a * factor, -LARGEST[fmt], LARGEST[fmt])
  values = np.rint(values) if fmt == "int8" else values
  return values.astype(DTYPES[fmt]), absmax.astype(np.float64) / LARGEST[fmt]


class Product(NamedTuple):
  value: np.ndarray  # float64
  error: np.ndarray  # bound on the error of float32 arithmetic


def product(a, b, formats):
  """a [m, k] @ b [k, n], both rounded to their formats."""
  a_scale, b_scale = 1, 1
  if formats is not None:
    (a_format, a_shares), (b_format, b_shares) = formats
    if b_shares == "folded":
      b, b_scale = rounded(b, b_format, 1)
      a, b_scale = np.asarray(a).astype(np.float32) * b_scale.T.astype(np.float32), 1
    else:
      b, b_scale = rounded(b, b_format, 0 if b_shares == "row" else None, b_shares)
    a, a_scale = rounded(a, a_format, 1 if a_shares == "row" else None, a_shares)
  a, b = _float64(a), _float64(b)
  value = (a @ b) * a_scale * b_scale
  # int8 sums are exact in int32. Others are summed in float32, in an order that the machine
  # chooses: one rounding for each of k terms (Higham 2002, section 3.1).
  error = 1.01 * a.shape[1] * UNIT["float32"] * (np.abs(a) @ np.abs(b)) * a_scale * b_scale
  if formats is not None and formats[0][0] == "int8":
    error = 0
  # Then the sum becomes float32 and is multiplied by two scales, each rounded twice.
  return Product(value, error + 8 * UNIT["float32"] * np.abs(value))


def linear(name, x, w, dy):
  """(y, dx, dw) of a linear layer, each a Product, for x [m, k], w [k, n] and dy [m, n].

  y and dx have x's dtype, dw has w's; `error` includes the last cast.
  """
  method, dtype = METHODS[name], np.asarray(x).dtype
  y = product(x, w if method.y else np.asarray(w).astype(dtype), method.y)
  dx = product(dy, (w if method.dx else np.asarray(w).astype(dtype)).T, method.dx)
  if method.saves_rounded_x:
    values, scale = rounded(x, "int8", 1)
    kept = values * scale
    dw = product(kept.T, dy, method.dw)
    cast = (UNIT[dtype.name] + 4 * UNIT["float32"]) * (np.abs(kept.T) @ np.abs(_float64(dy)))
    dw = Product(dw.value, dw.error + cast)  # The rounded x comes back in x's dtype.
  else:
    dw = product(np.asarray(x).T, dy, method.dw)
  return _cast(y, dtype), _cast(dx, dtype), _cast(dw, np.asarray(w).dtype)


def _cast(result, dtype):
  return Product(result.value, result.error + UNIT[dtype.name] * np.abs(result.value))


def _float64(a):
  return np.asarray(a).astype(np.float64)


def assert_within(actual, expected: Product):
  """Every element of `actual` lies within the expected error of the expected value."""
  excess = np.abs(_float64(actual) - expected.value) - expected.error
  assert actual.shape == expected.value.shape
  assert np.all(excess <= 0), f"beyond the bound by up to {np.max(excess):.3g}"


def dot_general(name):
  """An einsum of rounded operands in float32 over any axes, without reshape or transpose.

  For the methods that leave dw unrounded. Rounding has a straight-through gradient.
  """
  method = METHODS[name]
  assert method.dw is None and not method.saves_rounded_x

  def snap(a, how, shared, own):
    """Rounds a: "row" shares a scale along the axes `shared`, "tensor" along all but `own`."""
    fmt, scaling = how
    axis = tuple(shared) if scaling == "row" else tuple(i for i in range(a.ndim) if i not in own)
    a = a.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(a), axis=axis, keepdims=True)
    values = a * (LARGEST[fmt] / jnp.where(absmax == 0, 1, absmax))
    return jnp.round(values) * (absmax / LARGEST[fmt])

  def general(lhs, rhs, dimension_numbers, precision=None, **_):
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
    names = iter("abcdefghijklmnop")
    lhs_names = [next(names) for _ in lhs.shape]
    rhs_names = [next(names) for _ in rhs.shape]
    for i, j in (*zip(lhs_k, rhs_k, strict=True), *zip(lhs_b, rhs_b, strict=True)):
      rhs_names[j] = lhs_names[i]
    contracted, batch = [lhs_names[i] for i in lhs_k], [lhs_names[i] for i in lhs_b]
    free = [n for n in (*lhs_names, *rhs_names) if n not in (*contracted, *batch)]
    out_names = batch + free
    lhs_letters, rhs_letters, out_letters = map("".join, (lhs_names, rhs_names, out_names))

    def axes(of, letters):
      return [i for i, letter in enumerate(of) if letter in letters]

    def snap_pair(a, a_names, b, b_names, formats):
      if formats is None:
        return a.astype(jnp.float32), b.astype(jnp.float32)
      shared = set(a_names) & set(b_names) - set(batch)
      return (
        snap(a, formats[0], axes(a_names, shared), axes(a_names, batch)),
        snap(b, formats[1], axes(b_names, shared), axes(b_names, batch)),
      )

    @jax.custom_vjp
    def dot(lhs, rhs):
      a, b = snap_pair(lhs, lhs_names, rhs, rhs_names, method.y)
      return jnp.einsum(f"{lhs_letters},{rhs_letters}->{out_letters}", a, b).astype(lhs.dtype)

    def backward(kept, dy):
      lhs, rhs = kept
      a, b = snap_pair(dy, out_names, rhs, rhs_names, method.dx)
      dlhs = jnp.einsum(f"{out_letters},{rhs_letters}->{lhs_letters}", a, b)
      a, b = lhs.astype(jnp.float32), dy.astype(jnp.float32)
      drhs = jnp.einsum(f"{lhs_letters},{out_letters}->{rhs_letters}", a, b)
      return dlhs.astype(lhs.dtype), drhs.astype(rhs.dtype)

    dot.defvjp(lambda lhs, rhs: (dot(lhs, rhs), (lhs, rhs)), backward)
    return dot(lhs, rhs)

  return general
