"""Unit scaling: operations whose results and gradients have unit variance when training starts.

An operation multiplies its result by one constant and each gradient by another (Blake et al. 2023,
https://arxiv.org/abs/2303.11257). The constants follow from shapes. Weights are drawn with unit
variance, so that fp8 needs no scales that follow from data: see the recipe "fp8_static". With
`adam_lr_factor` the best learning rate does not depend on the width (u-muP, Blake et al. 2024,
https://arxiv.org/abs/2407.17465).

`mult` multiplies what goes into a nonlinear function, in place of the variance that unit scaling
fixes; the default of 1 is that of u-muP. `constraint` says which constant counts where the result
and a gradient should share theirs, or the gradients would be those of no function:
"to_output_scale", "to_grad_input_scale", a mean ("gmean", "hmean", "amean"), or None: each its own.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from sbjax.attention import attention as plain_attention
from sbjax.linear.quantized_dot import quantized_dot, times
from sbjax.ops.matmul import at_least_float32
from sbjax.quantize import as_floating
from sbjax.recipes import Recipe

_CONSTRAINTS: dict[str, Callable] = {
  "to_output_scale": lambda output, *gradients: output,
  "to_grad_input_scale": lambda output, gradient: gradient,
  "gmean": lambda *scales: math.prod(scales) ** (1 / len(scales)),
  "hmean": lambda *scales: len(scales) / sum(1 / scale for scale in scales),
  "amean": lambda *scales: sum(scales) / len(scales),
}


def scaled(x: jax.Array, forward: float = 1.0, backward: float = 1.0) -> jax.Array:
  """x times `forward`, whose gradient is multiplied by `backward` instead.

  >>> y, gradient = jax.value_and_grad(scaled)(jnp.float32(3), 2.0, 0.5)
  >>> float(y), float(gradient)
  (6.0, 0.5)
  """
  return _scaled(float(forward), float(backward), as_floating("x", x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scaled(forward, backward, x):
  return times(x, forward)


_scaled.defvjp(
  lambda forward, backward, x: (times(x, forward), None),
  lambda forward, backward, _, gradient: (times(gradient, backward),),
)


def linear(
  x: jax.Array,
  w: jax.Array,
  bias: jax.Array | None = None,
  *,
  recipe: Recipe | str = "full",
  constraint: str | None = "to_output_scale",
  powers: tuple[float, float, float] = (0.5, 0.5, 0.5),
  backend: str | None = None,
) -> jax.Array:
  """`(x @ w + bias) / K**0.5` [..., N] for x [..., K], w [K, N] and bias [N].

  The gradient of x is divided by N**0.5 (by K**0.5 under the default constraint), those of w and
  bias by the root of the number of rows of x. An 8-bit recipe rounds before these constants.

  Args:
    recipe: as in `quantized_dot`; "fp8_static" for fp8.
    powers: of K, N and the number of rows.
    backend: as in `quantized_dot`.

  Raises:
    ValueError: those of `quantized_dot`, or an unknown constraint.

  >>> x = jax.random.normal(jax.random.key(0), (256, 512))
  >>> w = jax.random.normal(jax.random.key(1), (512, 128))
  >>> round(float(jnp.std(linear(x, w, recipe="fp8_static"))), 1)
  1.0
  """
  x, w = as_floating("x", x), as_floating("w", w)
  if x.ndim < 1 or w.ndim != 2:
    raise ValueError(f"linear takes x [..., K] and w [K, N], not {x.shape} and {w.shape}.")
  rows = max(math.prod(x.shape[:-1]), 1)
  sizes = max(w.shape[0], 1), max(w.shape[1], 1), rows
  output, of_x, of_w = (size**-power for size, power in zip(sizes, powers, strict=True))
  output, of_x = _constrained(constraint, output, of_x)
  bias = None if bias is None else scaled(bias, output, of_w)
  x, w = scaled(x, 1, of_x / output), scaled(w, 1, of_w / output)
  return quantized_dot(x, w, recipe, bias=bias, multiplier=output, backend=backend)


def linear_readout(
  x: jax.Array,
  w: jax.Array,
  bias: jax.Array | None = None,
  *,
  recipe: Recipe | str = "full",
  constraint: str | None = None,
  backend: str | None = None,
) -> jax.Array:
  """`linear` for the last layer of a network, divided by K instead of its root.

  The logits are small at the start, and nothing follows that needs their variance.
  """
  how = {"recipe": recipe, "constraint": constraint, "backend": backend}
  return linear(x, w, bias, powers=(1.0, 0.5, 0.5), **how)


def gelu(
  x: jax.Array, *, mult: float = 1.0, constraint: str | None = "to_output_scale"
) -> jax.Array:
  """GELU (the exact one) of `mult * x`, divided by mult, at unit variance."""
  share = _share(0.25, mult)
  scales = _between(share, 2, _RELU_SCALE), _between(share, 2, 2**0.5)
  return _elementwise(lambda x: jax.nn.gelu(mult * x, False) / mult, x, *scales, constraint)


def silu(
  x: jax.Array, *, mult: float = 1.0, constraint: str | None = "to_output_scale"
) -> jax.Array:
  """`x * sigmoid(mult * x)` at unit variance."""
  scales = _between(_share(0.25, mult), 2, _RELU_SCALE), _between(_share(1, mult), 2, 2**0.5)
  return _elementwise(lambda x: _silu(x, mult), x, *scales, constraint)


def silu_glu(x: jax.Array, gate: jax.Array, *, mult: float = 1.0) -> jax.Array:
  """`x * silu(gate)` at unit variance."""
  scale = _between(_share(1, mult), 2, 2**0.5)
  x, gate = as_floating("x", x), as_floating("gate", gate)
  wide_x, wide_gate = (scaled(at_least_float32(a), 1, scale) for a in (x, gate))
  return scaled(wide_x * _silu(wide_gate, mult), scale).astype(x.dtype)


def softmax(
  x: jax.Array, axis: int = -1, *, mult: float = 1.0, constraint: str | None = "to_output_scale"
) -> jax.Array:
  """Softmax of `mult * x` along the axis, at a root mean square of 1."""
  size, share = x.shape[axis], _share(4, mult)
  scales = _between(share, size, size**0.5), _between(share, size / mult, (size / mult) ** 0.5)
  return _elementwise(lambda x: jax.nn.softmax(mult * x, axis), x, *scales, constraint)


def attention(
  q: jax.Array, k: jax.Array, v: jax.Array, *, mult: float = 1.0, causal: bool = False
) -> jax.Array:
  """Softmax attention [B, L, H, D] of queries, keys and values [B, L, H, D] at unit variance.

  The logits are `mult * q @ k.T / D`. How much values cancel depends on their number L and on
  `causal`.
  """
  length, head_dim = v.shape[1], v.shape[-1]
  least = ((math.log(length) if causal and length > 1 else 1) / length) ** 0.5
  scale = 1 / _between(_share(4 * head_dim, mult), least, 1)
  logits = mult * head_dim**-0.5  # `sbjax.attention` divides by the root of D.
  q, k, v = scaled(q, logits, scale * logits), scaled(k, 1, scale), scaled(v, 1, scale)
  return scaled(plain_attention(q, k, v, causal=causal), scale)


def cross_entropy(
  logits: jax.Array, labels: jax.Array, *, mult: float = 1.0, reduction: str = "mean"
) -> jax.Array:
  """The cross entropy of `mult * logits` [..., V] and labels [...], float32 [].

  The gradient of the logits has unit variance: it is not divided by the number of labels, even if
  the loss is their mean.

  reduction: "mean" or "sum".
  """
  logits, labels = as_floating("logits", logits), jnp.asarray(labels)
  if logits.ndim < 1 or logits.shape[-1] < 2 or labels.shape != logits.shape[:-1]:
    raise ValueError(
      "cross_entropy takes logits [..., V] of at least two classes and labels [...], not"
      f" {logits.shape} and {labels.shape}."
    )
  classes = logits.shape[-1]
  logits = scaled(at_least_float32(logits), mult, classes / (classes - 1) ** 0.5)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return _reduced(losses, reduction)


def mse_loss(x: jax.Array, target: jax.Array, *, reduction: str = "mean") -> jax.Array:
  """The squared error of x and a target of the same shape, []; its gradients have unit variance.

  reduction: "mean" or "sum".
  """
  x, target = as_floating("x", x), as_floating("target", target)
  if x.shape != target.shape:
    raise ValueError(f"x and target must have one shape, not {x.shape} and {target.shape}.")
  x, target = (scaled(at_least_float32(a), 1, 8**-0.5) for a in (x, target))
  return _reduced(jnp.square(x - target), reduction)


def layer_norm(
  x: jax.Array,
  scale: jax.Array | None = None,
  bias: jax.Array | None = None,
  *,
  epsilon: float = 1e-5,
) -> jax.Array:
  """Layer norm over the last axis of x [..., K]; scale [K] and bias [K] have unit gradients."""
  centred = at_least_float32(as_floating("x", x))
  centred -= jnp.mean(centred, axis=-1, keepdims=True)
  return _affine(centred, epsilon, scale, bias).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array | None = None, *, epsilon: float = 1e-5) -> jax.Array:
  """x [..., K] over its root mean square along the last axis; scale [K] has a unit gradient."""
  return _affine(at_least_float32(as_floating("x", x)), epsilon, scale, None).astype(x.dtype)


def embedding(ids: jax.Array, table: jax.Array) -> jax.Array:
  """The rows of a table [V, D] for ids [...]: [..., D]. The table's gradient has unit variance."""
  backward = (table.shape[0] / max(ids.size, 1)) ** 0.5
  return jnp.take(scaled(table, 1, backward), ids, axis=0)


