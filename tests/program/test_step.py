"""The training step on meshes of the eight virtual devices, and in microbatches."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clip_case import clip, drawn
from clip_case import compiled as jit
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from pairwise import mainly

from benchmarks.collectives import moved
from sbjax.models import SIZES
from sbjax.models.clip import CLIP
from sbjax.models.transformer import BlockOptions
from sbjax.optim.collage import summed_parameters
from train.config import MeshConfig, OptimizerConfig
from train.loss import LOSSES
from train.optimizer import cast_matrices, make_optimizer, matrix_dtype
from train.parallel.sharding import (
  batch_sharding,
  make_mesh,
  path_name,
  replicated,
  state_shardings,
)
from train.step import make_init, make_train_step, tensor_names
from train.task import CLIPTask

pytestmark = pytest.mark.standard_promotion  # As optax needs.

BATCH = 16
# Tolerances of metrics and of a tensor's update between meshes. Sums in another order flip some
# roundings to int8; which ones depends on the CPU.
METRIC_TOLERANCE = {"full": 2e-4, "switchback": 2e-2}
UPDATE_TOLERANCE = {"full": 2e-4, "switchback": 0.15}
# The tolerance of metrics and gradients between a batch and its microbatches.
ACCUMULATE_TOLERANCE = {"full": 1e-5, "switchback": 2e-2, "switchback_m": 2e-2}
MICRO = dataclasses.replace(
  SIZES["tiny"],
  vision=dataclasses.replace(SIZES["tiny"].vision, layers=2),
  text=dataclasses.replace(SIZES["tiny"].text, layers=2, context_length=8, vocab_size=32),
)
SHALLOW = dataclasses.replace(  # Unrolled layers are compiled separately.
  MICRO,
  vision=dataclasses.replace(MICRO.vision, layers=1),
  text=dataclasses.replace(MICRO.text, layers=1),
)

_SIGLIP = SIZES["tiny-siglip"]
SIGLIP = dataclasses.replace(
  _SIGLIP,
  vision=dataclasses.replace(_SIGLIP.vision, layers=1),
  text=dataclasses.replace(_SIGLIP.text, layers=1, context_length=8, vocab_size=32),
)


@functools.cache
def compiled(data: int, fsdp: int, recipe: str, loss: str):
  """(step, state, mesh, names of the tensors that the step checks)."""
  mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
  bias = {"init_logit_scale": 10.0, "init_logit_bias": -10.0} if loss == "siglip" else {}
  task = CLIPTask(clip(MICRO, recipe=recipe, **bias), LOSSES[loss])
  config = OptimizerConfig(learning_rate=1e-3, warmup_steps=1, eps=1e-3)
  optimizer, _ = make_optimizer(config, 10)
  state, shardings = make_state(task, optimizer, mesh)
  step = jit(
    make_train_step(task, optimizer, seed=0, mesh=mesh),
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
  )
  return step, state, mesh, tensor_names(state.params, task)


def make_state(task, optimizer, mesh):
  """A random state on a mesh, and its shardings. Compiling `init` took half of the time."""
  abstract = jax.eval_shape(make_init(task, optimizer, seed=0))
  shardings = state_shardings(abstract, abstract.params, mesh)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
  params = drawn(abstract.params)
  for name in ("logit_scale", "logit_bias"):
    if name in params:
      params[name] = np.float32(np.log(10) if name == "logit_scale" else -10)
  return jax.device_put(state._replace(params=params), shardings), shardings


def batch(mesh):
  rng = np.random.default_rng(0)
  size = MICRO.vision.image_size
  image = rng.integers(0, 256, (BATCH, size, size, 3), np.uint8)
  text = rng.integers(2, 32, (BATCH, MICRO.text.context_length)).astype(np.int32)
  text[:, -1] = MICRO.text.eot_id
  return jax.device_put({"image": image, "text": text}, batch_sharding(mesh))


@pytest.mark.parametrize(
  ("recipe", "loss"),
  mainly([("switchback", "softmax")], [("full", "siglip"), ("switchback", "softmax")]),
)
def test_a_step_on_eight_devices_equals_a_step_on_one(recipe, loss):
  results = []
  for data, fsdp in ((1, 1), (2, 4)):
    step, state, mesh, _ = compiled(data, fsdp, recipe, loss)
    start = state.params
    for _ in range(2):
      state, metrics, finite = step(state, batch(mesh))
    assert np.asarray(finite).all()
    update = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), state.params, start)
    results.append((metrics, update))
  assert state.params["image"]["blocks"]["fc1"]["kernel"].sharding.spec[1] == "fsdp"
  (one, one_update), (many, many_update) = results
  for name, value in one.items():
    tie = 1.01 / BATCH if name == "accuracy" else 0  # Two logits may be nearly equal.
    tolerance = METRIC_TOLERANCE[recipe]
    np.testing.assert_allclose(many[name], value, rtol=tolerance, atol=tie, err_msg=name)
  for a, b in zip(jax.tree.leaves(one_update), jax.tree.leaves(many_update), strict=True):
    assert np.linalg.norm(a - b) <= UPDATE_TOLERANCE[recipe] * np.linalg.norm(a)


@functools.cache
def in_float16(loss_scale, initial=65_536.0, mesh_size=1):
  """The state after a step in float16, its metrics, and what is finite; and the state before."""
  mesh = make_mesh(MeshConfig(data=mesh_size), jax.devices()[:mesh_size])
  task = CLIPTask(clip(SHALLOW, dtype=jnp.float16))
  config = OptimizerConfig(
    learning_rate=1e-3, warmup_steps=1, loss_scale=loss_scale, initial_loss_scale=initial
  )
  optimizer, _ = make_optimizer(config, 10)
  state, shardings = make_state(task, optimizer, mesh)
  if loss_scale != "none":
    scale = jax.device_put(jnp.float32(initial), replicated(mesh))
    state = state._replace(opt_state=state.opt_state._replace(scale=scale))
  step = jit(
    make_train_step(task, optimizer, seed=0, mesh=mesh),
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
  )
  return (*step(state, batch(mesh)), state)


@pytest.mark.parametrize(
  ("loss_scale", "mesh_size"), list(itertools.product(["fixed", "dynamic"], [1, 2]))
)
@pytest.mark.slow
def test_a_loss_scale_changes_no_metric(loss_scale, mesh_size):
  _, plain, _, _ = in_float16("none")
  _, metrics, finite, _ = in_float16(loss_scale, 1024.0, mesh_size)
  assert np.asarray(finite).all()
  assert (metrics["loss_scale"], metrics["skipped_updates"]) == (1024, 0)
  for name in ("loss", "gradient_norm"):
    np.testing.assert_allclose(metrics[name], plain[name], rtol=2e-3, err_msg=name)


@pytest.mark.parametrize(("loss_scale", "scale"), [("fixed", 2.0**40), ("dynamic", 2.0**39)])
@pytest.mark.slow
def test_a_step_whose_gradients_overflow_is_skipped(loss_scale, scale):
  state, metrics, finite, before = in_float16(loss_scale, 2.0**40)
  assert np.asarray(finite).all()
  assert metrics["skipped_updates"] > 0
  assert state.opt_state.scale == scale
  kernels = [x["image"]["blocks"]["fc1"]["kernel"] for x in (state.params, before.params)]
  np.testing.assert_array_equal(*kernels)


@functools.cache
def with_collage(accumulate, fsdp=1):
  """The state after a step in Collage, its metrics, and the state before."""
  mesh = make_mesh(MeshConfig(data=1, fsdp=fsdp), jax.devices()[:fsdp])
  model = clip(SHALLOW, recipe="full", dtype=jnp.float32)
  task = CLIPTask(model, matrix_dtype=matrix_dtype("collage_light"))
  config = OptimizerConfig(
    learning_rate=1e-3, warmup_steps=1, eps=1e-3, states="collage_light", measure_edq=True
  )
  optimizer, _ = make_optimizer(config, 10)
  state, shardings = make_state(task, optimizer, mesh)
  params = cast_matrices(state.params, task.matrix_dtype)
  state = jax.device_put(state._replace(params=params), shardings)
  step = jit(
    make_train_step(task, optimizer, seed=0, accumulate=accumulate, mesh=mesh),
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
  )
  new, metrics, finite = step(state, batch(mesh))
  assert np.asarray(finite).all()
  return new, metrics, state


@pytest.mark.slow
def test_collage_starts_from_the_numbers_of_float32_parameters():
  model, config = clip(SHALLOW, recipe="full"), OptimizerConfig(states="collage_light")
  task = CLIPTask(model, matrix_dtype=matrix_dtype("collage_light"))
  optimizer, _ = make_optimizer(config, 10_000)
  state = jax.jit(make_init(task, optimizer, seed=0))()
  values = jax.jit(CLIPTask(model).init)(jax.random.key(0))
  kernels = (x["image"]["blocks"]["fc1"]["kernel"] for x in (state.params, values))
  assert [k.dtype for k in kernels] == [jnp.bfloat16, jnp.float32]
  summed = jax.jit(summed_parameters)(state.params, state.opt_state)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-16), summed, values)


def movement(new, old):
  """How far the sums hi + lo of all parameters moved, in one vector."""
  after, before = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(summed_parameters(s.params, s.opt_state))])
    for s in (new, old)
  )
  return after - before


@pytest.mark.slow
def test_a_step_in_collage_moves_sums_and_measures_edq():
  new, metrics, old = with_collage(1)
  kernel = new.params["image"]["blocks"]["fc1"]["kernel"]
  assert kernel.dtype == jnp.bfloat16
  assert new.params["image"]["blocks"]["fc1"]["bias"].dtype == jnp.float32
  assert 0.99 < metrics["edq"] < 1.01 and 0 <= metrics["lost"] < 0.01
  assert all(value.dtype == jnp.float32 for value in metrics.values())
  assert 0 < np.abs(movement(new, old)).max() < 2e-3
  norm = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(new.params)))
  np.testing.assert_allclose(metrics["parameter_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize(("accumulate", "fsdp"), [(2, 1), (1, 2)])
@pytest.mark.slow
def test_microbatches_and_shards_of_collage_give_the_same_update(accumulate, fsdp):
  one, metrics, old = with_collage(1)
  many, others, _ = with_collage(accumulate, fsdp)
  expected, actual = movement(one, old), movement(many, old)
  # Gradients are rounded to bfloat16, and the moments of one step follow.
  assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)
  for name, value in metrics.items():
    np.testing.assert_allclose(others[name], value, rtol=1e-2, atol=2e-2, err_msg=name)


def test_a_step_names_the_first_non_finite_tensor():
  step, state, mesh, names = compiled(1, 1, "switchback", "softmax")
  broken = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      x.at[1, 0].set(jnp.nan)
      if jax.tree_util.keystr(path, simple=True, separator="/") == "image/blocks/qkv/bias"
      else x
    ),
    state.params,
  )
  for params, first in (
    (state.params, None),
    (broken, "parameter image/blocks/qkv/bias"),
  ):
    _, _, finite = step(state._replace(params=params), batch(mesh))
    finite = np.asarray(finite)
    assert len(finite) == len(names)
    assert (None if finite.all() else names[int(np.argmin(finite))]) == first
  wrong = [name for name, ok in zip(names, finite, strict=True) if not ok]
  assert "output of image block 0" not in wrong
  assert {"output of image block 1", "image features", "loss"} <= set(wrong)
  assert isinstance(state.params["logit_scale"].sharding, NamedSharding)


def accumulating(
  accumulate,
  data=1,
  fsdp=1,
  *,
  recipe="full",
  loss="softmax",
  dtype=jnp.float32,
  config=SHALLOW,
  **options,
):
  """(task, step in microbatches, state, mesh); the optimizer's state is the gradients."""
  mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
  bias = {"init_logit_scale": 10.0, "init_logit_bias": -10.0} if loss == "siglip" else {}
  task = CLIPTask(clip(config, recipe=recipe, dtype=dtype, **bias, **options), LOSSES[loss])
  optimizer = optax.trace(0.0)
  step = make_train_step(task, optimizer, 0, accumulate, mesh=mesh)
  return task, step, make_state(task, optimizer, mesh)[0], mesh


