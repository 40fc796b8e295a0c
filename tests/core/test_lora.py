"""LoRA: what learns, what stays, and what the backward pass saves."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_case import normal

from sbjax import LayerNormDense, LayerNormMLP, SwitchBackDense, SwitchBackLinear, quantized_dot
from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.linear.lora import adapt, add_lora, init_lora, merge, merge_lora
from sbjax.linear.weight import LoRAWeight, serving_weight
from sbjax.ops.rows import LayerNormParams
from sbjax.quantize import dequantize, quantize
from sbjax.recipes import RECIPES

X, DY, DX = normal((6, 32)), normal((6, 16), seed=1), normal((6, 32), seed=8)
W = normal((32, 16), seed=2)
A, B = normal((32, 4), seed=3) * np.float32(0.2), normal((4, 16), seed=4)


def frozen(name, w=W):
  return serving_weight(quantize(jnp.asarray(w.T), RECIPES[name].fwd[1]))


def adapted(name, w=W, a=A, b=B):
  return LoRAWeight(frozen(name, w), jnp.asarray(a), jnp.asarray(b))


def close(actual, expected, bound=1e-5):
  actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
  assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


# ---- The function


@pytest.mark.parametrize("name", ["switchback", "switchback_q", "switchback_cm"])
def test_y_is_the_frozen_product_and_that_of_the_adapter(name):
  y = quantized_dot(X, adapted(name), name)
  close(y, quantized_dot(X, frozen(name), name) + (X @ A) @ B, 1e-6)


def test_the_multiplier_is_that_of_both_products():
  y = quantized_dot(X, adapted("switchback"), "switchback", multiplier=0.5)
  close(y, 0.5 * quantized_dot(X, adapted("switchback"), "switchback"), 1e-6)


@pytest.mark.parametrize("name", ["switchback", "switchback_q"])
def test_gradients_are_those_of_the_frozen_product_and_of_two_matmuls(name):
  def loss(x, a, b, bias):
    w = LoRAWeight(frozen(name), a, b)
    return jnp.vdot(quantized_dot(x, w, name, bias=bias, multiplier=2.0), DY)

  def plain(x, a, b, bias):
    y = quantized_dot(x, frozen(name), name, bias=bias, multiplier=2.0)
    return jnp.vdot(y + 2.0 * (x @ a) @ b, DY)

  at = jnp.asarray(X), jnp.asarray(A), jnp.asarray(B), jnp.ones(16)
  for one, other in zip(*(jax.grad(f, (0, 1, 2, 3))(*at) for f in (loss, plain)), strict=True):
    close(one, other)


def test_an_8_bit_x_is_saved_where_the_recipe_saves_8_bits():
  def saved(name):
    backward = jax.vjp(lambda a: quantized_dot(X, adapted(name, a=a), name), jnp.asarray(A))[1]
    return [x.dtype for x in jax.tree.leaves(backward) if x.shape == X.shape]

  assert saved("switchback") == [jnp.float32]
  assert saved("switchback_m") == [jnp.int8]


@pytest.mark.parametrize("jit", [True, False])
def test_nothing_of_x_is_saved_for_a_frozen_layer(jit):
  def saved(w):
    def function(x, w):
      return quantized_dot(jnp.sin(x), w, "switchback")

    function = jax.jit(function) if jit else function
    backward = jax.vjp(lambda x: function(x, w), X)[1]
    return sum(x.shape == X.shape for x in jax.tree.leaves(backward))

  assert saved(frozen("switchback")) == 1  # cos(x)
  assert saved(adapted("switchback")) == 2
  assert saved(jnp.asarray(W)) == 2


def test_no_gradient_of_the_weight_s_size_is_computed():
  kernel = frozen("switchback")

  def loss(a, b):
    return quantized_dot(X, LoRAWeight(kernel, a, b), "switchback").sum()

  text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(A, B))
  assert "f32[32,16]" not in text and "f32[16,32]" not in text
  assert "f32[32,4]" in text


@pytest.mark.parametrize("name", ["switchback", "switchback_q", "switchback_cm", "full"])
def test_the_fused_layers_are_the_layers_one_by_one(name):
  """But that a fused adapter takes its input after it was rounded to 8 bits."""
  norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))
  w2, a2, b2 = normal((16, 32), seed=5), normal((16, 4), seed=6), normal((4, 32), seed=7)
  base = (lambda w: jnp.asarray(w)) if name == "full" else (lambda w: frozen(name, w))

  def fused(x, a, b, a2, b2):
    w = LoRAWeight(base(W), a, b)
    x, (y, y2) = layer_norm_dense(x, norm, w, name, num_outputs=2)
    z = layer_norm_mlp(x, norm, w, None, LoRAWeight(base(w2), a2, b2), None, name)[1]
    return jnp.vdot(jnp.concatenate([y, y2], 1), DY) + x.sum(), jnp.vdot(z, DX)

  def apart(x, a, b, a2, b2):
    w = LoRAWeight(base(W), a, b)
    n = nn.LayerNorm(epsilon=1e-5).apply({"params": norm._asdict()}, x)
    y = quantized_dot(n, w, name)
    z = quantized_dot(jax.nn.gelu(y, approximate=False), LoRAWeight(base(w2), a2, b2), name)
    return jnp.vdot(y, DY) + x.sum(), jnp.vdot(z, DX)

  at = tuple(map(jnp.asarray, (X, A, B, a2, b2)))
  bound = 1e-5 if name == "full" else 0.05
  for one, other in zip(*(jax.jacrev(f, range(5))(*at) for f in (fused, apart)), strict=True):
    for actual, expected in zip(one, other, strict=True):
      if np.any(expected):
        close(actual, expected, bound)


@pytest.mark.parametrize("axis", [0, None])
def test_examples_may_be_mapped_beside_the_shared_adapter(axis):
  xs = jnp.stack([X, 2 * X])
  y = jax.vmap(lambda x: quantized_dot(x, adapted("switchback"), "switchback"))(xs)
  np.testing.assert_allclose(y[0], quantized_dot(X, adapted("switchback"), "switchback"), rtol=1e-5)


def test_factors_that_do_not_fit_are_named():
  for a, b in ((A[1:], B), (A, B[:, 1:]), (A[:, 1:], B)):
    with pytest.raises(ValueError, match=r"w \(32, 16\) needs a \[32, r\] and b \[r, 16\], not"):
      quantized_dot(X, adapted("switchback", a=a, b=b), "switchback")


def test_a_gradient_asked_of_frozen_bits_is_an_error():
  def loss(w):
    return quantized_dot(X, w, "switchback").sum()

  for w in (frozen("switchback"), adapted("switchback")):
    with pytest.raises(
      ValueError, match="w is frozen in 8 bits and has no gradient: differentiate"
    ):
      jax.jit(jax.grad(loss, allow_int=True))(w)


# ---- linen


class Net(nn.Module):
  recipe: str = "switchback"

  @nn.compact
  def __call__(self, x):
    x = SwitchBackDense(48, recipe=self.recipe, name="first")(x)
    x, y = LayerNormDense(16, recipe=self.recipe, name="second")(x)
    return LayerNormMLP(32, recipe=self.recipe, name="mlp", add_residual=True)(y)


ALL = (".*/kernel",)
INIT = Net().init(jax.random.key(0), X)["params"]


def base(recipe="switchback"):
  def freeze(path, w):
    return frozen(recipe, w) if path[-1].key == "kernel" else w

  return jax.tree_util.tree_map_with_path(freeze, INIT)


def moved(lora):
  """Adapters whose b is not 0."""
  return jax.tree.map(lambda x: x + 0.05 * normal(x.shape), lora)


def test_the_first_output_is_that_without_adapters():
  params = base()
  lora = init_lora(jax.random.key(1), params, 4, ALL)
  out = Net().apply({"params": add_lora(params, lora, 16.0)}, X)
  np.testing.assert_array_equal(out, Net().apply({"params": params}, X))


def test_adapters_are_drawn_by_path_and_of_the_input_s_size():
  lora = init_lora(jax.random.key(1), base(), 8, ("first/.*", "mlp/fc1/kernel"), jnp.bfloat16)
  assert jax.tree.map(jnp.shape, lora) == {
    "first": {"kernel": {"a": (32, 8), "b": (8, 48)}},
    "mlp": {"fc1": {"kernel": {"a": (16, 8), "b": (8, 32)}}},
  }
  assert {x.dtype for x in jax.tree.leaves(lora)} == {jnp.dtype(jnp.bfloat16)}
  again = init_lora(jax.random.key(1), INIT, 8, ("mlp/fc1/kernel",), jnp.bfloat16)
  np.testing.assert_array_equal(
    again["mlp"]["fc1"]["kernel"]["a"], lora["mlp"]["fc1"]["kernel"]["a"]
  )
  drawn = init_lora(jax.random.key(2), {"kernel": jnp.ones((256, 64))}, 64, ("kernel",))
  assert float(jnp.std(drawn["kernel"]["a"])) == pytest.approx(256**-0.5, rel=0.05)


def test_alpha_over_the_rank_multiplies_the_adapter():
  params = base()
  lora = moved(init_lora(jax.random.key(1), params, 4, ("first/.*",)))
  w = add_lora(params, lora, 8.0)["first"]["kernel"]
  np.testing.assert_array_equal(w.b, 2 * lora["first"]["kernel"]["b"])


@pytest.mark.standard_promotion
def test_the_optimizer_has_a_state_for_the_adapters_only_and_they_learn():
  params = base()
  lora = init_lora(jax.random.key(1), params, 4, ALL)
  optimizer = optax.adam(3e-2)
  state = optimizer.init(lora)
  assert sum(x.size for x in jax.tree.leaves(state)) == 1 + 2 * sum(
    x.size for x in jax.tree.leaves(lora)
  )

  @jax.jit
  def step(lora, state):
    def loss(lora):
      y = Net().apply({"params": add_lora(params, lora, 8.0)}, X)
      return jnp.mean((y - DY) ** 2)

    value, gradient = jax.value_and_grad(loss)(lora)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(lora, updates), state, value

  losses = []
  for _ in range(30):
    lora, state, value = step(lora, state)
    losses.append(float(value))
  assert losses[-1] < 0.5 * losses[0]


@pytest.mark.standard_promotion
def test_one_tree_of_all_parameters_trains_under_a_mask():
  """As with optax: what is frozen has neither a state nor an update."""
  params = base()
  tree = {"frozen": params, "lora": init_lora(jax.random.key(1), params, 4, ALL)}
  labels = {"frozen": "frozen", "lora": "lora"}
  optimizer = optax.multi_transform(
    {"lora": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
  )
  state = optimizer.init(tree)
  sizes = [sum(x.size for x in jax.tree.leaves(t)) for t in (state, tree["lora"])]
  assert sizes[0] == 1 + 2 * sizes[1]


def test_merged_floats_are_the_base_and_the_product():
  params = base("switchback_q")
  lora = moved(init_lora(jax.random.key(1), params, 4, ("first/.*",)))
  merged = merge_lora(add_lora(params, lora, 8.0))
  a, b = lora["first"]["kernel"].values()
  expected = dequantize(params["first"]["kernel"].fwd).T + 2 * a @ b
  close(merged["first"]["kernel"], expected, 1e-6)
  untouched = dequantize(params["mlp"]["fc1"]["kernel"].fwd).T
  np.testing.assert_array_equal(merged["mlp"]["fc1"]["kernel"], untouched)
  full, own = (Net(r).apply({"params": p}, X) for r, p in (
    ("full", merged), ("switchback_q", add_lora(params, lora, 8.0)))
  )  # fmt: skip
  close(own, full, 0.03)


def test_adapters_merge_into_the_weights_that_the_base_was_made_of():
  lora = moved(init_lora(jax.random.key(1), INIT, 4, ("first/.*",)))
  merged = merge_lora(add_lora(INIT, lora, 4.0))
  a, b = lora["first"]["kernel"].values()
  close(merged["first"]["kernel"], INIT["first"]["kernel"] + a @ b, 1e-6)
  np.testing.assert_array_equal(merged["mlp"]["fc2"]["kernel"], INIT["mlp"]["fc2"]["kernel"])


@pytest.mark.parametrize(
  ("targets", "rank", "message"),
  [
    (("fc3/.*",), 4, r"'fc3/\.\*' matches no kernel that takes an adapter.*Paths near it: "),
    (("(",), 4, r"targets: '\(' is no regular expression"),
    (".*", 4, r"targets='\.\*' must be a tuple of patterns"),
    ((), 4, r"targets=\(\) must be a tuple of patterns"),
    (("first/.*",), 0, r"rank=0 must be from 1 to 32 for first/kernel \[32, 48\]"),
    (("first/.*",), 33, r"rank=33 must be from 1 to 32"),
  ],
)
def test_what_no_adapter_fits_is_named(targets, rank, message):
  with pytest.raises(ValueError, match=message):
    init_lora(jax.random.key(0), INIT, rank, targets)


def test_adapters_of_another_model_are_named():
  lora = init_lora(jax.random.key(1), INIT, 4, ("first/.*",))
  with pytest.raises(ValueError, match="lora has an adapter for first/kernel, which params do not"):
    add_lora({"second": INIT["second"]}, lora, 8.0)


# ---- nnx


class Pair(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.fc1 = SwitchBackLinear(32, 48, rngs=rngs)
    self.fc2 = SwitchBackLinear(48, 16, recipe="switchback_q", rngs=rngs)

  def __call__(self, x):
    return self.fc2(jnp.tanh(self.fc1(x)))


@pytest.mark.standard_promotion
def test_an_nnx_model_is_adapted_learns_and_is_merged():
  model, plain = Pair(), Pair()
  adapt(model, 4, 8.0, (".*",), rngs=nnx.Rngs(1))
  before = jax.tree.leaves(nnx.state(model, nnx.Param).fc1.kernel)
  np.testing.assert_allclose(model(X), plain(X), atol=0.05)
  optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.LoRAParam)
  adapters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
  assert adapters == 4 * (32 + 48 + 48 + 16)
  assert sum(x.size for x in jax.tree.leaves(nnx.state(optimizer).opt_state)) == 1 + 2 * adapters

  @nnx.jit
  def step(model, optimizer):
    def loss(model):
      return jnp.mean((model(X) - DY) ** 2)

    argument = nnx.DiffState(0, nnx.LoRAParam)
    value, gradient = nnx.value_and_grad(loss, argnums=argument)(model)
    optimizer.update(model, gradient)
    return value

  losses = [float(step(model, optimizer)) for _ in range(30)]
  assert losses[-1] < 0.5 * losses[0]
  jax.tree.map(
    np.testing.assert_array_equal, jax.tree.leaves(nnx.state(model, nnx.Param).fc1.kernel), before
  )
  out = model(X)
  merge(model)
  assert model.fc1.kernel[...].dtype == jnp.float32 and model.fc1.lora is None
  close(model(X), out, 0.05)


def test_nnx_lora_works_around_our_layer():
  layer = SwitchBackLinear(32, 16, rngs=nnx.Rngs(0))
  adapt(layer, 4, 8.0, (".*",), rngs=nnx.Rngs(1))
  layer.lora = nnx.data(None)  # Frozen, without an adapter of ours.
  model = nnx.LoRA(32, 4, 16, base_module=layer, rngs=nnx.Rngs(2))
  np.testing.assert_array_equal(model(X), layer(X))
  model.lora_b.set_value(jnp.asarray(B))

  def loss(model, x):
    return jnp.vdot(model(x), DY)

  da = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, X)
  close(da.lora_a.get_value(), X.T @ DY @ B.T, 1e-5)
  dx = jax.grad(loss, 1)(model, jnp.asarray(X))
  kernel = layer.kernel.get_value()
  expected = jax.grad(lambda x: jnp.vdot(quantized_dot(x, kernel, "switchback"), DY))(X)
  close(dx, expected + DY @ B.T @ np.asarray(model.lora_a.get_value()).T, 1e-5)


def test_a_module_that_is_not_ours_is_no_target():
  with pytest.raises(ValueError, match="matches no kernel that takes an adapter"):
    adapt(nnx.Dict(fc1=nnx.Linear(4, 4, rngs=nnx.Rngs(0))), 2, 4.0, ("fc1",), rngs=nnx.Rngs(1))


def test_a_layer_is_adapted_once():
  model = Pair()
  adapt(model, 4, 8.0, ("fc1",), rngs=nnx.Rngs(1))
  with pytest.raises(ValueError, match="fc1 has an adapter already: `merge` the model first"):
    adapt(model, 4, 8.0, ("fc.",), rngs=nnx.Rngs(1))
