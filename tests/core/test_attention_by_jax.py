"""sbjax.attention of grouped queries, cross lengths, masks, biases and lengths of examples."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_case import make_mesh, put

from sbjax import attention

BATCH, HEADS, HEAD_DIM = 2, 4, 8


def draw(kv_heads=2, tokens=6, kv_tokens=6, dtype="float32", batch=BATCH, heads=HEADS):
  """q, k, v and do, normal."""
  rng = np.random.default_rng(0)
  shapes = [(tokens, heads), (kv_tokens, kv_heads), (kv_tokens, kv_heads), (tokens, heads)]
  return [
    jnp.asarray(rng.normal(size=(batch, *shape, HEAD_DIM)).astype(np.float32)).astype(dtype)
    for shape in shapes
  ]


def reference(q, k, v, causal=False, mask=True, bias=0.0):
  """With whole masks: mask and bias are broadcastable to [B, H, L, S]."""
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
  logits = jnp.einsum("blhd,bshd->bhls", q, k) * q.shape[-1] ** -0.5 + bias
  seen = jnp.tril(jnp.ones(logits.shape[2:], bool))[None, None] if causal else True
  p = jax.nn.softmax(jnp.where(seen & jnp.asarray(mask), logits, -1e30), axis=-1)
  return jnp.einsum("bhls,bshd->blhd", p, v)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, do, *arrays):
  y, vjp = jax.vjp(function, *arrays)
  return y, vjp(do)


def assert_near(actual, expected, tolerance=1e-4):
  def near(a, b):
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))

  jax.tree.map(near, actual, expected)


def masked(kind, tokens, kv_tokens):
  """The options of that kind, and the reference's: every token attends to the first of k."""
  whole = (BATCH, HEADS, tokens, kv_tokens)
  rng = np.random.default_rng(1)
  if kind == "bias":
    bias = jnp.asarray(rng.normal(size=(HEADS, tokens, 1)), jnp.float32)
    bias = bias * jnp.arange(kv_tokens, dtype=jnp.float32)[None, None]
    return {"bias": bias}, {"bias": bias[None]}
  if kind == "lengths":
    lengths = jnp.asarray([3, kv_tokens])
    mask = jnp.arange(kv_tokens)[None, None, None] < lengths[:, None, None, None]
    return {"key_value_seq_lengths": lengths}, {"mask": mask}
  shapes = {"mask": whole, "keys": (BATCH, 1, 1, kv_tokens), "2D": whole[2:]}
  if kind not in shapes:
    return {}, {}
  mask = rng.random(shapes[kind]) < 0.6
  mask[..., 0] = True
  return {"mask": jnp.asarray(mask)}, {"mask": mask.reshape((1,) * (4 - mask.ndim) + mask.shape)}


GRID = [  # Pairwise: heads of k, tokens of q and k, causal, kind of mask, dtype.
  (4, (6, 9), False, "none", "float32"),
  (4, (6, 6), True, "mask", "bfloat16"),
  (4, (9, 6), True, "keys", "float32"),
  (4, (9, 6), False, "lengths", "float16"),
  (4, (6, 9), True, "bias", "bfloat16"),
  (2, (6, 6), False, "keys", "bfloat16"),
  (2, (6, 9), True, "lengths", "float32"),
  (2, (9, 6), False, "mask", "float32"),
  (2, (6, 6), True, "none", "float16"),
  (2, (9, 6), False, "bias", "float32"),
  (1, (6, 9), False, "mask", "float16"),
  (1, (6, 6), False, "bias", "float32"),
  (1, (9, 6), True, "none", "bfloat16"),
  (1, (6, 9), True, "keys", "float16"),
  (1, (6, 6), True, "lengths", "bfloat16"),
  (1, (9, 6), True, "2D", "float32"),
]


@pytest.mark.parametrize(("kv_heads", "lengths", "causal", "kind", "dtype"), GRID)
def test_values_and_gradients_are_the_definition_s(kv_heads, lengths, causal, kind, dtype):
  q, k, v, do = draw(kv_heads, *lengths, dtype)
  options, expected_options = masked(kind, *lengths)
  ours = functools.partial(attention, causal=causal, **options)
  theirs = functools.partial(reference, causal=causal, **expected_options)
  y, gradients = value_and_gradients(ours, do, q, k, v)
  assert {a.dtype for a in (y, *gradients)} == {jnp.dtype(dtype)}
  wide = [x.astype(jnp.float32) for x in (do, q, k, v)]
  expected_y, expected = value_and_gradients(theirs, *wide)
  assert_near(y, expected_y.astype(dtype))  # Rounded once.
  assert_near((y, gradients), (expected_y, expected), {"float32": 1e-5}.get(dtype, 2**-8))