@functools.cache
def gradients(*args, **options):
  """A step's metrics and gradients."""
  _, step, state, mesh = accumulating(*args, **options)
  state, metrics, finite = jit(step)(state, batch(mesh))
  assert np.asarray(finite).all()
  return jax.device_get((metrics, state.opt_state.trace))


def assert_same_gradients(got, want, tolerance):
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), path_name(path)


@pytest.mark.parametrize(
  ("accumulate", "recipe", "loss", "scan"),
  mainly(
    [(2, "switchback_m", "siglip", True)],
    [(4, "full", "softmax", False), (2, "switchback_m", "siglip", True)],
  ),
)
def test_microbatches_change_no_metric_and_no_gradient(accumulate, recipe, loss, scan):
  (got_metrics, got), (metrics, want) = (
    gradients(count, recipe=recipe, loss=loss, scan=scan) for count in (accumulate, 1)
  )
  assert set(got_metrics) == set(metrics)
  tolerance = ACCUMULATE_TOLERANCE[recipe]
  for name, value in metrics.items():
    np.testing.assert_allclose(got_metrics[name], value, rtol=tolerance, err_msg=name)
  assert_same_gradients(got, want, tolerance)


DROPPING = {"remat": "block", "patch_dropout": 0.5, "unroll": 0}  # Two tests share its step.


