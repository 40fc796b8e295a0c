"""Statistics of watched tensors: of the whole tensor, of each layer, whatever the devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clip_case import clip, drawn
from clip_case import compiled as jit
from flax.traverse_util import flatten_dict
from jax.interpreters import partial_eval

from sbjax.models import SIZES
from sbjax.models.transformer import stack_blocks
from train.config import MeshConfig, OptimizerConfig
from train.optimizer import make_optimizer
from train.parallel.sharding import batch_sharding, make_mesh, replicated, state_shardings
from train.step import make_init, make_train_step
from train.task import CLIPTask
from train.tensor_metrics import check_watch, tensor_metrics

pytestmark = pytest.mark.standard_promotion  # As optax needs.

FC2 = "image/block_1/fc2/kernel"
STATISTICS = ("gradient_mean_abs", "gradient_max_abs", "rms")
SIZE = dataclasses.replace(
  SIZES["tiny"],
  vision=dataclasses.replace(SIZES["tiny"].vision, width=32, layers=2),
  text=dataclasses.replace(SIZES["tiny"].text, width=32, layers=1, context_length=8, vocab_size=32),
)
ROWS = 8


def tree(scan=False):
  """Parameters, or gradients, of two blocks and a projection."""
  rng = np.random.default_rng(0)
  kernels = rng.normal(size=(2, 3, 4)).astype(np.float32) * np.float32([[[1]], [[7]]])
  if scan:
    image = {"blocks": {"fc2": {"kernel": kernels}}}
  else:
    image = {f"block_{i}": {"fc2": {"kernel": kernels[i]}} for i in range(2)}
  return jax.tree.map(jnp.asarray, {"image": image | {"proj": kernels[0]}, "s": np.float32(-3)})


@functools.cache
def states(scan, **options):
  """The optimizer's state after a small and a large gradient."""
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1, **options), 10)
  state = optimizer.init(tree(scan))
  for factor in (0.1, 1.0):
    g = jax.tree.map(lambda x, factor=factor: x * factor, tree(scan))
    _, state = optimizer.update(g, state, tree(scan))
  return state


@pytest.mark.parametrize("scan", [False, True])
def test_a_layer_has_the_same_metrics_in_a_stack_and_alone(scan):
  got = tensor_metrics((".*",), tree(scan), states(scan), None)
  tensors = {"/".join(path): np.asarray(x) for path, x in flatten_dict(tree()).items()}
  assert set(got) == {f"{statistic}/{name}" for statistic in STATISTICS for name in tensors}
  for name, g in tensors.items():
    # The moment after the gradients g / 10 and g.
    w = 0.02 / (1 - 0.98**2)
    rms = 1 / np.sqrt((1 - w) * 0.01 + w)
    for statistic, want in zip(
      STATISTICS, (np.mean(np.abs(g)), np.max(np.abs(g)), rms), strict=True
    ):
      np.testing.assert_allclose(got[f"{statistic}/{name}"], want, rtol=1e-5, err_msg=name)
      assert got[f"{statistic}/{name}"].shape == ()


def test_patterns_match_whole_paths_of_layers_and_of_stacks():
  def names(*watch, scan=True):
    metrics = tensor_metrics(watch, tree(scan), states(scan), None)
    return {name.partition("/")[2] for name in metrics}

  both = {"image/block_0/fc2/kernel", FC2}
  assert names(FC2) == names(FC2, scan=False) == {FC2}
  assert names("image/blocks/.*") == names("image/block_(0|1)/fc2/kernel") == both
  assert names("image/block_1", "s") == {"s"}
  assert names() == set()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_visible_in_its_layer(value):
  gradients = tree(scan=True)
  kernel = gradients["image"]["blocks"]["fc2"]["kernel"]
  gradients["image"]["blocks"]["fc2"]["kernel"] = kernel.at[1, 2, 3].set(value)
  metrics = tensor_metrics(("image/.*",), gradients, states(True), jnp.float32(8))
  for statistic in STATISTICS[:2]:
    np.testing.assert_equal(float(metrics[f"{statistic}/{FC2}"]), abs(value))
    assert np.isfinite(metrics[f"{statistic}/image/block_0/fc2/kernel"])


def test_a_pattern_without_a_tensor_is_named_with_paths_near_it():
  for scan in (True, False):
    check_watch((FC2, "image/proj"), tree(scan))
    with pytest.raises(ValueError, match=rf"'image/block_2/fc2/kernel' matches no .*{FC2}"):
      check_watch((FC2, "image/block_2/fc2/kernel"), tree(scan))


def test_other_optimizers_and_frozen_parameters_have_no_rms():
  frozen, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10, freeze=("image/.*",))
  for optimizer in (optax.adam(1e-3), frozen):
    metrics = tensor_metrics((FC2,), tree(True), optimizer.init(tree(True)), None)
    assert {name.partition("/")[0] for name in metrics} == {*STATISTICS[:2]}