def test_a_bias_has_a_gradient():
  q, k, v, do = draw()
  bias = masked("bias", 6, 6)[0]["bias"][None]
  gradients = [
    value_and_gradients(lambda b, f=f: f(q, k, v, bias=b), do, bias)[1]
    for f in (attention, reference)
  ]
  assert_near(*gradients)


def test_packed_arrays_and_lengths_take_masks():
  q, k, v, do = draw(HEADS)
  packed = jnp.stack([q, k, v], axis=2).at[:, 4:].set(jnp.nan)
  mask = masked("mask", 6, 6)[1]["mask"]
  ours = functools.partial(attention, mask=mask, length=4)
  y, (gradient,) = value_and_gradients(ours, do, packed)
  theirs = functools.partial(reference, mask=mask[:, :, :4, :4])
  expected, gradients = value_and_gradients(theirs, *(x[:, :4] for x in (do, q, k, v)))
  assert_near((y[:, :4], gradient[:, :4]), (expected, jnp.stack(gradients, axis=2)))
  assert not gradient[:, 4:].any()


def test_padding_of_examples_counts_for_nothing_and_gets_no_gradient():
  q, k, v, do = draw(kv_tokens=9)
  dirty = q.at[0, 4:].set(jnp.nan), k.at[0, 5:].set(jnp.nan), v.at[0, 5:].set(jnp.nan)
  lengths = {"query_seq_lengths": jnp.array([4, 6]), "key_value_seq_lengths": jnp.array([5, 9])}
  y, gradients = value_and_gradients(functools.partial(attention, **lengths), do, *dirty)
  first = [do[:1, :4], q[:1, :4], k[:1, :5], v[:1, :5]]
  expected = value_and_gradients(reference, *first)
  cut = y[:1, :4], tuple(g[:1, :n] for g, n in zip(gradients, (4, 5, 5), strict=True))
  assert_near(cut, expected)
  assert_near(y[1:], reference(q, k, v)[1:])
  for x, n in zip((y, *gradients), (4, 4, 5, 5), strict=True):
    np.testing.assert_array_equal(x[0, n:], 0)


