"""`suggest_rules`: its rules keep the bounds, measured apart from it, and round what they can."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_case import compiled, drawn, int8_products, normal

from sbjax import RecipeRules, SwitchBackDense, quantize_model, quantize_weights, suggest_rules
from sbjax.models.clip import CLIP
from sbjax.models.flax_block import PlainBlock
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BlockOptions
from sbjax.recipes import RECIPES

BATCH = normal((12, 32), seed=9)
WIDTH, OUTLIER = 32, (3, 5)
FIRST, Q, FULL = (RECIPES[name] for name in ("switchback", "switchback_q", "full"))


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    for name in ("one", "two", "three"):
      x = jnp.tanh(nn.Dense(WIDTH, name=name)(x))
    return x


class NnxMlp(nnx.Module):
  def __init__(self):
    for name in ("one", "two", "three"):
      setattr(self, name, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))

  def __call__(self, x):
    for layer in (self.one, self.two, self.three):
      x = jnp.tanh(layer(x))
    return x


def of_function(params, x):
  for name in ("one", "two", "three"):
    x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"][None])
  return x


def with_outlier(size=30.0):
  """Parameters with one large number among a matrix's."""
  params = drawn(jax.eval_shape(Mlp().init, jax.random.key(0), BATCH))
  params["params"]["two"]["kernel"][OUTLIER] = size
  return params


def to_nnx(params):
  model = NnxMlp()
  for name, layer in params["params"].items():
    getattr(model, name).kernel.set_value(jnp.asarray(layer["kernel"]))
    getattr(model, name).bias.set_value(jnp.asarray(layer["bias"]))
  return model


def score(y):
  return jnp.mean(jnp.sin(3 * y)), y


def loss(params, x):
  return score(Mlp().apply(params, x))


def results(model, params):
  """The gradient as a vector, and the outputs."""

  @compiled
  def run(params):
    (_, y), gradient = jax.value_and_grad(lambda p: score(model.apply(p, BATCH)), has_aux=True)(
      params
    )
    return jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradient)]), y.ravel()

  return [np.asarray(x, np.float64) for x in run(params)]


def cosines(rules, params):
  """Of the gradient and the outputs of a converted model, with the plain one's."""
  pairs = zip(results(quantize_model(Mlp(), rules), params), results(Mlp(), params), strict=True)
  return [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]


@pytest.mark.parametrize("bounds", [(0.99, 0.999), (0.9995, 0.99), (0.99999, 0.99999)])
def test_rules_keep_both_bounds_and_the_preferred_recipes_do_not(bounds):
  params = with_outlier()
  rules = suggest_rules(params, BATCH, loss, gradient_cosine=bounds[0], output_cosine=bounds[1])
  found = cosines(rules, params)
  assert all(cosine >= bound for cosine, bound in zip(found, bounds, strict=True)), found
  assert any(c < bound for c, bound in zip(cosines("switchback", params), bounds, strict=True))
  if FULL in (own for _, own in rules.rules):  # 16 bits only where no scales suffice.
    assert any(c < b for c, b in zip(cosines("switchback_q", params), bounds, strict=True))


def test_only_the_layer_with_a_large_number_gets_finer_scales():
  rules = suggest_rules(with_outlier(), BATCH, loss, gradient_cosine=0.99, output_cosine=0.99)
  assert rules == RecipeRules.of({"two": "switchback_q", "*": "switchback"})


def test_a_choice_without_finer_scales_leaves_that_layer_in_16_bits():
  rules = suggest_rules(
    with_outlier(), BATCH, loss, recipes=("switchback", "full"), gradient_cosine=0.99
  )
  assert rules == RecipeRules.of({"two": "full", "*": "switchback"})


def test_where_the_first_recipe_suffices_it_is_the_only_one():
  rules = suggest_rules(with_outlier(0.1), BATCH, loss, gradient_cosine=0.9, output_cosine=0.9)
  assert rules == RecipeRules((("*", FIRST),))