@pytest.mark.slow
def test_gradients_accumulated_on_four_devices_equal_those_on_one():
  one, four = (gradients(2, *mesh, **DROPPING) for mesh in ((), (2, 2)))
  np.testing.assert_allclose(four[0]["loss"], one[0]["loss"], rtol=1e-5)
  assert_same_gradients(four[1], one[1], ACCUMULATE_TOLERANCE["full"])


@pytest.mark.slow
def test_a_siglip_s_gradients_on_four_devices_equal_those_on_one():
  options = {"config": SIGLIP, "loss": "siglip", **DROPPING}
  one, four = (gradients(2, *mesh, **options) for mesh in ((), (2, 2)))
  np.testing.assert_allclose(four[0]["loss"], one[0]["loss"], rtol=1e-5)
  assert_same_gradients(four[1], one[1], 10 * ACCUMULATE_TOLERANCE["full"])


@pytest.mark.slow
def test_a_microbatch_drops_the_same_patches_forward_and_backward():
  task, _, state, mesh = accumulating(2, **DROPPING)
  key = jax.random.fold_in(jax.random.key(0), 0)

  def loss(params):
    """The loss of both microbatches at once, without a loop."""
    outs = [
      task.apply(
        {"params": params},
        jax.tree.map(lambda x, i=i: x[i::2], batch(mesh)),
        jax.random.fold_in(key, i),
        first_example=0,
      )
      for i in range(2)
    ]
    out = jax.tree.map(lambda *x: jnp.concatenate(x) if x[0].ndim == 2 else x[0], *outs)
    return task.loss(out, axes=())[0]

  want_loss, want = jax.device_get(jit(jax.value_and_grad(loss))(state.params))
  metrics, got = gradients(2, **DROPPING)
  np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-5)
  assert_same_gradients(got, want, ACCUMULATE_TOLERANCE["full"])