def test_a_token_that_attends_to_none_is_finite_and_as_in_jax():
  q, k, v, do = draw()
  mask = jnp.ones((BATCH, HEADS, 6, 6), bool).at[0, :, 2].set(False)
  y, gradients = value_and_gradients(functools.partial(attention, mask=mask), do, q, k, v)
  by_jax = functools.partial(jax.nn.dot_product_attention, mask=mask, implementation="xla")
  assert all(np.isfinite(x).all() for x in (y, *gradients))
  assert_near((y, gradients), value_and_gradients(by_jax, do, q, k, v))
  assert_near(y[0, 2], jnp.repeat(v[0].mean(axis=0), 2, axis=0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_devices_compute_their_examples_and_heads(kind):
  mesh = make_mesh(kind)
  q, k, v, do = draw(4, batch=4, heads=8)
  seen = masked("keys", 6, 6)[0]["mask"].repeat(2, 0)

  def step(do, q, k, v, seen):
    y, vjp = jax.vjp(lambda *qkv: attention(*qkv, mask=seen), q, k, v)
    return y, vjp(do)

  expected = jax.jit(step)(do, q, k, v, seen)
  spec = P("data", None, "fsdp")
  specs = (spec, spec, spec, spec, P("data"))
  with jax.set_mesh(mesh):
    arrays = put(mesh, specs, do, q, k, v, seen)
    y, gradients = jax.jit(step)(*arrays)
    by_shards = jax.jit(jax.shard_map(step, in_specs=specs, out_specs=(spec, (spec,) * 3)))(*arrays)
  assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
  assert_near((y, gradients), expected)
  assert_near(by_shards, expected)


def test_vmap_maps_over_further_examples():
  q, k, v, _ = draw(batch=4)
  mapped = jax.jit(jax.vmap(attention))(*(x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)))
  assert_near(mapped.reshape(q.shape), reference(q, k, v))


def chosen(capability, arrays, **options):
  """The implementation of jax.nn that computes this for an absent chip."""
  seen = []

  def noting(q, *_, implementation, **options):
    seen.append((implementation, q.dtype.name))
    return q

  with pytest.MonkeyPatch.context() as patch, triton_case.chip(capability):
    patch.setattr(jax.nn, "dot_product_attention", noting)
    jax.eval_shape(functools.partial(attention, **options), *arrays)
  return seen


MASK = jnp.ones((6, 6), bool)
LENGTHS = jnp.ones(BATCH, jnp.int32)


@pytest.mark.parametrize(
  ("capability", "sizes", "options", "reason"),
  [
    (90, {}, {}, None),
    (80, {"kv_heads": 1, "kv_tokens": 8}, {}, None),
    (90, {"kv_heads": 4}, {"key_value_seq_lengths": LENGTHS}, None),
    (90, {"kv_heads": 4}, {"mask": MASK, "causal": True}, None),
    (90, {"kv_tokens": 9}, {}, "needs even numbers of tokens .* 6 and 9"),
    (90, {"tokens": 7}, {"mask": MASK[:1]}, "needs even numbers of tokens .* 7 and 6"),
    (90, {"kv_heads": 4}, {"bias": jnp.ones((6, 6))}, "takes no bias"),
    (90, {"kv_tokens": 8}, {"causal": True}, "q and k of one length, not 6 and 8"),
    (90, {"dtype": "float32"}, {}, "16 bits, .* not float32 and 8"),
    (75, {}, {}, "needs an NVIDIA GPU from Ampere on"),
  ],
)
def test_cudnn_computes_what_it_takes_where_it_runs_and_xla_the_rest(
  capability, sizes, options, reason
):
  *qkv, _ = draw(**({"dtype": "bfloat16"} | sizes))
  by_xla, by_cudnn = [("xla", "float32")], [("cudnn", "bfloat16")]
  assert chosen(capability, qkv, **options) == (by_xla if reason else by_cudnn)
  assert chosen(capability, qkv, backend="xla", **options) == by_xla
  if reason is None:
    assert chosen(capability, qkv, backend="cudnn", **options) == by_cudnn
    return
  with pytest.raises(NotImplementedError, match=f"^backend='cudnn' .*{reason}"):
    chosen(capability, qkv, backend="cudnn", **options)


@pytest.mark.parametrize(
  ("sizes", "options"),
  [
    ({"kv_heads": 1, "kv_tokens": 8}, {}),
    ({}, {"key_value_seq_lengths": LENGTHS, "causal": True}),
    ({"kv_tokens": 8}, {"mask": jnp.ones((BATCH, 1, 1, 8), bool)}),
    ({"dtype": "float16"}, {"mask": MASK, "query_seq_lengths": LENGTHS.astype("int16")}),
  ],
)
def test_jax_lowers_what_cudnn_takes_with_its_gradient(monkeypatch, sizes, options):
  checked = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
  monkeypatch.setattr(checked, lambda: 91000)
  arrays = draw(**({"dtype": "bfloat16"} | sizes))

  def run(q, k, v, do):
    return jax.vjp(functools.partial(attention, backend="cudnn", **options), q, k, v)[1](do)

  with triton_case.chip(90):
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
  assert re.search(r"__cudnn\$fmha\w*SoftmaxBackward", text)


@pytest.mark.parametrize("backend", ["mosaic", "triton"])
@pytest.mark.parametrize(
  ("sizes", "options", "given"),
  [
    ({}, {}, r"not q \(2, 6, 4, 8\) with k \(2, 6, 2, 8\)"),
    ({"kv_heads": 4}, {"mask": MASK}, "not a mask"),
    ({"kv_heads": 4}, {"bias": jnp.ones((6, 6))}, "not a bias"),
    ({"kv_heads": 4}, {"query_seq_lengths": LENGTHS}, "not lengths of examples"),
  ],
)
def test_our_kernels_refuse_with_what_would_compute_it(backend, sizes, options, given):
  *qkv, _ = draw(dtype="bfloat16", **sizes)
  with pytest.raises(NotImplementedError, match=f"{backend}.*{given}; 'cudnn' and 'xla' take more"):
    chosen(90, qkv, backend=backend, **options)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"mask": MASK[:5]}, r"mask must be broadcastable to .* = \(2, 4, 6, 6\), not \(5, 6\)"),
    ({"mask": MASK[None, None, None]}, r"mask must be broadcastable .* not \(1, 1, 1, 6, 6\)"),
    ({"mask": jnp.ones((6, 6))}, "mask must be bool, not float32; bias is added"),
    ({"bias": jnp.ones((2, 6, 6))}, r"bias must be broadcastable .* not \(2, 6, 6\)"),
    ({"bias": MASK}, "bias must be floating, not bool; mask is bool"),
    ({"query_seq_lengths": jnp.ones(3, int)}, r"query_seq_lengths must be .*\(2,\), not .*\(3,\)"),
    ({"key_value_seq_lengths": jnp.ones(2)}, r"key_value_seq_lengths must be .* not float32"),
    ({"length": 7}, "length=7 must be from 1 to the 6 tokens of q"),
    ({"length": 5, "query_seq_lengths": LENGTHS}, "length=5 is for k as long as q, without"),
    ({"backend": "flash"}, "Unknown backend 'flash'"),
  ],
)
def test_wrong_options_are_named(options, message):
  *qkv, _ = draw()
  with pytest.raises(ValueError, match=message):
    attention(*qkv, **options)


def test_a_length_needs_keys_as_long_as_queries():
  *qkv, _ = draw(kv_tokens=9)
  with pytest.raises(ValueError, match="length=5 is for k as long as q"):
    attention(*qkv, length=5)
