"""Our optimizers go wherever `optax.adamw` goes: one table of optimizers and of places.

`optax.adamw` is the control: each place takes it.
"""

import copy
import functools
import itertools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization, struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import (
  compensated,
  compress_state,
  dynamic_loss_scale,
  fixed_loss_scale,
  stable_adamw,
)
from sbjax.optim.averaged import averaged
from sbjax.optim.stable_adamw import ScaleByStableAdamState, states_of, tensor_rms
from sbjax.optim.state_formats import FORMATS

pytestmark = pytest.mark.standard_promotion  # As optax needs.

STEPS, RATE, SCALE = 3, 0.01, 1024.0
stable = functools.partial(stable_adamw, weight_decay=0.1)
adamw = functools.partial(optax.adamw, weight_decay=0.1)


def compressed(inner, mu, nu):
  return lambda rate: compress_state(inner(rate), mu=FORMATS[mu], nu=FORMATS[nu])


def around(outer, inner, *args):
  return lambda rate: outer(inner(rate), *args)


COAT = compressed(stable, "E4M3_EXPANDED", "E4M3_EXPANDED")
FP8_LM = compressed(adamw, "E4M3_SCALED", "FLOAT16_SCALED")
PLUS = around(compensated, compressed(stable, "BFLOAT16", "BFLOAT16_PAIR"))
# Functions of a learning rate.
OPTIMIZERS = {
  "adamw": adamw,
  "stable_adamw": stable,
  "float32": compressed(adamw, "FLOAT32", "FLOAT32"),
  "bfloat16": compressed(adamw, "BFLOAT16", "BFLOAT16"),
  "pair": compressed(stable, "BFLOAT16_PAIR", "BFLOAT16_PAIR"),
  "coat": COAT,
  "coat of adamw": compressed(adamw, "E4M3_EXPANDED", "E4M3_EXPANDED"),
  "fp8_lm": FP8_LM,
  "fp8_lm of stable_adamw": compressed(stable, "E4M3_SCALED", "FLOAT16_SCALED"),
  "compensated": around(compensated, stable),
  "compensated exactly": around(compensated, adamw, "exact"),
  "uncompensated": around(compensated, stable, None),
  "measured": around(compensated, stable, True, True),
  "collage_plus": PLUS,
  "averaged": around(averaged, stable, 0.9),
  "averaged collage_plus": around(averaged, PLUS, 0.9),
  "fixed": around(fixed_loss_scale, stable, SCALE),
  "dynamic": around(dynamic_loss_scale, stable, SCALE),
  "fixed coat": around(fixed_loss_scale, COAT, SCALE),
  "dynamic fp8_lm": around(dynamic_loss_scale, FP8_LM, SCALE),
  "fixed collage_plus": around(fixed_loss_scale, PLUS, SCALE),
}
# The quick ones: the others are marked slow.
QUICK = ("stable_adamw", "compensated", "fixed coat", "dynamic fp8_lm")
everywhere = pytest.mark.parametrize(
  "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS]
)


def is_compensated(name):
  return "compensated" in name or "collage_plus" in name or name == "measured"


def parameters(name):
  """A matrix that is large enough for 8 bits, and a vector that is not."""
  w = jnp.sin(jnp.arange(64 * 256, dtype=jnp.float32)).reshape(64, 256)
  return {"b": w[0], "w": w.astype(jnp.bfloat16 if is_compensated(name) else jnp.float32)}


def gradients(params, step):
  """In the parameters' dtypes; the second makes an RMS of about 2."""

  def draw(path, p):
    rng = np.random.default_rng([step, *map(ord, jax.tree_util.keystr(path, simple=True))])
    return jnp.asarray(10.0**step * rng.normal(size=p.shape), p.dtype)

  return jax.tree.map_with_path(draw, params)


@functools.cache
def expected(name):
  """The parameters after STEPS updates in one jit on one device, and the state."""
  params = parameters(name)
  return jax.jit(functools.partial(train, OPTIMIZERS[name](RATE)))(params, *all_gradients(params))


def all_gradients(params):
  return [gradients(params, step) for step in range(STEPS)]


def train(optimizer, params, *gradients):
  """The parameters and the state after an update by each of the gradients; one is compiled."""

  def step(before, g):
    params, state = before
    updates, state = optimizer.update(g, state, params)
    return (optax.apply_updates(params, updates), state), None

  stacked = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
  return jax.lax.scan(step, (params, optimizer.init(params)), stacked)[0]


