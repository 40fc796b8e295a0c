"""`jnp.einsum` of activations with a weight, with `quantized_dot` as its product."""

import jax
import jax.numpy as jnp

from sbjax.products import Conversion, Products
from sbjax.quantize import as_floating
from sbjax.recipes import Recipe, as_recipe
from sbjax.rewrite import rewritten


def quantized_einsum(
  equation: str,
  x: jax.Array,
  w: jax.Array,
  recipe: Recipe | str,
  *,
  backend: str | None = None,
) -> jax.Array:
  """`jnp.einsum(equation, x, w)` with w as the weight, whatever the order of the letters.

  Several contracted letters count as one; each index of a letter that both operands and the result
  have (an expert's) is a product of its own, with scales of its own. The result has x's dtype; w
  may be wider, as in `quantized_dot`. As nnx.Einsum's `einsum_op` it needs its recipe:
  `lambda e, x, w, **_: quantized_einsum(e, x, w, "switchback")`.

  Raises:
    ValueError: operands that are no floating-point arrays of 16 bits or more; an equation without a
      product of x and w, or one that sums or takes a diagonal of w first; what `jnp.einsum` raises.

  >>> x, w = jnp.ones((2, 5, 32)), jnp.ones((2, 32, 16))
  >>> quantized_einsum("ebd,edf->bef", x, w, "switchback").shape
  (5, 2, 16)
  """
  x, w = as_floating("x", x), as_floating("w", w)
  products = Products(Conversion((("*", as_recipe(recipe)),), backend=backend))

  def einsum(w):
    return jnp.einsum(equation, x, w.astype(x.dtype))

  y = rewritten(einsum, ["w"], products)(w)
  if not products.rows or any(row.why for row in products.rows):
    raise ValueError(f"{equation!r} of {x.shape} and {w.shape} is no product with the weight w.")
  return y