def test_linen_nnx_and_a_function_get_the_same_rules():
  params = with_outlier()
  expected = suggest_rules(params, BATCH, loss)
  assert expected.rules[0][0] == "two"
  own = lambda params, x: score(of_function(params, x))  # noqa: E731
  assert suggest_rules(params["params"], BATCH, own) == expected
  assert suggest_rules(to_nnx(params), BATCH, lambda model, x: score(model(x))) == expected


def test_the_table_has_what_each_layer_changes_alone(capsys):
  params = with_outlier()
  rules = suggest_rules(params, BATCH, loss, gradient_cosine=0.99, output_cosine=0.99, verbose=True)
  head, *lines, last, share = capsys.readouterr().out.splitlines()
  assert head.split("  ")[0] == "10,000 x (1 - cosine)" and len(lines) == 3
  assert lines[0].split()[0] == "two/kernel"  # The largest first.
  for line in lines:
    path, *numbers, recipe = line.split()
    alone = [cosines({path: name, "*": None}, params) for name in ("switchback", "switchback_q")]
    expected = [1e4 * (1 - c) for i in range(2) for c in (*(a[i] for a in alone), 1)]
    np.testing.assert_allclose(list(map(float, numbers)), expected, rtol=0.02, atol=1e-3)
    assert RECIPES[recipe] == rules.at(path.removesuffix("/kernel"))
  assert share == "100 % of the multiplications are in 8 bits"
  together = [float(part.split()[-1]) for part in last.split(",")]
  expected = [1e4 * (1 - cosine) for cosine in cosines(rules, params)]
  np.testing.assert_allclose(together, expected, rtol=0.02)


def test_rules_serve_quantize_weights_and_the_layers():
  params = with_outlier()
  rules = suggest_rules(params, BATCH, loss, gradient_cosine=0.99, output_cosine=0.99)
  served = quantize_weights(params, rules)["params"]
  assert served["two"]["kernel"].fwd.scale.shape == (WIDTH, 1)
  assert served["one"]["kernel"].fwd.scale.shape == (1, 1)
  y = quantize_model(Mlp(), rules).apply({"params": served}, BATCH)
  layer = SwitchBackDense(WIDTH, recipe=rules.at("one")).apply({"params": served["one"]}, BATCH)
  assert y.shape == layer.shape == BATCH.shape


def test_rules_of_plain_blocks_are_those_of_clip():
  options = BlockOptions(scan=False)
  config = SIZES["tiny"]
  plain = CLIP(config, options, block=PlainBlock)
  size, length = config.vision.image_size, config.text.context_length
  inputs = normal((2, size, size, 3)), np.arange(2 * length).reshape(2, length) % 7
  params = drawn(jax.eval_shape(plain.init, jax.random.key(0), *inputs))

  def features(params, inputs):
    outputs = plain.apply(params, *inputs)
    image, text = (outputs[f"{tower}_features"] for tower in ("image", "text"))
    return jnp.sum(image * text), (image, text)

  rules = suggest_rules(
    params, inputs, features, recipes=("switchback", "full"), gradient_cosine=None,
    output_cosine=0.99999,
  )  # fmt: skip
  assert len(rules.rules) > 1
  clip = CLIP(config, BlockOptions(recipe=rules, scan=False))
  in_8_bits = [path for path in layers(params) if clip.options.recipe_at(path) == FIRST]
  assert 0 < len(in_8_bits) < len(layers(params))
  products = sum(3 if path.endswith("qkv") else 1 for path in in_8_bits)
  assert int8_products(clip.apply, params, *inputs) == products


def layers(params):
  """The paths of the blocks' linear layers."""
  found = []
  for keys, _ in jax.tree.leaves_with_path(params["params"]):
    path = [key.key for key in keys]
    if path[-1] == "kernel" and path[-2] in ("qkv", "out", "fc1", "fc2"):
      found.append("/".join(path[:-1]))
  return found