def assert_close(actual, desired, rtol=1e-5, share=0.01):
  for a, b in zip(*map(jax.tree.leaves, (actual, desired)), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype == jnp.int16:  # Bits below bfloat16's.
      continue
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    # XLA's sums may differ in the last bit, and a number may then be rounded to its neighbour.
    np.testing.assert_allclose(a, b, rtol=2**-3, atol=2e-3)
    assert np.mean(np.abs(a - b) > rtol * np.abs(b) + 1e-6) < share


def rounded_otherwise(name):
  """The share of numbers that may be apart: in a shard_map a coded number has another chance."""
  state = jax.eval_shape(OPTIMIZERS[name](RATE).init, parameters(name))
  return 1.0 if optax.tree.get_all_with_path(state, "details") else 0.01


def mesh(kind=AxisType.Auto):
  return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


SPECS = {"b": P("model"), "w": P("data", "model")}
ROWS = {"b": P("data"), "w": P("data")}


def placed(mesh, specs):
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
  )


class Model(nnx.Module):
  def __init__(self, params, **options):
    self.b = nnx.Param(params["b"], **options.get("b", {}))
    self.w = nnx.Param(params["w"], **options.get("w", {}))


def by_nnx(name, jit, **options):
  params = parameters(name)
  model = Model(params, **options)
  optimizer = nnx.Optimizer(model, OPTIMIZERS[name](RATE), wrt=nnx.Param)

  def step(model, optimizer, g):
    def loss(model):
      return sum(jnp.sum(getattr(model, k)[...] * g[k]) for k in g)

    optimizer.update(model, nnx.grad(loss)(model))

  step = nnx.jit(step) if jit else step
  for g in all_gradients(params):
    step(model, optimizer, g)
  return {"b": model.b[...], "w": model.w[...]}, optimizer


@pytest.mark.parametrize(
  ("name", "jit"),
  mainly(
    [*((name, True) for name in QUICK), ("stable_adamw", False)],
    itertools.product(OPTIMIZERS, [False, True]),
  ),
)
def test_nnx_optimizer_makes_the_same_updates(name, jit):
  params, optimizer = by_nnx(name, jit)
  assert_close(params, expected(name)[0])
  assert_close(jax.tree.leaves(nnx.as_pure(optimizer.opt_state)), expected(name)[1], 1e-3)


@everywhere
@pytest.mark.parametrize("kind", mainly([AxisType.Explicit], [AxisType.Auto, AxisType.Explicit]))
def test_nnx_optimizer_takes_annotated_parameters_on_a_mesh(name, kind):
  with jax.set_mesh(mesh(kind)):
    options = {k: {"out_sharding": tuple(spec)} for k, spec in SPECS.items()}
    params, _ = by_nnx(name, True, **options)
  assert_close(params, expected(name)[0])


@everywhere
def test_linen_s_boxes_give_the_state_its_shardings(name):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)

  def boxed(tree):
    return {k: nn.Partitioned(x, tuple(SPECS[k])) for k, x in tree.items()}

  def init():
    params = boxed(parameters(name))
    return params, optimizer.init(params)

  shardings = placed(mesh(), nn.get_partition_spec(jax.eval_shape(init)))
  boxes, state = jax.jit(init, out_shardings=shardings)()

  @functools.partial(jax.jit, out_shardings=shardings)
  def step(g, boxes, state):
    updates, state = optimizer.update(g, state, boxes)
    return optax.apply_updates(boxes, updates), state

  for g in all_gradients(params):
    boxes, state = step(boxed(g), boxes, state)
  assert boxes["w"].value.sharding.spec == SPECS["w"]
  assert_close(nn.meta.unbox(boxes), expected(name)[0])


@everywhere
def test_tree_map_params_finds_what_is_like_the_parameters(name):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  state = optimizer.init(params)
  same = optax.tree_map_params(optimizer, lambda x, p: x + 0 * p.astype(x.dtype), state, params)
  assert jax.tree.structure(same) == jax.tree.structure(state)
  specs = optax.tree_map_params(
    optimizer,
    lambda x, spec: spec,
    jax.eval_shape(optimizer.init, params),
    SPECS,
    transform_non_params=lambda _: P(),
  )
  split = jax.jit(optimizer.init, out_shardings=placed(mesh(), specs))(params)
  like = [x.sharding.spec for x in jax.tree.leaves(split) if x.shape == params["w"].shape]
  assert like and set(like) == {SPECS["w"]}


