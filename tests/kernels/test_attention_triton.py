"""The Triton kernels of attention agree with the definition, and compile for GPUs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from pairwise import mainly

from sbjax.ops import attention as attention_ops

pytestmark = pytest.mark.aot

# Tokens, head size, causal: those of CLIP's towers, with and without dropped patches.
CLIP = [
  *((257, 80, False), (257, 64, False), (257, 104, False), (197, 64, False), (50, 64, False)),
  *((77, 64, True), (129, 80, False), (129, 64, False), (99, 64, False), (26, 64, False)),
  *((256, 72, False), (64, 72, False)),  # SO400M of SigLIP
]


def interpreted():
  return triton_case.interpreted("triton.attention_short")


def draw(batch, length, heads, head_dim, dtype="bfloat16", packed=False, seed=0):
  """qkv and do, normal."""
  shape = (batch, length, 4, heads, head_dim)
  x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  x = jnp.asarray(x).astype(dtype)
  qkv = (x[:, :, :3],) if packed else tuple(x[:, :, i : i + 1] for i in range(3))
  return qkv, x[:, :, 3]


def run(qkv, do, *, causal=False, length=None, configs=(None, None)):
  """The results of the kernels and of the definition, each followed by the gradients."""
  options = {"causal": causal, "length": qkv[0].shape[1] if length is None else length}
  kernels, (forward, backward) = interpreted(), configs
  actual = kernels.attention_forward(*qkv, **options, config=forward)
  expected = attention_ops.attention_forward(*qkv, **options)
  return (
    (*actual, *kernels.attention_backward(*expected, do, *qkv, **options, config=backward)),
    (*expected, *attention_ops.attention_backward(*expected, do, *qkv, **options)),
  )


def assert_near(actual, expected, length):
  """Relative errors in norm of a rounding of probabilities, and of results, to 16 bits."""
  for a, b in zip(actual, expected, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    if b.dtype == jnp.float32:  # lse
      np.testing.assert_allclose(a[..., :length], b[..., :length], rtol=1e-5, atol=1e-5)
      continue
    error = np.linalg.norm(_wide(a)[:, :length] - _wide(b)[:, :length])
    assert error < 1.3 * jnp.finfo(b.dtype).eps * np.linalg.norm(_wide(b)[:, :length])


def _wide(x):
  return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize(
  ("length", "head_dim", "causal"),
  mainly(
    [(257, 104, False), (197, 64, False), (77, 64, True), (129, 80, False), (64, 72, False)], CLIP
  ),
)
def test_clip_s_shapes_are_near_the_definition_s(length, head_dim, causal):
  assert_near(*run(*draw(1, length, 1, head_dim), causal=causal), length)


@pytest.mark.parametrize("seed", mainly(range(2), range(8)))
def test_drawn_shapes_are_near_the_definition_s(seed):
  draw_one = np.random.default_rng(seed)
  head_dim = int(draw_one.choice(attention_ops.HEAD_DIMS))
  tokens = int(draw_one.integers(1, 180))
  length = int(draw_one.integers(1, tokens + 1)) if seed % 3 == 0 else tokens
  dtype, packed = ("bfloat16", "float16")[seed % 2], bool(draw_one.integers(2))
  case = draw(1, tokens, 2, head_dim, dtype, packed, seed)
  actual, expected = run(*case, causal=bool(draw_one.integers(2)), length=length)
  assert_near(actual, expected, length)
  for gradient in actual[2:]:
    assert not np.any(gradient[:, length:])


@pytest.mark.parametrize(
  ("packed", "causal"),
  list(itertools.product([False, True], [False, True])),
)
@pytest.mark.slow
def test_tiles_agree_where_a_head_would_fit(packed, causal):
  tiles, length = interpreted().tiles, 150
  qkv, do = draw(2, 170, 2, 32, packed=packed)
  o, lse = attention_ops.attention_forward(*qkv, causal=causal, length=length)
  expected = attention_ops.attention_backward(o, lse, do, *qkv, causal=causal, length=length)
  for block, step in ((64, 32), (32, 64), (128, 128)):
    config = tiles.TileConfig(block, step)
    options = {"causal": causal, "length": length}
    actual = tiles.attention_forward(*qkv, **options, config=config)
    assert_near(actual, (o, lse), length)
    actual = tiles.attention_backward(o, lse, do, *qkv, **options, config=config)
    assert_near(actual, expected, length)
    assert not any(np.any(gradient[:, length:]) for gradient in actual)


@pytest.mark.parametrize("length", mainly([192], [64, 192, 320]))
def test_large_negative_logits_give_no_nan(length):
  (q, k, v), do = draw(1, length, 1, 64)
  case = (jnp.abs(q) * 32, -jnp.abs(k) * 32, v), do
  actual, expected = run(*case)
  assert all(np.isfinite(_wide(a)).all() for a in actual)
  assert_near(actual[:2], expected[:2], length)
  # Most probabilities are zero, so the gradients of q and k are differences of equal numbers.
  for a, b in zip(actual[2:], expected[2:], strict=True):
    assert np.max(np.abs(_wide(a) - _wide(b))) <= 2**-6 * np.max(np.abs(_wide(b)))


@pytest.mark.parametrize("bits", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_a_query_stays_in_its_row(bits):
  (q, k, v), do = draw(1, 77, 2, 32)
  actual, expected = run((q.at[0, 66, 0, 1, 3].set(bits), k, v), do)
  for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
    if i != 1 or np.isnan(bits):  # logsumexp of an infinite logit is infinite, not NaN.
      np.testing.assert_array_equal(np.isnan(_wide(a)), np.isnan(_wide(b)))
  assert np.isnan(_wide(actual[0])).sum() == 32


@pytest.mark.slow
def test_results_are_the_same_each_time():
  case = draw(2, 129, 1, 80)
  for a, b in zip(run(*case)[0], run(*case)[0], strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_length_is_covered_by_few_powers_of_two():
  pieces = interpreted().pieces
  assert pieces(257) == ((0, 256), (256, 16))
  assert pieces(257, 128) == ((0, 128), (128, 128), (256, 16))
  assert pieces(197) == ((0, 128), (128, 64), (192, 16))
  assert pieces(80) == ((0, 64), (64, 16)) and pieces(104) == ((0, 64), (64, 64))
  assert pieces(300, 64, 256) == ((256, 64),) and pieces(64, 64, 64) == ()
  for end in range(1, 600):
    cover = pieces(end, 128)
    assert [first for first, _ in cover] == list(np.cumsum([0, *(n for _, n in cover[:-1])]))
    assert end <= sum(cover[-1]) < max(2 * end, end + 64)


@pytest.mark.parametrize(
  ("capability", "length", "head_dim", "causal"),
  mainly(
    [(90, 257, 104, False), (80, 77, 64, True)],
    [
      *((90, 257, 104, False), (90, 257, 80, False), (90, 197, 64, False), (90, 77, 64, True)),
      *((80, 77, 64, True), (89, 99, 64, False), (80, 257, 80, False), (89, 197, 64, False)),
      *((90, 256, 72, False), (90, 64, 72, False), (80, 256, 72, False), (89, 64, 72, False)),
    ],
  ),
)
def test_operands_fit_in_registers_and_shared_memory(
  monkeypatch, tmp_path, capability, length, head_dim, causal
):
  module = triton_case.loaded("triton.attention_short")
  x = jax.ShapeDtypeStruct((256, length, 1, 16, head_dim), jnp.bfloat16)
  o = jax.ShapeDtypeStruct((256, length, 16, head_dim), jnp.bfloat16)
  lse = jax.ShapeDtypeStruct((256, 16, length), jnp.float32)

  def both(o, lse, *qkv):
    options = {"causal": causal, "length": length}
    forward = module.attention_forward(*qkv, **options)
    return forward, module.attention_backward(o, lse, o, *qkv, **options)

  kernels = triton_case.compiled(monkeypatch, tmp_path, capability, both, o, lse, x, x, x)
  in_tiles = length > (144 if capability == 90 else 80)
  assert len(kernels) == (3 if in_tiles else 2)
  for kernel in kernels:
    assert kernel.shared_bytes <= triton_case.SHARED_BYTES[capability]
    assert kernel.spilled_bytes <= 300
    assert (kernel.count("wgmma.mma_async") > 0) == (capability == 90)