def equations(jaxpr, loops=()):
  """(equation, lengths of the loops around it) of a jaxpr and its inner jaxprs."""
  for equation in jaxpr.eqns:
    yield equation, loops
    scan = (equation.params["length"],) if equation.primitive.name == "scan" else ()
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner, loops + scan)


@pytest.mark.parametrize("matrices", [jnp.float32, jnp.bfloat16])
def test_microbatches_save_only_features_and_sum_gradients_in_float32(matrices):
  _, step, state, mesh = accumulating(4, dtype=jnp.bfloat16, config=MICRO)
  state = state._replace(params=cast_matrices(state.params, matrices))
  scans = [
    equation
    for equation, loops in equations(jax.make_jaxpr(step)(state, batch(mesh)).jaxpr)
    if equation.primitive.name == "scan" and equation.params["length"] == 4 and not loops
  ]
  kept, summed = ([x.aval for x in scan.outvars] for scan in scans)
  features, of_blocks = (4, BATCH // 4, MICRO.embed_dim), (4, 2)
  assert sorted(x.shape for x in kept) == [(4,), of_blocks, of_blocks, features, features]
  assert sorted(x.shape for x in summed) == sorted(x.shape for x in jax.tree.leaves(state.params))
  assert all(x.dtype == jnp.float32 for x in summed)


@pytest.mark.parametrize("scan", [True, False])
def test_microbatches_share_kernels_that_are_quantized_once(scan):
  _, step, state, mesh = accumulating(4, recipe="switchback", scan=scan, config=MICRO)
  kernels = {
    x.shape[-2:]
    for path, x in jax.tree_util.tree_leaves_with_path(state.params)
    if path_name(path).endswith(("qkv/kernel", "out/kernel", "fc1/kernel", "fc2/kernel"))
  }
  rounded = [
    loops
    for equation, loops in equations(jax.make_jaxpr(step)(state, batch(mesh)).jaxpr)
    if equation.primitive.name == "round" and equation.outvars[0].aval.shape in kernels
  ]
  assert rounded == [()] * 16  # 4 kernels of 2 layers of 2 towers, none in a loop.


@pytest.mark.parametrize(
  ("accumulate", "by"),
  mainly([(1, "jit")], itertools.product((1, 2), ("shard_map", "jit"))),
)
def test_a_step_gathers_kernels_in_int8_and_no_activation(accumulate, by):
  batch, width, embed_dim = 128 * accumulate, 256, 64
  size = SIZES["tiny"]
  vision = dataclasses.replace(size.vision, layers=2, width=width)
  text = dataclasses.replace(size.text, layers=2, width=width, context_length=24, vocab_size=512)
  size = dataclasses.replace(size, embed_dim=embed_dim, vision=vision, text=text)
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  split = batch_sharding(mesh)
  placed = split if by == "jit" else None
  options = BlockOptions(recipe="switchback", dtype=jnp.float32, activation_sharding=placed)
  task = CLIPTask(CLIP(size, options))
  on = mesh if by == "shard_map" else None
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  state = jax.eval_shape(make_init(task, optimizer, 0))
  step = jit(
    make_train_step(task, optimizer, 0, accumulate, mesh=on),
    in_shardings=(state_shardings(state, state.params, mesh), split),
  )
  image = jax.ShapeDtypeStruct((batch, vision.image_size, vision.image_size, 3), jnp.uint8)
  captions = jax.ShapeDtypeStruct((batch, text.context_length), jnp.int32)
  hlo = step.lower(state, {"image": image, "text": captions}).compile().as_text()
  kinds = ("all-gather", "all-to-all", "collective-permute")
  sizes = {(dtype, elements) for kind, dtype, elements in moved(hlo) if kind in kinds}
  kernels = {("s8", rows * width * width) for rows in (1, 3, 4)}
  others = {
    ("f32", 3 * vision.patch_size**2 * width),  # the patch embedding
    ("f32", text.vocab_size * width),  # the token embedding
    ("f32", width * embed_dim),  # a final projection
  }
  assert kernels <= sizes
  assert not any(dtype in ("u8", "s32") for dtype, _ in sizes)  # images and texts
  # All other collectives are no larger than the features of the batch.
  assert {(t, n) for t, n in sizes - kernels - others if n > batch * embed_dim} == set()