@pytest.mark.parametrize("stacked", [{"b": 0, "w": 1}, lambda tree: {"b": 0, "w": 1}])
def test_tree_map_params_takes_an_optimizer_of_stacks(stacked):
  """It initializes with an empty tree, of which `stacked` is no prefix."""
  optimizer = stable(RATE, stacked=stacked)
  optimizer = compress_state(optimizer, stacked=stacked, mu=FORMATS["E4M3_EXPANDED"])
  state = optimizer.init(parameters("coat"))
  same = optax.tree_map_params(optimizer, lambda x: x, state)
  assert jax.tree.structure(same) == jax.tree.structure(state)


@everywhere
def test_init_takes_shapes(name):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  shapes = jax.eval_shape(lambda: params)
  assert_close(optimizer.init(shapes), optimizer.init(jax.tree.map(jnp.zeros_like, params)))


@everywhere
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_in_a_shard_map_are_updated_as_the_whole(name, check_vma):
  params = parameters(name)
  step = functools.partial(train, OPTIMIZERS[name](RATE))
  specs = (ROWS, *[ROWS] * STEPS)
  run = jax.shard_map(
    lambda *args: step(*args)[0], mesh=mesh(), in_specs=specs, out_specs=ROWS, check_vma=check_vma
  )
  if name == "measured" and not check_vma:
    with pytest.raises(NotImplementedError, match=r"measure=True .* take check_vma=True"):
      jax.eval_shape(run, params, *all_gradients(params))
  else:
    after = jax.jit(run)(params, *all_gradients(params))
    assert_close(after, expected(name)[0], share=rounded_otherwise(name))


@everywhere
def test_a_split_state_goes_in_and_out_of_a_shard_map(name):
  """As ZeRO does. Its specs are those of the parameters; P() for what is not like them."""
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  state = optimizer.init(params)
  groups = P("data") if "coat" in name else P()  # The scales of rows, or of whole tensors.
  specs = optax.tree_map_params(
    optimizer,
    lambda x, spec: spec,
    state,
    ROWS,
    transform_non_params=lambda x: groups if isinstance(x, dict) else P(),
  )

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh(), in_specs=(ROWS, specs, ROWS), out_specs=(ROWS, specs)
  )
  def step(g, state, params):
    updates, state = optimizer.update(g, state, params)
    return optax.apply_updates(params, updates), state

  for g in all_gradients(params):
    params, state = step(g, state, params)
  share = rounded_otherwise(name)
  assert_close(params, expected(name)[0], share=share)
  if share < 1:
    assert_close(state, expected(name)[1])


@everywhere
def test_replicated_parameters_in_a_pmap_are_updated_alike(name):
  params = parameters(name)
  if name == "measured":
    pytest.skip("refused, as in a shard_map with check_vma=False")
  run = jax.pmap(lambda *args: train(OPTIMIZERS[name](RATE), *args)[0])
  twice = jax.tree.map(lambda x: jnp.stack([x, x]), (params, *all_gradients(params)))
  assert_close(jax.tree.map(lambda x: x[1], run(*twice)), expected(name)[0])


@everywhere
def test_shards_in_jit_are_updated_as_the_whole(name):
  params = parameters(name)
  put = functools.partial(jax.tree.map, jax.device_put)
  shardings = placed(mesh(), SPECS)
  optimizer = OPTIMIZERS[name](RATE)
  step = jax.jit(functools.partial(train, optimizer))
  after, _ = step(*(put(x, shardings) for x in (params, *all_gradients(params))))
  assert_close(after, expected(name)[0])


@everywhere
def test_a_state_can_be_donated(name):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  step = jax.jit(optimizer.update, donate_argnums=(1,))
  state = optimizer.init(params)
  for g in all_gradients(params):
    updates, state = step(g, state, params)
    params = optax.apply_updates(params, updates)
  assert_close(params, expected(name)[0])


def alone(params):
  return jax.tree.map(lambda p: p.ndim > 1, params)


@everywhere
def test_masked_and_multi_transform_have_empty_groups(name):
  params = parameters(name)
  optimizer = OPTIMIZERS[name](RATE)
  for outer in (
    optax.masked(optimizer, {"b": True, "w": True}),
    optax.masked(optimizer, {"b": False, "w": True}),
    optax.multi_transform(
      {"all": optimizer, "none": OPTIMIZERS[name](1.0)}, {"b": "all", "w": "all"}
    ),
  ):
    after, state = jax.jit(functools.partial(train, outer))(params, *all_gradients(params))
    assert_close(after["w"], expected(name)[0]["w"])
  ours = [s for s in states_of(ScaleByStableAdamState, state)]
  if len(ours) == 2:
    assert tensor_rms(state).keys() == {"b", "w"}


