"""Training with model.parametrization="unit": rates by width, decay, gradients of the loss."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import MICRO, clip, drawn, shapes
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig
from train import export, memory, run
from train.config import Config, ModelConfig, OptimizerConfig
from train.loss import LOSSES
from train.optimizer import STATES, cast_matrices, make_optimizer, matrix_dtype, width_factor
from train.parallel.sharding import path_name
from train.run import make_run
from train.step import TrainState, make_init, make_train_step
from train.task import CLIPTask, block_options

pytestmark = pytest.mark.standard_promotion  # As optax needs.

STEPS, RATE, DECAY = 10, 0.1, 1e-3
UNIT = {"parametrization": "unit"}


def optimizer_of(parametrization="unit", steps=STEPS, **changes):
  values = {"learning_rate": RATE, "warmup_steps": 2, "weight_decay": 0.0} | changes
  return make_optimizer(OptimizerConfig(**values), steps, parametrization=parametrization)


def params_and_gradients():
  """Of the text tower, 32 wide, and of some of the image tower, 48 wide."""
  params = drawn(shapes())
  image = {name: params["image"][name] for name in ("patch_embedding", "proj", "ln_post")}
  params = {"image": image, "text": params["text"], "logit_scale": params["logit_scale"]}
  return params, jax.tree.map(lambda p: 1e-2 * np.cos(np.float32(37) * p), params)


def updates_of(optimizer, params, gradients):
  """The updates of the first three steps, stacked, by path."""
  state, updates = jax.jit(optimizer.init)(params), []
  run = jax.jit(optimizer.update)
  for _ in range(3):
    update, state = run(gradients, state, params)
    updates.append(update)
  stacked = jax.tree.map(lambda *each: np.stack(each), *updates)
  return {path_name(path): u for path, u in jax.tree_util.tree_leaves_with_path(stacked)}


@pytest.mark.slow
def test_hidden_kernels_learn_at_a_rate_by_the_width_of_their_tower():
  params, gradients = params_and_gradients()
  plain = updates_of(optimizer_of("standard")[0], params, gradients)
  got = updates_of(optimizer_of(base_width=12)[0], params, gradients)
  hidden = {}
  for name, update in plain.items():
    tower, layer = name.partition("/")[0], name.split("/")[-2:]
    is_hidden = layer in [[n, "kernel"] for n in ("qkv", "out", "fc1", "fc2")] or "proj" in layer
    hidden[name] = is_hidden
    width = {"image": 48, "text": 32}.get(tower)
    factor = (12 / width) ** 0.5 if is_hidden else 1.0
    np.testing.assert_allclose(got[name], factor * update, rtol=1e-5, err_msg=name)
  assert sum(hidden.values()) == 6


def test_without_a_base_width_every_rate_is_the_learning_rate():
  params, gradients = params_and_gradients()
  want = updates_of(optimizer_of("standard")[0], params, gradients)
  got = updates_of(optimizer_of()[0], params, gradients)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("rate", "base_width"), mainly([(1.0, 12)], [(1e-3, 0), (1.0, 12)]))
def test_decay_depends_on_neither_the_rate_nor_the_width(rate, base_width):
  params, gradients = params_and_gradients()
  how = {"learning_rate": rate, "base_width": base_width}
  without = updates_of(optimizer_of(**how)[0], params, gradients)
  decayed = updates_of(optimizer_of(**how, weight_decay=DECAY)[0], params, gradients)
  warmup = np.array([0.5, 1.0, 1.0])
  for path, p in jax.tree_util.tree_leaves_with_path(params):
    name = path_name(path)
    axes = p.ndim - ("blocks" in name)
    p = np.asarray(p)
    expected = -DECAY * warmup.reshape(-1, *[1] * p.ndim) * p * (axes >= 2)
    difference = decayed[name] - without[name]
    np.testing.assert_allclose(
      difference, expected, rtol=1e-2, atol=2e-7 * max(1, rate), err_msg=name
    )


@pytest.mark.parametrize("states", STATES)
def test_every_choice_of_states_runs_with_munits_rules(states):
  optimizer, _ = optimizer_of(states=states, weight_decay=DECAY, base_width=64, clip_norm=1.0)
  params = jax.eval_shape(lambda p: cast_matrices(p, matrix_dtype(states)), shapes())
  state = jax.eval_shape(optimizer.init, params)
  updates, _ = jax.eval_shape(optimizer.update, params, state, params)
  assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_width_is_that_of_a_towers_stream():
  shapes_ = {"qkv": (64, 192), "out": (64, 64), "fc1": (64, 256), "fc2": (256, 64)}
  for name, shape in shapes_.items():
    for stack in (), (12,):
      assert width_factor(f"text/blocks/{name}/kernel", (*stack, *shape), 16) == 0.5
  assert width_factor("image/proj", (64, 512), 16) == 0.5
  for name in ("image/patch_embedding/kernel", "text/token_embedding/embedding", "logit_scale"):
    assert width_factor(name, (64, 64), 16) == 1.0


def features(batch, width):
  rng = np.random.default_rng(0)
  draws = (rng.normal(size=(batch, width)).astype(np.float32) for _ in range(2))
  return dict(zip(("image_features", "text_features"), draws, strict=True))


def loss_gradients(task, projected, axes=()):
  """Of the features before they are normalised, and of the logit scale."""

  def loss(projected, scale):
    unit = {name: x / jnp.linalg.norm(x, axis=1, keepdims=True) for name, x in projected.items()}
    bias = {"logit_bias": jnp.float32(-10)} if task.model.init_logit_bias is not None else {}
    return task.loss({**unit, **bias, "logit_scale": scale}, axes)[0]

  return jax.jit(jax.grad(loss, (0, 1)))(projected, jnp.float32(task.model.init_logit_scale))


@pytest.mark.parametrize(("batch", "width"), mainly([(32, 512)], [(32, 512), (256, 64)]))
@pytest.mark.parametrize("loss", ["softmax", "siglip"])
def test_the_losss_gradient_of_projected_features_has_unit_variance(batch, width, loss):
  siglip = {"init_logit_scale": 10.0, "init_logit_bias": -10.0} if loss == "siglip" else {}
  scale = 10 if loss == "siglip" else 1 / 0.07
  config = dataclasses.replace(MICRO, embed_dim=width)
  unit, standard = (
    loss_gradients(
      CLIPTask(clip(config, **options, **siglip), LOSSES[loss]), features(batch, width)
    )
    for options in (UNIT, {})
  )
  for name, gradient in unit[0].items():
    assert 0.7 < np.sqrt(np.mean(np.square(gradient))) < 1.3, name
    factor = batch * width / scale  # A constant: gradients of one function.
    same = factor * np.asarray(standard[0][name])
    np.testing.assert_allclose(gradient, same, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(unit[1], standard[1])


def test_devices_count_the_whole_batch():
  task, whole = CLIPTask(clip(**UNIT)), features(32, MICRO.embed_dim)
  mesh = jax.make_mesh((2, 2), ("data", "fsdp"), devices=jax.devices()[:4],
                       axis_types=(jax.sharding.AxisType.Auto,) * 2)  # fmt: skip
  axes = ("data", "fsdp")
  on_each = jax.shard_map(lambda part: loss_gradients(task, part, axes)[0], mesh=mesh,
                          in_specs=P(axes), out_specs=P(axes), check_vma=False)  # fmt: skip
  got, want = jax.jit(on_each)(whole), loss_gradients(task, whole)[0]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, want)


TINY = CLIPConfig(
  64,
  VisionConfig(image_size=16, patch_size=4, width=64, layers=2, heads=2),
  TextConfig(context_length=8, vocab_size=64, width=64, layers=2, heads=2, eot_id=63),
)


def trained(steps=30, **options):
  """The losses of a tiny CLIP on batches of images and the texts that describe them."""
  task = CLIPTask(clip(TINY, **options))
  optimizer, _ = optimizer_of(learning_rate=5e-3, steps=2 * steps, b2=0.95, base_width=64,
                              parametrization=task.model.options.parametrization)  # fmt: skip
  step = make_train_step(task, optimizer, seed=0)
  classes = jax.random.randint(jax.random.key(7), (24, 16, 16, 3), 0, 255, jnp.uint8)

  def body(state: TrainState, key):
    kind, noise = jax.random.split(key)
    kinds = jax.random.permutation(kind, 24)[:16]
    noise = jax.random.randint(noise, (16, 16, 16, 3), -60, 60)
    image = jnp.clip(classes[kinds].astype(jnp.int32) + noise, 0, 255).astype(jnp.uint8)
    text = jnp.concatenate(
      [jnp.full((16, 2), 1), 2 + kinds[:, None], jnp.full((16, 5), 63)], axis=1
    )
    state, metrics, finite = step(state, {"image": image, "text": text.astype(jnp.int32)})
    return state, (metrics["loss"], finite.all())

  state = make_init(task, optimizer, seed=0)()
  keys = jax.random.split(jax.random.key(9), steps)
  _, (losses, finite) = jax.jit(lambda state: jax.lax.scan(body, state, keys))(state)
  assert finite.all()
  return np.asarray(losses)


@pytest.mark.program
@pytest.mark.slow
def test_static_fp8_trains_like_float32():
  float32, fp8 = (trained(recipe=recipe, **UNIT) for recipe in ("full", "fp8_static"))
  assert float32[-10:].mean() < 0.5 * float32[:2].mean()
  np.testing.assert_allclose(fp8.mean(), float32.mean(), rtol=0.05)


def config(**changes):
  model = ModelConfig(**{"size": "tiny", "parametrization": "unit"} | changes.pop("model", {}))
  optimizer = OptimizerConfig(**{"weight_decay": 1e-4} | changes.pop("optimizer", {}))
  return Config(model=model, optimizer=optimizer, **changes)


def test_a_unit_config_is_valid_and_reaches_the_blocks():
  config(optimizer={"base_width": 256}).check()
  options = block_options(config(model={"tau": 0.25}).model)
  assert options.is_unit and options.tau == 0.25
  assert block_options(config().model).tau is None


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"init": "x.pt"}, "set model.parametrization='standard' to fine-tune"),
    ({"optimizer": {"weight_decay": 0.2}}, "weight_decay=0.2 is the share .* at most 0.01"),
    ({"optimizer": {"loss_scale": "dynamic"}}, "loss_scale='dynamic' must be 'none'"),
    ({"optimizer": {"base_width": -1}}, "base_width=-1 must be 0"),
    ({"model": {"tau": 1.0}}, "model.tau=1.0 must be between 0"),
    ({"model": {"parametrization": "mup"}, }, "must be one of standard, unit"),
    ({"model": {"zero_init_layer_scale": True}}, "needs parametrization='standard'"),
    ({"model": {"parametrization": "standard"}, "optimizer": {"base_width": 9}}, "needs model.par"),
    ({"model": {"parametrization": "standard", "tau": 0.2}}, "needs parametrization='unit'"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_invalid_configs_are_refused_before_data_are_touched(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    make_run(config(**changes), tmp_path)


def test_a_run_has_the_optimizer_of_its_parametrization(monkeypatch, tmp_path):
  def stop(*args):
    raise InterruptedError(args[-1])

  monkeypatch.setattr(run, "make_optimizer", stop)
  with pytest.raises(InterruptedError, match=r"^unit$"):
    make_run(config(), tmp_path)


def test_a_unit_model_is_not_exported(monkeypatch, tmp_path):
  unit = types.SimpleNamespace(task=CLIPTask(clip(**UNIT)))
  monkeypatch.setattr(export, "load", lambda workdir, **_: unit)
  for name in ("open_clip", "hf"):
    with pytest.raises(ValueError, match=f"{name} has no place for model.parametrization='unit'"):
      export.export(tmp_path, name)


def test_no_remat_policy_of_a_unit_model_is_left_out():
  model = clip(SIZES["tiny"], **UNIT)
  assert set(memory._shares(model).values()) == {0.0}
  assert not memory._is_hopeless(memory.Memory(1.0, 1e9), 0.0, 1e6)