def test_a_model_that_is_served_needs_no_gradient():
  @jax.custom_vjp
  def once(y):
    return y

  def backward(_, dy):
    raise AssertionError("differentiated")

  once.defvjp(lambda y: (y, None), backward)

  def forward_loss(params, x):
    return score(once(Mlp().apply(params, x)))

  params = with_outlier()
  rules = suggest_rules(params, BATCH, forward_loss, gradient_cosine=None)
  assert cosines(rules, params)[1] >= 0.999
  assert rules.at("two") == Q


class Scanned(nn.Module):
  @nn.compact
  def __call__(self, x):
    step = nn.scan(
      lambda dense, x, _: (jnp.tanh(dense(x)), None), variable_axes={"params": 0},
      split_rngs={"params": True}, length=2,
    )  # fmt: skip
    return nn.Dense(4, name="head")(step(nn.Dense(WIDTH, name="stack"), x, None)[0])


def test_layers_of_a_scan_have_one_rule():
  params = drawn(jax.eval_shape(Scanned().init, jax.random.key(0), BATCH))
  params["params"]["stack"]["kernel"][0][OUTLIER] = 30
  rules = suggest_rules(params, BATCH, lambda p, x: score(Scanned().apply(p, x)))
  assert rules.at("stack") == Q


def test_a_path_with_signs_of_patterns_is_matched_as_it_is():
  params = {"a[0]": normal((WIDTH, WIDTH)), "a0": normal((WIDTH, WIDTH), seed=1)}
  params["a[0]"][OUTLIER] = 1000
  own = lambda p, x: score(jnp.tanh(x @ p["a[0]"]) @ p["a0"])  # noqa: E731
  rules = suggest_rules(params, BATCH, own, recipes=("switchback", "full"), gradient_cosine=0.99)
  assert rules.at("a[0]") == FULL and rules.at("a0") == FIRST


PLAIN = with_outlier(0.1)


@pytest.mark.parametrize(
  ("model", "own", "options", "message"),
  [
    (PLAIN, loss, {"gradient_cosine": 1.5}, r"gradient_cosine=1\.5 must be above 0 and below 1"),
    (PLAIN, loss, {"output_cosine": 0}, r"output_cosine=0 must be above 0 and below 1"),
    (PLAIN, loss, {"output_cosine": None}, r"output_cosine=None must be above 0"),
    (PLAIN, loss, {"recipes": ("switchback",)}, r"recipes=\('switchback',\) must be two or more"),
    (PLAIN, loss, {"recipes": "full"}, r"recipes='full' must be two or more"),
    (PLAIN, loss, {"recipes": ("int8", "full")}, "Unknown recipe 'int8'"),
    (PLAIN, lambda p, x: Mlp().apply(p, x), {}, r"loss must return .* not float32\[12,32\]"),
    (PLAIN, lambda p, x: 1.0, {}, "loss must return a floating-point scalar"),
    (PLAIN, lambda p, x: loss(p, x)[0] / 0, {}, "The loss of this batch is (inf|-inf|nan)"),
    (PLAIN, lambda p, x: loss(p, x)[0] * 0, {}, "the gradient of the loss .* not all 0"),
    (PLAIN, lambda p, x: jnp.sum(p["params"]["one"]["bias"]), {}, "multiplies by no parameter"),
    (PLAIN, lambda p, x: loss(p, x)[0], {"gradient_cosine": None}, "needs a loss that returns a"),
    (Mlp(), loss, {}, "not a Mlp"),
    ({"n": np.arange(3)}, loss, {}, "not a dict"),
    (
      with_outlier(), loss, {"recipes": ("switchback", "switchback_m")},
      r"No rules of these recipes reach the bounds; the best cosines are 0\.\d+ of the gradient,",
    ),
  ],
)  # fmt: skip
def test_what_has_no_rules_is_a_sentence(model, own, options, message):
  with pytest.raises(ValueError, match=message):
    suggest_rules(model, BATCH, own, **options)