def add(
  x: jax.Array, y: jax.Array | float, *, constraint: str | None = "to_output_scale"
) -> jax.Array:
  """`(x + y) / 2**0.5`, broadcast; `x + y` where one of them is a single number."""
  if isinstance(y, int | float):
    return x + y
  shape = jnp.broadcast_shapes(x.shape, y.shape)
  copies = (max(math.prod(shape), 1) / max(a.size, 1) for a in (x, y))
  output = 1.0 if 1 in (x.size, y.size) else 2**-0.5
  output, *gradients = _constrained(constraint, output, *(n**-0.5 for n in copies))
  x, y = (
    jnp.broadcast_to(scaled(a, 1, gradient), shape)
    for a, gradient in zip((x, y), gradients, strict=True)
  )
  return scaled(x + y, output)


def residual_apply(
  function: Callable[[jax.Array], jax.Array], x: jax.Array, tau: float = 1.0
) -> jax.Array:
  """`(x + tau * function(x)) / (1 + tau**2)**0.5`: a residual connection at unit variance.

  Within the branch the gradient has unit variance: tau multiplies it where it leaves the branch.

  >>> float(residual_apply(lambda x: 2 * x, jnp.float32(1), tau=0.75))
  2.0
  """
  skip = (1 + tau**2) ** -0.5
  branch = function(scaled(x, 1, tau * skip))
  return scaled(branch, tau * skip) + scaled(x, skip, skip)


