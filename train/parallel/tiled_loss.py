"""The losses of train/loss.py in tiles: no device holds all of its logits at once.

A device has b of the batch's B pairs. It gathers all texts once and computes its logits [b, B] tile
by tile: one matmul (of `Split` operands), then sums over the tile's rows and columns. The backward
pass computes a tile again, so memory between tiles is only of the features' size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

TILE = 2**26  # The most logits of a tile: 268 MB.
COLUMNS = 2**14  # About how many columns a tile has; a tile of TILE logits then has 4,096 rows.
# exp(x) is a normal float32 for x from -87.3 to 88.7. A sum of 2**17 terms of at most exp(_HIGHEST)
# is finite. If a sum is at least exp(_LOWEST), all its terms below exp(-87.3) together are less
# than its rounding error.
_HIGHEST, _LOWEST = 75.0, -58.0


def tiled_softmax(
  image_features: jax.Array,
  text_features: jax.Array,
  logit_scale: jax.Array,
  *,
  axes: tuple[str, ...] = (),
  products: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`softmax_contrastive` of the global batch, and its gradient, in tiles.

  image_features, text_features: [b, E], this device's rows of the batch.
  axes: inside `jax.shard_map(..., check_vma=False)`, the mesh axes that the batch is split over, in
    the order of `jax.lax.all_gather`. () if the features are the whole batch.
  products: a key of PRODUCTS in this file. None takes "float16" on an NVIDIA GPU and
    "float32" elsewhere. In float16 every |element| must be below 8.

  Returns the loss and metrics, the same on all devices. The features' gradients are those of the
  global loss if the loss has the same cotangent on all devices. The gradient of `logit_scale` is
  this device's share, which the caller sums over devices.
  """
  image, text = image_features.astype(jnp.float32), text_features.astype(jnp.float32)
  loss, accuracy = _softmax(image, text, logit_scale, tuple(axes), products)
  return loss, {"accuracy": accuracy}


