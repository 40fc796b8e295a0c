"""One training step: loss over the global batch, gradients, update, and metrics."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sbjax.models.transformer import quantize_kernels
from sbjax.optim.collage import descent_quality, split_parameters
from sbjax.optim.loss_scale import loss_scale, skipped_updates
from sbjax.optim.stable_adamw import tensor_rms
from train.finetune import stop_gradients
from train.optimizer import cast_matrices, stacked
from train.parallel.gather import gather_parameters
from train.parallel.sharding import BATCH_AXES, parameter_specs, path_name
from train.task import CLIPTask
from train.tensor_metrics import tensor_metrics

# The metrics of statistics that a model's outputs have for each block.
BLOCK_METRICS = {"block_outputs": "mean_abs_feature", "block_maxima": "max_abs_feature"}


class TrainState(NamedTuple):
  """The state that a step updates. Randomness is a function of the seed and `step`."""

  step: jax.Array  # int32 []: steps taken
  params: Any
  opt_state: Any
  frozen = ()  # no field, which checkpoints would have


class AdapterState(NamedTuple):
  """The same of a run whose `params` are adapters."""

  step: jax.Array
  params: Any
  opt_state: Any
  frozen: Any  # the parameters that the adapters stand beside (CLIPTask.split)


def make_init(task: CLIPTask, optimizer: optax.GradientTransformation, seed: int):
  """A function without arguments that makes the state at step 0."""

  def init() -> TrainState:
    return initial_state(task, optimizer, seed, task.init(jax.random.key(seed)))

  return init


def initial_state(
  task: CLIPTask, optimizer: optax.GradientTransformation, seed: int, values
) -> TrainState | AdapterState:
  """The state at step 0 of float32 parameters; a residual keeps what a cast of them loses."""
  values, frozen = task.split(values, jax.random.key(seed))
  params = cast_matrices(values, task.matrix_dtype)
  params, opt_state = split_parameters(values, params, optimizer.init(params))
  state = jnp.zeros([], jnp.int32), params, opt_state
  return TrainState(*state) if task.lora is None else AdapterState(*state, frozen)


def make_train_step(
  task: CLIPTask,
  optimizer: optax.GradientTransformation,
  seed: int,
  accumulate: int = 1,
  *,
  mesh: Mesh | None = None,
  gradient_dtype: jnp.dtype = jnp.float32,
  gradient_exchange: str = "float32",
  freeze: Sequence[str] = (),
  watch: Sequence[str] = (),
):
  """`train_step(state, batch) -> (state, metrics, finite)`, pure and ready for `jax.jit`.

  accumulate: number of microbatches a batch; the loss is over the whole batch.
  mesh: each of its devices computes its rows of the batch, and the state is split as
    `train.parallel.sharding.state_shardings` says. None, or a mesh of one device: no `shard_map`.
  gradient_dtype: dtype in which gradients of kernels are summed over devices.
  gradient_exchange: format in which gradients of matrices travel between devices, to sums in
    float32 (sbjax/distributed/exchange.py): "float32", "bfloat16", "e4m3" or "int8".
  freeze: patterns of parameters that get no gradient; those of `make_optimizer`.
  watch: patterns of parameters whose gradient and RMS are metrics (train/tensor_metrics.py).
  batch: the examples of all devices.
  metrics: float32 scalars by name.
  finite: a bool for each of `tensor_names`; the first False is the first tensor not finite.
  """
  sums = {"gradient_dtype": gradient_dtype, "gradient_exchange": gradient_exchange}
  differentiate = make_differentiate(task, accumulate, mesh, sums, freeze)

  def train_step(state: TrainState, batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    scale = loss_scale(state.opt_state)
    (_, (value, features, statistics, metrics)), gradients = differentiate(
      state.params, batch, key, scale, state.frozen
    )
    blocks = statistics["block_outputs"]
    with jax.named_scope("optimizer"):
      # Barriers: XLA writes parameters in place only with a kernel that computes nothing else.
      were_finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(state.params)]
      params, were_finite = jax.lax.optimization_barrier((state.params, were_finite))
      updates, opt_state = optimizer.update(gradients, state.opt_state, params)
      params = jax.lax.optimization_barrier(optax.apply_updates(params, updates))
    metrics = {
      "loss": value,
      **metrics,
      "gradient_norm": _norm(gradients) / (1 if scale is None else scale),
      "parameter_norm": _norm(params),
      **descent_quality(opt_state),
      **tensor_metrics(watch, gradients, opt_state, scale),
      # RMS of the patch embedding: it rises 1 to 8 steps before the loss does (the paper's 3.4).
      **{
        f"rms/{name}": rms
        for name, rms in tensor_rms(opt_state, stacked).items()
        if name.endswith("patch_embedding/kernel")
      },
      **{
        f"{BLOCK_METRICS[name]}/{tower}_block_{i}": each[tower][i]
        for name, each in statistics.items()
        for tower, layers in task.layers.items()
        for i in range(layers)
      },
    }
    if scale is not None:
      metrics |= {"loss_scale": scale, "skipped_updates": skipped_updates(opt_state)}
    checked = (
      *(x for tower in task.layers for x in blocks[tower]),
      *features,
      value,
      # With a loss scale they may be infinite: the optimizer skips them.
      *jax.tree.leaves(gradients if scale is None else updates),
      metrics["parameter_norm"],
    )
    finite = jnp.stack([*were_finite, *(jnp.isfinite(x).all() for x in checked)])
    state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, metrics, finite

  return train_step


def make_fits(task: CLIPTask, accumulate: int, mesh: Mesh):
  """`fits({"text": ids}) -> bool []`, jitted: whether all devices' texts fit the groups.

  It is compiled once, whatever the images.
  """

  def of_device(batch):
    fits = jnp.all(jax.vmap(task.text_fits)(_microbatches(batch, accumulate)))
    return fits if mesh.size == 1 else jax.lax.pmin(fits.astype(jnp.int32), BATCH_AXES) == 1

  if mesh.size == 1:
    return jax.jit(of_device)
  specs = {"in_specs": PartitionSpec(BATCH_AXES), "out_specs": PartitionSpec()}
  return jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))


def make_differentiate(
  task: CLIPTask,
  accumulate: int = 1,
  mesh: Mesh | None = None,
  sums: dict | None = None,
  freeze: Sequence[str] = (),
):
  """`_differentiate` of the global batch, a function of (params, batch, key, scale[, frozen])."""
  mesh = None if mesh is None or mesh.size == 1 else mesh
  differentiate = functools.partial(_differentiate, task, accumulate, mesh, sums or {}, freeze)
  if mesh is None:
    return differentiate
  return lambda params, batch, key, scale, frozen=(): _on_each_device(differentiate, params, mesh)(
    params, batch, key, scale, frozen
  )


def _differentiate(task, accumulate, mesh, sums, freeze, params, batch, key, scale, frozen=()):
  """The loss and its gradients, from one device's examples and its shards of the parameters.

  Args:
    sums: how gradients are summed over devices: keyword arguments of `gather_parameters`.
    scale: what multiplies the gradients, by way of the loss; None: nothing.

  Returns:
    ((scaled loss, (loss, features, statistics of blocks, metrics)), gradients): the features are of
    the device's examples, the gradients of its shards, and all else of the global batch.
  """
  axes = () if mesh is None else BATCH_AXES
  count = len(jax.tree.leaves(batch)[0]) // accumulate
  first = jax.lax.axis_index(axes) * count if axes else 0

  def loss_of(params):
    options, params = task.model.options, stop_gradients(freeze, params)
    if accumulate > 1:  # The gradients of microbatches are summed in the parameters' dtype.
      params = optax.tree.cast(params, jnp.float32)
    if task.lora is not None:
      params = (
        params if mesh is None else gather_parameters(params, options, mesh, **sums)["params"]
      )
      variables = {"params": task.joined(params, frozen)}
    elif mesh is None:
      quantized = quantize_kernels(params, options.recipe, backend=options.backend)
      variables = {"params": params, "quantized": quantized}
    else:
      variables = gather_parameters(params, options, mesh, **sums)

    def apply(batch, key):
      return task.apply(variables, batch, key, first)

    out = _in_microbatches(apply, batch, key, accumulate) if accumulate > 1 else apply(batch, key)
    value, metrics = task.loss(out, axes)
    features = tuple(out[f"{tower}_features"] for tower in task.layers)
    statistics = {name: out[name] for name in BLOCK_METRICS if name in out}
    if axes:
      statistics = {
        name: _over(name, jax.lax.pmean, jax.lax.pmax)(jax.lax.stop_gradient(x), axes)
        for name, x in statistics.items()
      }
    scaled = value if scale is None else value * scale
    return scaled, (value, features, statistics, metrics)

  return jax.value_and_grad(loss_of, has_aux=True)(params)


def _over(name: str, mean, maximum):
  """Which of two functions puts together the parts of a model's output."""
  return maximum if name == "block_maxima" else mean