def residual_tau(
  index: int, layers: int, *, residual_mult: float = 1.0, attention_ratio: float = 1.0
) -> float:
  """The tau of a transformer's residual branch (u-muP, appendix G).

  Branches of attention (even indices) and MLPs (odd ones) then contribute alike over the depth.

  Args:
    index: of the branch, from 0.
    layers: how many branches there are, two a block.
    residual_mult: what all branches contribute, relative to the embedding.
    attention_ratio: what an attention contributes, relative to an MLP.

  >>> [round(residual_tau(i, 4), 3) for i in range(4)]
  [0.707, 0.577, 0.5, 0.447]
  """
  if not 0 <= index < layers:
    raise ValueError(f"{index=} must be that of one of {layers=} branches, from 0.")
  mlp = residual_mult * (2 / (1 + attention_ratio**2)) ** 0.5
  attention = attention_ratio * mlp
  before = (index + 1) // 2 * attention**2 + index // 2 * mlp**2
  return (mlp if index % 2 else attention) / (layers / 2 + before) ** 0.5


def adam_lr_factor(kind: str, fan_in: int, *, depth: int | None = None) -> float:
  """What multiplies Adam's learning rate for a parameter, so that the best one fits all widths.

  Args:
    kind: "weight" (a hidden layer's or an embedding), "output" (of `linear_readout`), "bias" or
      "norm".
    fan_in: K of a weight [K, N]; of an embedding its width.
    depth: the number of residual branches if the parameter is in one, else None.

  >>> adam_lr_factor("weight", 1024), adam_lr_factor("output", 1024)
  (0.03125, 1.0)
  """
  if kind not in ("weight", "output", "bias", "norm"):
    raise ValueError(f"{kind=} must be 'weight', 'output', 'bias' or 'norm'.")
  return (fan_in**-0.5 if kind == "weight" else 1.0) * (1.0 if depth is None else depth**-0.5)