def tiled_siglip(
  image_features: jax.Array,
  text_features: jax.Array,
  logit_scale: jax.Array,
  logit_bias: jax.Array,
  *,
  axes: tuple[str, ...] = (),
  products: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`siglip` of the global batch, and its gradient, in tiles; arguments as in `tiled_softmax`.

  A logit's gradient does not depend on other logits, so it is computed together with the loss. That
  takes three matmuls over the batch instead of four.
  """
  image, text = image_features.astype(jnp.float32), text_features.astype(jnp.float32)
  loss, accuracy = _siglip(image, text, logit_scale, logit_bias, tuple(axes), products)
  return loss, {"accuracy": accuracy}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _softmax(image, text, scale, axes, products):
  return _softmax_fwd(image, text, scale, axes, products)[0]


def _softmax_fwd(image, text, scale, axes, products):
  texts, first = _gather(text, axes), _first_row(image, axes)
  shift, fits = _shift(image, text, scale, axes)
  of_rows, of_columns = _on_platform(_exp_sums, products, image, texts, scale, first, shift, fits)
  row_shifts, row_sums, own, right = of_rows
  column_shifts, column_sums = of_columns
  largest = _over(jax.lax.pmax, column_shifts, axes)
  column_sums = _over(jax.lax.psum, column_sums * jnp.exp(column_shifts - largest), axes)
  rows, columns = row_shifts + jnp.log(row_sums), largest + jnp.log(column_sums)
  of_texts = jax.lax.dynamic_slice_in_dim(columns, first, len(text))
  loss = _mean((rows + of_texts) / 2 - own, axes)
  return (loss, _mean(right, axes)), (image, texts, scale, first, rows, columns)


def _softmax_bwd(axes, products, saved, cotangents):
  image, texts, scale, *_ = saved
  d_image, d_texts = _on_platform(_softmax_gradients, products, *saved)
  each = cotangents[0] / (2 * len(texts))
  d_scale = each * jnp.sum(image * d_image)
  return each * scale * d_image, each * scale * _scatter(d_texts, axes), d_scale


_softmax.defvjp(_softmax_fwd, _softmax_bwd)


def _shift(image, text, scale, axes):
  """A number to subtract from all logits before `exp`, and whether all sums are then in range.

  |scale| times the largest norms bounds the logits from above. The smallest logit of a pair bounds
  the sums from below, since every row and column has a pair.
  """

  def norm(x):
    return jnp.sqrt(jnp.max(jnp.sum(x * x, axis=1)))

  pairs = scale * jnp.sum(image * text, axis=1)
  extremes = jnp.stack([norm(image), norm(text), -jnp.min(pairs)])
  image_norm, text_norm, below = _over(jax.lax.pmax, extremes, axes)
  shift = jnp.maximum(jnp.abs(scale) * image_norm * text_norm - _HIGHEST, 0.0)
  return shift, -below - shift >= _LOWEST


def _exp_sums(image, texts, scale, first, shift, fits, *, by):
  """The sums of exp(logit - shift) over rows and columns, each with its own shift.

  Returns (shifts, sums, own logits, whether these are the largest) of the images, and (shifts,
  sums) of the texts. All shifts are `shift` if it `fits`, else the largest logit of each row and
  column.
  """
  numbers, factor = _numbers(image, texts, first), scale * unit(by)
  none = (jnp.full(len(image), -jnp.inf), jnp.full(len(texts), -jnp.inf))

  def constant():
    return jnp.full(len(image), shift), jnp.full(len(texts), shift)

  def maxima():
    def block(y):
      products_of = _products(y, by)

      def tile(rows, row_maxima, column_maxima):
        x, number = rows
        logits = factor * products_of(split(x, by))
        real = jnp.where(number[:, None] >= 0, logits, -jnp.inf)
        column_maxima = jnp.maximum(column_maxima, jnp.max(real, axis=0))
        return jnp.maximum(row_maxima, jnp.max(logits, axis=1)), column_maxima

      return tile

    return _in_tiles(block, (image, numbers[0]), (texts,), *none)

  row_shifts, column_shifts = jax.lax.cond(fits, constant, maxima)

  def block(y, column, column_shift):
    products_of = _products(y, by)

    def tile(rows, of_rows, column_sums):
      x, number, row_shift = rows
      row_sums, *largest = of_rows
      logits = factor * products_of(split(x, by))
      row_sums += jnp.sum(jnp.exp(logits - row_shift[:, None]), axis=1)
      largest = _around_own(logits, number, column, largest)
      exp = jnp.where(number[:, None] >= 0, jnp.exp(logits - column_shift[None]), 0.0)
      return (row_sums, *largest), column_sums + jnp.sum(exp, axis=0)

    return tile

  rows, columns = (image, numbers[0], row_shifts), (texts, numbers[1], column_shifts)
  start = (jnp.zeros(len(image)), *(none[0],) * 3)
  of_rows, column_sums = _in_tiles(block, rows, columns, start, jnp.zeros(len(texts)))
  row_sums, *largest = of_rows
  return (row_shifts, row_sums, largest[1], _is_right(*largest)), (column_shifts, column_sums)


def _softmax_gradients(image, texts, scale, first, row_sums, column_sums, *, by):
  """Gradients of the features without the factor scale / 2B; the sums are given as logarithms."""
  factor = scale * unit(by)

  def block(y, column, column_sum):
    products_of, y = _products(y, by), beside(split(y, by))

    def tile(rows, d_image, d_texts):
      x, number, row_sum = rows
      x = split(x, by)
      logits = factor * products_of(x)
      g = jnp.exp(logits - row_sum[:, None]) + jnp.exp(logits - column_sum[None])
      g -= jnp.where(number[:, None] == column[None], 2.0, 0.0)
      return _add_gradients(g, number, x, y, d_image, d_texts, by)

    return tile

  numbers = _numbers(image, texts, first)
  rows, columns = (image, numbers[0], row_sums), (texts, numbers[1], column_sums)
  d_image, d_texts = _in_tiles(block, rows, columns, jnp.zeros(image.shape), jnp.zeros(texts.shape))
  return d_image * unit(by), d_texts * unit(by)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _siglip(image, text, scale, bias, axes, products):
  texts, first = _gather(text, axes), _first_row(image, axes)
  sums = _on_platform(_siglip_sums, products, image, texts, scale, bias, first)
  return tuple(_mean(x, axes) for x in sums)


def _siglip_fwd(image, text, scale, bias, axes, products):
  texts, first = _gather(text, axes), _first_row(image, axes)
  with_gradients = functools.partial(_siglip_sums, with_gradients=True)
  losses, right, d_bias, d_image, d_texts = _on_platform(
    with_gradients, products, image, texts, scale, bias, first
  )
  d_scale = jnp.sum(image * d_image)
  gradients = (scale * d_image, scale * _scatter(d_texts, axes), d_scale, jnp.sum(d_bias))
  return (_mean(losses, axes), _mean(right, axes)), tuple(g / len(texts) for g in gradients)


def _siglip_bwd(axes, products, gradients, cotangents):
  return tuple(cotangents[0] * g for g in gradients)


_siglip.defvjp(_siglip_fwd, _siglip_bwd)


def _siglip_sums(image, texts, scale, bias, first, *, by, with_gradients=False):
  """The loss of each image, and whether its own logit is the largest.

  With gradients, also those of the bias by image, without the factor 1 / B, and of the features,
  without the factor scale / B.
  """
  factor = scale * unit(by)

  def gradient(logits, own):
    return jnp.where(own, -jax.nn.sigmoid(-logits), jax.nn.sigmoid(logits))

  def block(y, column):
    products_of, y = _products(y, by), beside(split(y, by))

    def tile(rows, of_rows, d_texts):
      x, number = rows
      losses, largest, d_bias, d_image = of_rows
      x = split(x, by)
      products = products_of(x)
      logits = factor * products + bias
      own = number[:, None] == column[None]
      losses += jnp.sum(jax.nn.softplus(jnp.where(own, -logits, logits)), axis=1)
      largest = _around_own(logits, number, column, largest)
      if with_gradients:
        d_bias += jnp.sum(gradient(logits, own), axis=1)
        # Without this XLA writes the gradient in float32 for the sum, and reads it again to split.
        products = jax.lax.optimization_barrier(products)
        g = gradient(factor * products + bias, own)
        d_image, d_texts = _add_gradients(g, number, x, y, d_image, d_texts, by)
      return (losses, largest, d_bias, d_image), d_texts

    return tile

  numbers, zeros = _numbers(image, texts, first), jnp.zeros(len(image))
  start, d_texts = (zeros, [zeros - jnp.inf] * 3, None, None), None
  if with_gradients:
    start, d_texts = (*start[:2], zeros, jnp.zeros(image.shape)), jnp.zeros(texts.shape)
  of_rows, d_texts = _in_tiles(block, (image, numbers[0]), (texts, numbers[1]), start, d_texts)
  losses, largest, d_bias, d_image = of_rows
  sums = losses, _is_right(*largest)
  return (*sums, d_bias, d_image * unit(by), d_texts * unit(by)) if with_gradients else sums


def _in_tiles(block, rows, columns, of_rows, of_columns):
  """Loops over blocks of columns, and inside a block over tiles of rows.

  block: (arrays of the block's columns) -> tile.
  tile: (arrays of the tile's rows, of_rows, of_columns) -> (of_rows, of_columns), updated.
  rows, columns: tuples of arrays [b, ...] and [B, ...].
  of_rows, of_columns: trees of such arrays, the initial values of the results.
  The last tile is padded with rows of zeros; their `number`, the second array of `rows`, is -1.
  """
  count = len(rows[0])
  height, width = tile_shape(count, len(columns[0]))
  added = -count % height

  def row_tiles(x, fill=0):
    x = jnp.pad(x, ((0, added), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return x.reshape(-1, height, *x.shape[1:])

  def column_blocks(x):
    return x.reshape(-1, width, *x.shape[1:])

  def all_rows(x):
    return x.reshape(-1, *x.shape[2:])

  rows = (row_tiles(rows[0]), row_tiles(rows[1], -1), *map(row_tiles, rows[2:]))
  of_rows = jax.tree.map(row_tiles, of_rows)
  columns, of_columns = jax.tree.map(column_blocks, (columns, of_columns))

  def over_columns(of_rows, columns_and_sums):
    columns, of_columns = columns_and_sums
    tile = block(*columns)

    def over_rows(of_columns, rows_and_sums):
      of_rows, of_columns = tile(*rows_and_sums, of_columns)
      return of_columns, of_rows

    of_columns, of_rows = jax.lax.scan(over_rows, of_columns, (rows, of_rows))
    return of_rows, of_columns

  of_rows, of_columns = jax.lax.scan(over_columns, of_rows, (columns, of_columns))
  return jax.tree.map(lambda x: all_rows(x)[:count], of_rows), jax.tree.map(all_rows, of_columns)


def tile_shape(rows: int, columns: int) -> tuple[int, int]:
  """The shape of a tile of `rows` x `columns` logits; its width divides `columns`.

  A tile has as many rows as TILE allows at about COLUMNS columns: the texts' gradients, which are
  sums over rows, are read and written once a tile.
  """
  blocks = -(-columns // COLUMNS)
  divisors = (n for n in range(blocks, 2 * blocks) if columns % n == 0)
  width = columns // next(divisors, 1)
  most = max(TILE // width, 1)
  if rows <= most:
    return rows, width
  height = -(-rows // -(-rows // most))
  return min(-(-height // 128) * 128, most), width  # Tensor cores are faster at multiples of 128.


def _numbers(image, texts, first):
  """The indices of rows and columns in the batch."""
  return first + jnp.arange(len(image)), jnp.arange(len(texts))


def _products(texts, by):
  """A function from the parts of images to their dot products with `texts`, in units of `unit`."""
  rhs = operand(split(texts, by), 1)
  return lambda image: row_products(operand(image, 0), rhs)


def _add_gradients(g, number, x, y, d_image, d_texts, by):
  """Adds the gradients of a tile's features, given the gradients g of its logits."""
  g = split(jnp.where(number[:, None] >= 0, g, 0.0), by)
  return add_product(d_image, g, y), add_transposed_product(d_texts, g, x)


def _around_own(logits, number, column, so_far):
  """Updates the largest logit of each row before, at and after the row's own column."""
  own, column = number[:, None], column[None]
  return [
    jnp.maximum(x, jnp.max(jnp.where(where, logits, -jnp.inf), axis=1))
    for x, where in zip(so_far, (column < own, column == own, column > own), strict=True)
  ]


def _is_right(before, own, behind):
  """1.0 where the argmax of a row is its own column; of equal logits, the first counts."""
  return ((before < own) & (own >= behind)).astype(jnp.float32)


def _on_platform(function, products, *arrays):
  if products is not None:
    return function(*arrays, by=PRODUCTS[products])
  return jax.lax.platform_dependent(
    *arrays,
    cuda=functools.partial(function, by=PRODUCTS["float16"]),
    default=functools.partial(function, by=PRODUCTS["float32"]),
  )


def _over(collective, x, axes):
  return collective(x, axes) if axes else x


def _mean(x, axes):
  """The mean over the rows of all devices; each device has the same number of rows."""
  return _over(jax.lax.pmean, jnp.mean(x), axes)


def _gather(text, axes):
  return jax.lax.all_gather(text, axes, tiled=True) if axes else text


def _scatter(d_texts, axes):
  """This device's rows of the sum over devices."""
  return jax.lax.psum_scatter(d_texts, axes, tiled=True) if axes else d_texts


def _first_row(image, axes):
  """The index of this device's first row in the batch."""
  return jax.lax.axis_index(axes) * len(image) if axes else 0


@dataclasses.dataclass(frozen=True)
class Split:
  """How to multiply float32 matrices on tensor cores: as two 16-bit parts each.

  Operands are multiplied by `factor`, then split into parts of `dtype`. With x ~= hi + lo a product
  is hi hi + hi lo + lo hi, summed in float32; lo lo is left out (Markidis et al. 2018,
  https://arxiv.org/abs/1803.04014). In float16 that is at most 2**-22 of a product, near float32's
  rounding. In bfloat16, which has float32's range, it is 2**-16.
  """

  dtype: jnp.dtype
  exponent_bits: int
  mantissa_bits: int
  factor: float  # A power of two.


# None does not split. In float16, elements below 2**3 do not overflow, and hi is a normal number
# for elements above 2**-27. Underflow of the parts changes their sum by at most 2**-38.
PRODUCTS = {
  "float32": None,
  "float16": Split(jnp.float16, 5, 10, 2.0**13),
  "bfloat16": Split(jnp.bfloat16, 8, 7, 1.0),
}
# The pairs of parts (0: hi, 1: lo) to multiply, by the number of parts. The largest product is
# last, so that the sum is small while the others are added.
_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}


def split(x: jax.Array, by: Split | None) -> tuple[jax.Array, ...]:
  """The parts (hi, lo) of a float32 array, or (x,) if `by` is None."""
  if by is None:
    return (x,)
  x = x * by.factor
  # Not a cast: XLA may remove a cast to 16 bits and back (xla_allow_excess_precision), so lo is 0.
  hi = jax.lax.reduce_precision(x, by.exponent_bits, by.mantissa_bits)
  return hi.astype(by.dtype), (x - hi).astype(by.dtype)


def unit(by: Split | None) -> float:
  """The factor that turns products of parts into products of the operands."""
  return 1.0 if by is None else by.factor**-2


def operand(parts: tuple[jax.Array, ...], side: int) -> jax.Array:
  """Concatenates parts for `row_products`, in the order of its sum; side 0 is lhs, 1 is rhs."""
  return jnp.concatenate([parts[pair[side]] for pair in _PAIRS[len(parts)]], axis=1)


def row_products(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """`lhs @ rhs.T` in units of `unit`, as one matmul of two `operand`s, of side 0 and side 1."""
  return _dot(lhs, rhs, (1, 1))


def beside(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """(hi, all parts concatenated): the rhs of `add_product`, computed once outside a loop."""
  return parts[0], jnp.concatenate(parts, axis=1)


def add_product(to: jax.Array, lhs: tuple, rhs: tuple) -> jax.Array:
  """`to + lhs @ rhs` in units of `unit`, from the parts of lhs and `beside` of rhs's parts."""
  *hi, last = lhs
  to = _dot(last, rhs[0], (1, 0)) + to
  # One matmul of hi with both parts. XLA would merge two, and concatenate the rhs for each tile.
  return sum(jnp.split(_dot(*hi, rhs[1], (1, 0)), 2, axis=1)[::-1], to) if hi else to


def add_transposed_product(to: jax.Array, lhs: tuple, rhs: tuple) -> jax.Array:
  """`to + lhs.T @ rhs` in units of `unit`, from the parts of both."""
  for i, j in _PAIRS[len(lhs)]:
    to = _dot(lhs[i], rhs[j], (0, 0)) + to  # In this order XLA's GPU matmuls accumulate in place.
  return to


def _dot(lhs, rhs, axes):
  # An f32 matmul is TF32 by default on a GPU: 3 digits.
  precision = "highest" if lhs.dtype == jnp.float32 else None
  contracting = (tuple((axis,) for axis in axes), ((), ()))
  return jax.lax.dot_general(
    lhs, rhs, contracting, precision=precision, preferred_element_type=jnp.float32
  )