def _norm(tree) -> jax.Array:
  return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


def _on_each_device(differentiate, params, mesh: Mesh):
  """Runs `differentiate` in one `shard_map` over a mesh, so that GPU kernels get shards directly.

  Under `jit` with shardings, XLA would call Python to partition every GPU kernel of every layer,
  and would move activations.
  """
  shards = parameter_specs(params, mesh)
  rows, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec()
  return jax.shard_map(
    differentiate,
    mesh=mesh,
    in_specs=(shards, rows, everywhere, everywhere, everywhere),
    out_specs=((everywhere, (everywhere, rows, everywhere, everywhere)), shards),
    check_vma=False,  # `gather_parameters` and the loss sum over devices.
  )


def _in_microbatches(apply, batch, key: jax.Array, count: int) -> dict:
  """`apply(batch, key)`, computed one after the other for `count` microbatches.

  The forward pass saves only features. The backward pass applies the model again with the same keys
  and adds up the gradients of the loss over the whole batch (Gao et al. 2021,
  https://arxiv.org/abs/2101.06983). Outputs without an axis of examples are averaged, and of maxima
  the largest is taken.
  """

  @jax.checkpoint  # prevent_cse stays on: XLA may unroll a short loop and then save activations.
  def apply_one(numbered):
    i, microbatch = numbered
    return apply(microbatch, jax.random.fold_in(key, i))

  def of_batch(name, x):
    is_features = x.ndim == 3  # [count, B / count, E]
    if is_features:
      return x.swapaxes(0, 1).reshape(-1, x.shape[-1])
    return _over(name, jnp.mean, jnp.max)(x, axis=0)

  outs = jax.lax.map(apply_one, (jnp.arange(count), _microbatches(batch, count)))
  return {name: jax.tree.map(functools.partial(of_batch, name), x) for name, x in outs.items()}


def _microbatches(batch, count: int):
  """[count, B / count, ...]: the i-th has examples i, i + count, ..., so that no example moves."""
  return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)


def tensor_names(params, task: CLIPTask) -> list[str]:
  """The names of the tensors in `finite`; each tensor depends only on those before it."""
  names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  return [
    *(f"parameter {name}" for name in names),
    *(f"output of {tower} block {i}" for tower, n in task.layers.items() for i in range(n)),
    *(f"{tower} features" for tower in task.layers),
    "loss",
    *(f"gradient of {name}" for name in names),
    "parameters after the update",
  ]
