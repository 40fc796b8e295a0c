"""One training step: loss over the global batch, gradients, update, and what to watch."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sbjax.models.clip import CLIP
from sbjax.models.sizes import CLIPConfig
from sbjax.models.transformer import quantize_weights, unstack_blocks
from sbjax.stable_adamw import tensor_rms
from train.gather import gather_parameters
from train.images import normalize
from train.sharding import BATCH_AXES, parameter_specs, path_name


class TrainState(NamedTuple):
  """All that a step changes. Randomness is a function of the seed and `step`."""

  step: jax.Array  # int32 []: steps taken
  params: Any
  opt_state: Any


def make_init(model: CLIP, optimizer: optax.GradientTransformation, seed: int):
  """A function without arguments that makes the state at step 0."""

  def init() -> TrainState:
    vision, text = model.config.vision, model.config.text
    # Stacked, layers are drawn at once, which compiles faster; and a run starts from the same
    # parameters with and without scan.
    options = dataclasses.replace(model.options, scan=True, unroll=1, recipe="full")
    params = model.clone(options=options).init(
      jax.random.key(seed),
      jnp.zeros((1, vision.image_size, vision.image_size, 3), jnp.float32),
      jnp.zeros((1, text.context_length), jnp.int32),
    )["params"]
    params = params if model.options.scan else unstack_blocks(params)
    return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))

  return init


def make_train_step(
  model: CLIP,
  optimizer: optax.GradientTransformation,
  loss,
  seed: int,
  accumulate: int = 1,
  *,
  mesh: Mesh | None = None,
  gradient_dtype: jnp.dtype = jnp.float32,
):
  """`train_step(state, batch) -> (state, metrics, finite)`, pure and ready for `jax.jit`.

  loss: one of train.loss.LOSSES.
  accumulate: how many microbatches a batch goes through the model in; the loss is over all of it.
  mesh: computes on the devices of a mesh, each on its rows of the batch, with the state split as
    `train.sharding.state_shardings` says. None, or a mesh of one device: without a `shard_map`.
  gradient_dtype: in which the devices of a mesh add up gradients of kernels.
  batch: image uint8 [B, S, S, 3] and text int32 [B, L], B being the global batch.
  metrics: float32 scalars by name.
  finite: a bool for each of `tensor_names`: the first False is where trouble began.
  """
  mesh = None if mesh is None or mesh.size == 1 else mesh
  differentiate = functools.partial(_differentiate, model, loss, accumulate, mesh, gradient_dtype)

  def train_step(state: TrainState, batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    run = differentiate if mesh is None else _on_each_device(differentiate, state.params, mesh)
    (value, (features, out, metrics)), gradients = run(state.params, batch, key)
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
    metrics = {
      "loss": value,
      **metrics,
      "logit_scale": out["logit_scale"],
      "gradient_norm": optax.tree.norm(gradients),
      "parameter_norm": optax.tree.norm(params),
      # RMS of the patch embedding: it goes up 1 to 8 steps before the loss does (the paper's 3.4).
      **{
        f"rms/{name}": rms
        for name, rms in tensor_rms(opt_state).items()
        if name.endswith("patch_embedding/kernel")
      },
      **{
        f"mean_abs_feature/{tower}_block_{i}": outputs[i]
        for tower, outputs in out["block_outputs"].items()
        for i in range(outputs.shape[0])
      },
    }
    checked = (
      *jax.tree.leaves(state.params),
      *(x for tower in ("image", "text") for x in out["block_outputs"][tower]),
      *features,
      value,
      *jax.tree.leaves(gradients),
      metrics["parameter_norm"],
    )
    finite = jnp.stack([jnp.isfinite(x).all() for x in checked])
    return TrainState(state.step + 1, params, opt_state), metrics, finite

  return train_step


def _differentiate(model, loss, accumulate, mesh, gradient_dtype, params, batch, key):
  """The loss and its gradients, from one device's examples and its shards of the parameters.

  Returns:
    ((loss, (features, the model's other outputs, metrics)), gradients): the features of the
    device's examples, the gradients of its shards, and else numbers of the global batch.
  """
  axes = () if mesh is None else BATCH_AXES
  count = len(batch["text"]) // accumulate
  first = jax.lax.axis_index(axes) * count if axes else 0

  def loss_of(params):
    if mesh is None:
      options = model.options
      quantized = quantize_weights(params, options.recipe, backend=options.backend)
      variables = {"params": params, "quantized": quantized}
    else:
      variables = gather_parameters(model, params, mesh, gradient_dtype)

    def encode(batch, key):
      image, text = normalize(batch["image"]), batch["text"]
      options = {"train": True, "first_example": first, "rngs": {"dropout": key}}
      return model.apply(variables, image, text, **options)

    if accumulate == 1:
      out = encode(batch, key)
    else:
      out = _in_microbatches(encode, batch, key, accumulate)
    value, metrics = loss(out, axes)
    features = out.pop("image_features"), out.pop("text_features")
    if axes:
      out["block_outputs"] = jax.lax.pmean(jax.lax.stop_gradient(out["block_outputs"]), axes)
    return value, (features, out, metrics)

  return jax.value_and_grad(loss_of, has_aux=True)(params)


def _on_each_device(differentiate, params, mesh: Mesh):
  """`differentiate` in one `shard_map` over a mesh, where a kernel's operands are shards already.

  `jit` with shardings would ask Python about every kernel of every layer, and move activations.
  """
  shards = parameter_specs(params, mesh)
  rows, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec()
  return jax.shard_map(
    differentiate,
    mesh=mesh,
    in_specs=(shards, rows, everywhere),
    out_specs=((everywhere, (rows, everywhere, everywhere)), shards),
    check_vma=False,  # The sums over devices are those of `gather_parameters` and of the loss.
  )


def _in_microbatches(encode, batch, key: jax.Array, count: int) -> dict:
  """What `encode(batch, key)` returns for the batch, made of `count` microbatches one by one.

  Of each the features alone are kept. The backward pass encodes it again, with the same key, and
  adds to the gradients: those of the loss over the whole batch (Gao et al. 2021,
  https://arxiv.org/abs/2101.06983). What does not belong to an example is averaged.
  """
  # Microbatch i has examples i, i + count, ...: of each device its own, so that none moves.
  microbatches = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)

  @jax.checkpoint  # With its barriers: XLA may unroll a short loop, and then keep what it finds.
  def encode_one(numbered):
    i, microbatch = numbered
    return encode(microbatch, jax.random.fold_in(key, i))

  def of_batch(x):
    is_features = x.ndim == 3  # [count, B / count, E]
    return x.swapaxes(0, 1).reshape(-1, x.shape[-1]) if is_features else jnp.mean(x, axis=0)

  return jax.tree.map(of_batch, jax.lax.map(encode_one, (jnp.arange(count), microbatches)))


def tensor_names(params, config: CLIPConfig) -> list[str]:
  """What `finite` of a train step speaks of, in the order in which values depend on each other."""
  names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  return [
    *(f"parameter {name}" for name in names),
    *(f"output of image block {i}" for i in range(config.vision.layers)),
    *(f"output of text block {i}" for i in range(config.text.layers)),
    "image features",
    "text features",
    "loss",
    *(f"gradient of {name}" for name in names),
    "parameters after the update",
  ]