@everywhere
def test_hyperparameters_are_injected(name):
  params = parameters(name)
  optimizer = optax.inject_hyperparams(lambda learning_rate: OPTIMIZERS[name](learning_rate))(RATE)
  after, state = jax.jit(functools.partial(train, optimizer))(params, *all_gradients(params))
  assert_close(after, expected(name)[0])
  assert state.hyperparams["learning_rate"] == jnp.float32(RATE)


@everywhere
def test_multi_steps_average_gradients(name):
  params = parameters(name)
  optimizer = optax.MultiSteps(OPTIMIZERS[name](RATE), 2)
  twice = [g for g in all_gradients(params) for _ in range(2)]
  after, _ = jax.jit(functools.partial(train, optimizer))(params, *twice)
  assert_close(after, expected(name)[0])


NARROW, WIDE = (jnp.float16, jnp.bfloat16), jnp.float32


@everywhere
@pytest.mark.parametrize(
  ("of_params", "of_gradients"),
  [
    *((narrow, narrow) for narrow in NARROW),
    *(pytest.param(WIDE, narrow, marks=pytest.mark.slow) for narrow in NARROW),
    *(pytest.param(narrow, WIDE, marks=pytest.mark.slow) for narrow in NARROW),
  ],
)
def test_parameters_and_gradients_have_any_float_dtype(name, of_params, of_gradients):
  params = jax.tree.map(lambda p: p.astype(of_params), parameters("adamw"))
  g = jax.tree.map(lambda p: p.astype(of_gradients), gradients(params, 1))
  optimizer = OPTIMIZERS[name](RATE)
  if is_compensated(name) and of_params != jnp.bfloat16:
    with pytest.raises(ValueError, match=r"compensated takes bfloat16|bfloat16 .* wanted"):
      optimizer.init(params)
    return
  update = jax.jit(optimizer.update)
  after, state = params, jax.jit(optimizer.init)(params)
  for _ in range(2):
    updates, state = update(g, state, after)
    after = optax.apply_updates(after, updates)
  assert {p.dtype for p in jax.tree.leaves(after)} == {jnp.dtype(of_params)}
  if name != "adamw":  # optax's own moments take the dtype of wider gradients.
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(
      jnp.result_type, jax.eval_shape(optimizer.init, params)
    )
  for key in params:
    moved = np.float32(after[key]) - np.float32(params[key])
    far = np.abs(moved) > RATE  # Decay and rounding move less.
    np.testing.assert_array_equal(np.sign(moved[far]), -np.sign(np.float32(g[key])[far]))
    assert far.mean() > 0.5


# Around StableAdamW: optax.adamw mixes int32 and float32.
STRICT = (
  "stable_adamw",
  "pair",
  "coat",
  "fp8_lm of stable_adamw",
  "fixed coat",
  "dynamic",
  "measured",
)


@pytest.mark.parametrize("name", mainly(["coat", "measured"], STRICT))
def test_promotion_may_be_strict(name):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    state = optimizer.init(params)
    strict, _ = jax.jit(optimizer.update)(gradients(params, 0), state, params)
  assert_close(strict, jax.jit(optimizer.update)(gradients(params, 0), state, params)[0])


@struct.dataclass
class Callable:
  """A module's parameters that may be called, as Equinox's may."""

  b: jax.Array
  w: jax.Array

  def __call__(self, x):
    raise AssertionError("A tree was called.")


@everywhere
def test_trees_may_be_callable(name):
  params = parameters(name)
  trees = [Callable(**tree) for tree in (params, *all_gradients(params))]
  after, _ = jax.jit(functools.partial(train, OPTIMIZERS[name](RATE)))(*trees)
  assert_close((after.b, after.w), tuple(expected(name)[0].values()))


@everywhere
def test_a_state_survives_storage_and_copies(name, tmp_path):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  state, like = expected(name)[1], optimizer.init(params)
  checkpointer = ocp.StandardCheckpointer()
  checkpointer.save(tmp_path / "state", state)
  checkpointer.wait_until_finished()
  for restored in (
    serialization.from_bytes(like, serialization.to_bytes(state)),
    checkpointer.restore(tmp_path / "state", like),
    pickle.loads(pickle.dumps(state)),
    copy.deepcopy(state),
  ):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
  jax.eval_shape(copy.deepcopy(optimizer).update, params, state, params)


@everywhere
def test_an_update_can_be_exported(name):
  optimizer, params = OPTIMIZERS[name](RATE), parameters(name)
  state, g = optimizer.init(params), gradients(params, 0)
  exported = jax.export.export(jax.jit(optimizer.update))(g, state, params)
  assert_close(exported.call(g, state, params), jax.jit(optimizer.update)(g, state, params))