# The scale of ReLU, which GELU and SiLU approach for large inputs. For small ones they approach a
# line of slope 1/2, whose scale is 2.
_RELU_SCALE = (2 / (1 - 1 / math.pi)) ** 0.5


def _share(width: float, mult: float) -> float:
  """How far a function is from its limit for small inputs: from 0 for mult 0 to 1 for infinity."""
  if not mult > 0:
    raise ValueError(f"{mult=} must be a positive number.")
  return 1 / (1 + width / mult**2)


def _between(share: float, low: float, high: float) -> float:
  """From `low` (share 0) to `high` (share 1) in equal ratios: fits of measured deviations."""
  return math.exp(share * math.log(high) + (1 - share) * math.log(low))


def _constrained(constraint: str | None, *scales: float) -> tuple[float, ...]:
  """The scale of the result, then those of gradients, as the constraint says."""
  if constraint is None:
    return scales
  known = [name for name in _CONSTRAINTS if len(scales) == 2 or name != "to_grad_input_scale"]
  if constraint not in known:
    raise ValueError(f"{constraint=} must be None or one of {', '.join(known)}.")
  return (_CONSTRAINTS[constraint](*scales),) * len(scales)


def _elementwise(function, x, output, gradient, constraint):
  output, gradient = _constrained(constraint, output, gradient)
  x = as_floating("x", x)
  return scaled(function(scaled(at_least_float32(x), 1, gradient)), output).astype(x.dtype)


def _silu(x, mult):
  return x * jax.nn.sigmoid(mult * x)


def _reduced(losses, reduction):
  """The sum or the mean of losses; the gradient is the sum's in both cases."""
  if reduction not in ("mean", "sum"):
    raise ValueError(f"{reduction=} must be 'mean' or 'sum'.")
  return scaled(jnp.sum(losses), 1 / max(losses.size, 1) if reduction == "mean" else 1)


def _affine(x, epsilon, scale, bias):
  """x over its root mean square, times the scale, plus the bias."""
  x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
  backward = (x.shape[-1] / max(x.size, 1)) ** 0.5
  along_last = (1,) * (x.ndim - 1) + x.shape[-1:]
  if scale is not None:
    x *= scaled(scale, 1, backward).astype(x.dtype).reshape(along_last)
  if bias is not None:
    x += scaled(bias, 1, backward).astype(x.dtype).reshape(along_last)
  return x