WATCH = ("image/block_.*", "image/patch_embedding/kernel", "text/proj")


def case(scan=True, data=1, fsdp=1, accumulate=1, watch=WATCH, **options):
  """(step, state, batch, mesh, shardings); the state's first part is the gradient's."""
  mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
  task = CLIPTask(clip(SIZE, scan=scan, recipe="full", block_maxima=bool(watch)))
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1, **options), 10)
  optimizer = optax.chain(optax.trace(0.0), optimizer)
  abstract = jax.eval_shape(make_init(task, optimizer, seed=0))
  shardings = state_shardings(abstract, abstract.params, mesh)
  plain = jax.eval_shape(make_init(CLIPTask(clip(SIZE, scan=False)), optimizer, seed=0))
  params = drawn(plain.params) | {"logit_scale": np.float32(np.log(10))}
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
  state = state._replace(params=stack_blocks(params) if scan else params)
  rng, size = np.random.default_rng(0), SIZE.vision.image_size
  image = rng.integers(0, 256, (ROWS, size, size, 3), np.uint8)
  text = rng.integers(2, 32, (ROWS, 8)).astype(np.int32)
  step = make_train_step(task, optimizer, 0, accumulate, mesh=mesh, watch=watch)
  return step, state, {"image": image, "text": text}, mesh, shardings


@functools.cache
def plain_step():
  """The metrics of unrolled layers on one device, and the gradients."""
  step, state, batch, *_ = case(scan=False)
  state, metrics, finite = jit(step)(state, batch)
  assert np.asarray(finite).all()
  return jax.device_get((metrics, state.opt_state[0].trace))


@pytest.mark.slow
def test_a_step_records_the_watched_tensors_and_every_block():
  metrics, gradients = plain_step()
  tensors = {"/".join(path): g for path, g in flatten_dict(gradients).items()}
  watched = {n for n in tensors if n.startswith("image/block_")} | {*WATCH[1:]}
  assert len(watched) == 26
  for statistic, function in zip(STATISTICS, (np.mean, np.max, None), strict=True):
    got = {n.removeprefix(f"{statistic}/") for n in metrics if n.startswith(f"{statistic}/")}
    assert got == watched
    for name in watched if function else ():
      want = function(np.abs(tensors[name]))
      np.testing.assert_allclose(metrics[f"{statistic}/{name}"], want, rtol=1e-5)
  blocks = {f"{tower}_block_{i}" for tower, n in (("image", 2), ("text", 1)) for i in range(n)}
  for kind in ("mean", "max"):
    assert {n for n in metrics if n.startswith(f"{kind}_abs_")} == {
      f"{kind}_abs_feature/{block}" for block in blocks
    }
  assert all(metrics[f"max_abs_feature/{b}"] > metrics[f"mean_abs_feature/{b}"] for b in blocks)


@functools.cache
def sharded_step():
  """A function of a loss scale that gives the metrics of scanned layers on four devices."""
  options = {"loss_scale": "fixed", "states": "coat"}
  step, state, batch, mesh, shardings = case(data=2, fsdp=2, accumulate=2, **options)
  everywhere = replicated(mesh)
  step = jit(
    step,
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, everywhere, everywhere),
  )

  def run(scale):
    trace, scaled = state.opt_state
    scaled = scaled._replace(scale=np.float32(scale))
    _, metrics, finite = step(state._replace(opt_state=(trace, scaled)), batch)
    assert np.asarray(finite).all()
    return jax.device_get(metrics)

  return run


@pytest.mark.slow
def test_scan_mesh_microbatches_and_loss_scale_change_no_metric():
  (want, _), got = plain_step(), sharded_step()(1024.0)
  assert set(got) == {*want, "loss_scale", "skipped_updates"}
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_shows_in_its_metrics():
  # Whether 2^127 overflows depends on the order in which the compiler multiplies.
  metrics = sharded_step()(np.inf)
  assert metrics["skipped_updates"] > 0
  assert not np.isfinite(metrics[f"gradient_max_abs/{WATCH[2]}"])


def test_watching_adds_metrics_and_changes_nothing_else():
  def program(watch, wanted=None):
    step, state, batch, *_ = case(data=2, accumulate=2, watch=watch)
    jaxpr, out = jax.make_jaxpr(step, return_shape=True)(state, batch)
    names = set(out[1])
    used = jax.tree.leaves(
      (
        jax.tree.map(lambda _: True, out[0]),
        {name: wanted is None or name in wanted for name in out[1]},
        True,
      )
    )
    text = str(partial_eval.dce_jaxpr(jaxpr.jaxpr, used)[0])
    # JAX 0.11 and later note in a scan's ft_in and ft_out what was left out.
    return [line for line in text.splitlines() if not re.match(r" *ft_(in|out)=", line)], names

  plain, names = program(())
  assert not any(name.startswith(("gradient_m", "max_abs")) for name in names)
  watching, more = program(WATCH, names)
  assert names < more and watching == plain
