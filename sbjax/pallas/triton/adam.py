"""`sbjax.ops.adam.adam_direction` in Triton: one read and one write of each number.

XLA needs the maximum and the minimum of a group before it can encode it, and writes both new
moments in float32 between. Here a group stays in registers. Codes and details are written in place.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.ops import adam as expansion
from sbjax.ops.adam import Coded
from sbjax.pallas.triton.call import triton_call
from sbjax.pallas.triton.rounding import larger
from sbjax.quantize import E4M3, FORMATS

SPAN, LEAST = tl.constexpr(expansion.SPAN), tl.constexpr(expansion.LEAST)
DUST = tl.constexpr(expansion.DUST)
GROUP, LIMIT = tl.constexpr(expansion.GROUP), tl.constexpr(FORMATS[E4M3].max)
TINY = tl.constexpr(float(jnp.finfo(jnp.float32).tiny))


@dataclasses.dataclass(frozen=True)
class Config:
  """How many groups a program has, its warps, and how many neighbours a thread loads at once."""

  groups: int = 16
  warps: int = 4
  vector: int = 16


def unsupported(device, weights, g, mu, nu, first) -> str | None:
  """Why the kernel does not take these, or None."""
  del device, weights, mu, nu, first
  if g.shape[-1] != expansion.GROUP:
    return f"takes groups of {expansion.GROUP}, not {g.shape[-1]}"
  return f"takes at most 5 axes, not {g.ndim - 1}" if g.ndim > 6 else None


def adam_direction(
  weights: jax.Array,
  g: jax.Array,
  mu: Coded,
  nu: Coded,
  first: jax.Array,
  *,
  config: Config | None = None,
) -> tuple[jax.Array, Coded, Coded]:
  """`sbjax.ops.adam.adam_direction` for groups of 128, to the error of approximate powers."""
  config = Config() if config is None else config
  groups = g.size // expansion.GROUP
  direction, mu, nu = triton_call(
    *(weights, g, *jax.tree.leaves((mu, nu)), first),
    kernel=_kernel,
    name="sbjax_adam_direction",
    grid=triton.cdiv(groups, config.groups),
    out=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (g, mu, nu)),
    num_warps=config.warps,
    in_place={operand: operand - 1 for operand in range(1, 8)},
    **dict(GROUPS=groups, BLOCK=config.groups, VECTOR=config.vector),
  )
  return direction, mu, nu


@triton.jit
def _kernel(
  weights_ptr,
  g_ptr,
  mu_ptr,
  mu_top_ptr,
  mu_exponent_ptr,
  nu_ptr,
  nu_top_ptr,
  nu_exponent_ptr,
  first_ptr,
  direction_ptr,  # This and all below are the operands, or None.
  new_mu_ptr,
  new_mu_top_ptr,
  new_mu_exponent_ptr,
  new_nu_ptr,
  new_nu_top_ptr,
  new_nu_exponent_ptr,
  GROUPS: tl.constexpr,
  BLOCK: tl.constexpr,
  VECTOR: tl.constexpr,
):
  """Makes BLOCK groups of the direction and of both moments."""
  row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
  column = tl.max_contiguous(tl.arange(0, GROUP), VECTOR)
  w1, w2, eps = tl.load(weights_ptr), tl.load(weights_ptr + 1), tl.load(weights_ptr + 2)
  at = row[:, None] * GROUP + column[None, :]
  mask = (row < GROUPS)[:, None]
  g = tl.load(g_ptr + at, mask=mask, other=0.0)
  mu = _contract(mu_ptr, mu_top_ptr, mu_exponent_ptr, row, at, GROUPS)
  nu = _contract(nu_ptr, nu_top_ptr, nu_exponent_ptr, row, at, GROUPS)
  mu = (1 - w1) * mu + w1 * g
  nu = (1 - w2) * nu + w2 * (g * g)
  first = tl.load(first_ptr + row, mask=row < GROUPS, other=0)[:, None]
  chance = _hashed(first + column[None, :].to(tl.uint32))
  tl.debug_barrier()  # All threads have loaded what is overwritten.
  root = tl.sqrt(nu)
  tl.store(g_ptr + at, mu / (root + eps), mask=mask)
  mu = tl.where(tl.abs(mu) < root * DUST, 0.0, mu)
  _expand(mu, chance, mu_ptr, mu_top_ptr, mu_exponent_ptr, row, at, GROUPS)
  chance = (chance << 16) | (chance >> 16)
  _expand(nu, chance, nu_ptr, nu_top_ptr, nu_exponent_ptr, row, at, GROUPS)


@triton.jit
def _contract(values_ptr, top_ptr, exponent_ptr, row, at, GROUPS: tl.constexpr):
  """`sbjax.ops.adam.contract`."""
  top = tl.load(top_ptr + row, mask=row < GROUPS, other=0.0)[:, None]
  exponent = tl.load(exponent_ptr + row, mask=row < GROUPS, other=1.0)[:, None]
  values = tl.load(values_ptr + at, mask=(row < GROUPS)[:, None]).to(tl.float32)
  size = top * _power(tl.abs(values) * (1.0 / LIMIT), 1.0 / exponent)
  size = larger(size, TINY)
  # top * 0 and not 0: NaN stays visible in all of a group.
  return tl.where(values == 0, top * 0.0, tl.where(values < 0, -size, size))


@triton.jit
def _expand(x, chance, values_ptr, top_ptr, exponent_ptr, row, at, GROUPS: tl.constexpr):
  """`sbjax.ops.adam.expand`, stored."""
  size = tl.abs(x)
  top = tl.reduce(size, 1, larger)
  top = tl.where(top < float("inf"), top, float("nan"))
  low = tl.reduce(tl.where(size > 0, size, float("inf")), 1, _smaller)
  exponent = tl.floor(tl.div_rn(tl.cast(16 * SPAN, tl.float32), _log2(top) - _log2(low))) / 16
  exponent = tl.where(top > 0, tl.clamp(exponent, 1 / 16, 64.0), 1.0)
  factor = 1.0 / tl.where(top == 0, 1.0, larger(top, TINY))  # A division for a group is cheap.
  expanded = larger(_power(size * factor[:, None], exponent[:, None]) * LIMIT, LEAST)
  # Beyond its largest number e4m3 has NaN, and a power may be a bit too large.
  expanded = tl.minimum(expanded, LIMIT, propagate_nan=tl.PropagateNan.ALL)
  expanded = _round_by_chance(expanded, (1.0 / exponent)[:, None], chance)
  expanded = tl.where(size == 0, 0.0, tl.where(x < 0, -expanded, expanded))
  values = expanded.to(values_ptr.dtype.element_ty)
  tl.store(values_ptr + at, values, mask=(row < GROUPS)[:, None])
  tl.store(top_ptr + row, top, mask=row < GROUPS)
  tl.store(exponent_ptr + row, exponent, mask=row < GROUPS)


@triton.jit
def _hashed(x):
  """`sbjax.ops.dither.hashed`."""
  x ^= x >> 16
  x *= 0x7FEB352D
  x ^= x >> 15
  x *= 0x846CA68B
  return x ^ (x >> 16)


@triton.jit
def _round_by_chance(x, inverse, chance):
  """`sbjax.ops.adam._round_by_chance`, for x > 0 and the inverse of the exponent."""
  shift = tl.where(x < 2.0**-6, 2.0**-6, 0.0)
  bits = (x + shift).to(tl.uint32, bitcast=True)
  below = (bits & 0xFFF00000).to(tl.float32, bitcast=True) - shift
  above = ((bits + 0xFFFFF) & 0xFFF00000).to(tl.float32, bitcast=True) - shift
  origin = _log2(below)
  width = tl.exp2((_log2(above) - origin) * inverse) - 1
  draw = (chance >> 8).to(tl.float32) * 2.0**-24
  return tl.where(draw * width < tl.exp2((_log2(x) - origin) * inverse) - 1, above, below)


@triton.jit
def _power(x, exponent):
  """x ** exponent for x >= 0 and exponent > 0."""
  return tl.exp2(_log2(x) * exponent)


@triton.jit
def _log2(x):
  """To 2**-22, in one instruction; tl.log2 takes 20 for a bit more."""
  return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _smaller(a, b):
  return tl.minimum(a, b)
