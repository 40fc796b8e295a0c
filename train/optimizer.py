"""The optax chain of a run: clipping, StableAdamW, AdamW or Muon, schedules; munit's rules.

Two rules depend on the shape of a tensor: vectors and scalars (biases, norms, layer-scale, the
logit scale) do not decay, and StableAdamW's RMS is one number a tensor. A scanned model stacks the
tensors of its layers, [layers, ...] under a module named "blocks". Both rules apply to each layer
of a stack, so a run trains the same with and without scan.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from sbjax.models.transformer import is_block_kernel
from sbjax.optim.averaged import averaged
from sbjax.optim.collage import compensated
from sbjax.optim.loss_scale import dynamic_loss_scale, fixed_loss_scale
from sbjax.optim.stable_adamw import stable_adamw
from sbjax.optim.state_formats import (
  BFLOAT16,
  BFLOAT16_PAIR,
  E4M3_EXPANDED,
  E4M3_SCALED,
  FLOAT16_SCALED,
  compress_state,
)
from train.config import OptimizerConfig
from train.finetune import compiled, frozen, parse_rates, scale_by_path, scale_each
from train.parallel.sharding import path_name

STACK = "blocks"  # The module of sbjax.models.clip whose parameters are [layers, ...].


def make_optimizer(
  config: OptimizerConfig,
  steps: int,
  freeze: Sequence[str] = (),
  parametrization: str = "standard",
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
  """The optimizer of a run of `steps`, and its learning rate as a function of the step.

  freeze: patterns of parameters that get no update, and have no state.
  parametrization: the model's; for "unit" the optimizer is that of `munit`.
  """
  for field, known in CHOICES.items():
    if (value := getattr(config, field)) not in known:
      raise ValueError(f"optimizer.{field}={value!r} is none of {', '.join(known)}.")
  if config.measure_edq and config.states not in COLLAGE:
    raise ValueError(
      f"optimizer.measure_edq needs optimizer.states to be one of {', '.join(COLLAGE)}, not"
      f" {config.states!r}: other parameters are float32."
    )
  schedule = make_schedule(config, config.learning_rate, steps)
  if parametrization == "unit":
    if config.name == "muon":
      raise ValueError(
        "optimizer.name='muon' has its own factors for shapes: model.parametrization='unit' takes"
        " 'stable_adamw' or 'adamw'."
      )
    optimizer = munit(config, schedule, steps)
  else:
    optimizer = OPTIMIZERS[config.name](config, schedule)
  if formats := STATES[config.states]:
    mask = functools.partial(in_few_bits, config.float32_moments)
    optimizer = compress_state(optimizer, stacked=stacked, mask=mask, **formats)
  if config.clip_norm:
    optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
  if rates := parse_rates(config.learning_rate_scale):
    optimizer = optax.chain(optimizer, scale_by_path(rates))
  if config.states in COLLAGE:  # Around all that changes an update.
    optimizer = compensated(optimizer, COLLAGE[config.states], measure=config.measure_edq)
  if freeze:
    is_frozen = functools.partial(frozen, freeze)
    trained = optax.masked(optimizer, lambda params: jax.tree.map(operator.not_, is_frozen(params)))
    optimizer = optax.chain(trained, optax.masked(optax.set_to_zero(), is_frozen))
  optimizer = LOSS_SCALES[config.loss_scale](optimizer, config.initial_loss_scale)
  return averaged(optimizer, config.ema) if config.ema else optimizer, schedule


def in_few_bits(float32_moments: Sequence[str], params):
  """A tree like `params`: False where a pattern says that moments stay float32."""
  patterns = [compiled("optimizer.float32_moments", pattern) for pattern in float32_moments]
  return jax.tree_util.tree_map_with_path(
    lambda path, _: not any(pattern.fullmatch(path_name(path)) for pattern in patterns), params
  )


def _stable_adamw(config: OptimizerConfig, schedule: optax.Schedule, clip_threshold: float = 1.0):
  return stable_adamw(
    schedule,
    b1=config.b1,
    b2=growing_b2(config.b2_power) if config.b2_power else config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=decays,
    decay_with=config.decay_with,
    clip_threshold=clip_threshold,
    stacked=stacked,
  )


def growing_b2(power: float) -> optax.Schedule:
  """AdaFactor's decay of the second moment, `1 - t^-power` at step t: 0 at the first.

  `stable_adamw` gives it the number of steps before.
  """
  return lambda count: 1 - (jnp.asarray(count, jnp.float32) + 1) ** -power


def _muon(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
  """Muon for the kernels of blocks, StableAdamW for all other parameters.

  An update is the momentum with its singular values near 1 (Jordan et al. 2024,
  https://kellerjordan.github.io/posts/muon), times .2 * sqrt(the longer side): so its RMS is about
  that of Adam's, and rate and decay serve both (Liu et al. 2025, https://arxiv.org/abs/2502.16982).
  """
  orthogonal = optax.contrib.scale_by_muon(
    weight_dimension_numbers=lambda kernels: jax.tree.map(lambda _: _LAST_TWO, kernels)
  )

  def update(*args, **kwargs):
    # Singular values end between .7 and 1.2, however exact the products are.
    with jax.default_matmul_precision("BF16_BF16_F32"):
      return orthogonal.update(*args, **kwargs)

  muon = optax.chain(
    optax.GradientTransformation(orthogonal.init, update),
    scale_each(lambda _, shape: 0.2 * max(shape[-2:]) ** 0.5),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(schedule),
  )
  parts = {"kernels": muon, "rest": _stable_adamw(config, schedule)}
  return optax.partition(parts, _kernels_and_rest)


_LAST_TWO = optax.contrib.MuonDimensionNumbers(reduction_axis=(-2,), output_axis=(-1,))


def _kernels_and_rest(params):
  def part(path, _):
    return "kernels" if is_block_kernel(tuple(path_name(path).split("/"))) else "rest"

  return jax.tree_util.tree_map_with_path(part, params)


OPTIMIZERS = {  # Functions of a config and a schedule.
  "stable_adamw": _stable_adamw,
  # AdamW is StableAdamW that never clips; the paper plots its RMS.
  "adamw": functools.partial(_stable_adamw, clip_threshold=math.inf),
  "muon": _muon,
}


def munit(
  config: OptimizerConfig, schedule: optax.Schedule, steps: int
) -> optax.GradientTransformationExtraArgs:
  """The optimizer of munit scaling (Narayan et al. 2025, https://arxiv.org/abs/2502.05967).

  A step takes `rate * width_factor * update + decay * p` from a parameter p. The rate is the
  schedule's, the update that of `config.name`. The decay is `config.weight_decay` times the same
  schedule: it depends neither on the learning rate nor on the width (Loshchilov and
  Hutter 2019, https://arxiv.org/abs/1711.05101), and StableAdamW does not clip it.
  """
  plain = dataclasses.replace(config, weight_decay=0.0)
  parts = [OPTIMIZERS[config.name](plain, schedule)]
  if config.base_width:
    parts.append(scale_by_width(config.base_width))
  if config.weight_decay:
    decay = make_schedule(config, config.weight_decay, steps)
    parts.append(optax.add_decayed_weights(lambda step: -decay(step), mask=decays))
  return optax.chain(*parts)


def scale_by_width(base: int) -> optax.GradientTransformation:
  """Multiplies the updates of hidden kernels by (base / width)**0.5; see `width_factor`."""
  return scale_each(functools.partial(width_factor, base=base))


def width_factor(name: str, shape: Sequence[int], base: int) -> float:
  """The factor on Adam's learning rate for the parameter of that path and shape.

  (base / width)**0.5 for the kernels of blocks, and 1 for embeddings, norms and biases, as in
  munit. A tower's projection [width, E] has a kernel's factor: features are normalised after it, so
  it does not shrink with the width as munit's last layer does.

  >>> width_factor("image/blocks/fc2/kernel", (12, 4096, 1024), base=256)
  0.5
  """
  path = tuple(name.split("/"))
  if is_block_kernel(path):
    width = shape[-1] if path[-2] == "fc2" else shape[-2]
  elif path[-1] == "proj":
    width = shape[-2]
  else:
    return 1.0
  return (base / width) ** 0.5


# How the moments are kept; COAT's and FP8-LM's choices are in sbjax/optim/state_formats.py.
STATES = {
  "float32": {},
  "bfloat16": {"mu": BFLOAT16, "nu": BFLOAT16},
  "coat": {"mu": E4M3_EXPANDED, "nu": E4M3_EXPANDED},
  "fp8_lm": {"mu": E4M3_SCALED, "nu": FLOAT16_SCALED},
  "collage_light": {"mu": BFLOAT16, "nu": BFLOAT16},
  "collage_plus": {"mu": BFLOAT16, "nu": BFLOAT16_PAIR},
}

# The choices of states whose matrices are bfloat16, and their residual in `compensated`.
COLLAGE = {"collage_light": True, "collage_plus": True}

LOSS_SCALES = {  # Functions of an optimizer and a scale.
  "none": lambda optimizer, scale: optimizer,
  "fixed": lambda optimizer, scale: fixed_loss_scale(optimizer, scale, stacked=stacked),
  "dynamic": dynamic_loss_scale,
}


def make_schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
  """`peak * (step + 1) / warmup_steps` during warm-up, then as `config.schedule` says.

  Over the last `cooldown_steps` a line from 1 to 0 multiplies it, as in Zhai et al. 2022
  (https://arxiv.org/abs/2106.04560). Before these the rates of "constant" and "inverse_sqrt" do not
  depend on `steps`: one long run has the checkpoints from which shorter ones cool down.
  """
  warmup_steps, cooldown_steps = config.warmup_steps, config.cooldown_steps
  if not 0 <= warmup_steps < steps:
    raise ValueError(f"optimizer.warmup_steps={warmup_steps} must be in [0, {steps=}).")
  schedule = SCHEDULES[config.schedule](peak, warmup_steps, steps)
  if warmup_steps:
    warmup = optax.linear_schedule(peak / warmup_steps, peak, warmup_steps - 1)
    schedule = optax.join_schedules([warmup, schedule], [warmup_steps])
  if not cooldown_steps:
    return schedule
  if config.schedule == "cosine":
    raise ValueError(
      f"optimizer.cooldown_steps={cooldown_steps} must be 0 with optimizer.schedule='cosine', which"
      " falls to 0 itself."
    )
  if cooldown_steps > steps - warmup_steps:
    raise ValueError(
      f"optimizer.cooldown_steps={cooldown_steps} must be at most {steps - warmup_steps}, the steps"
      f" after the warm-up ({steps=}, optimizer.{warmup_steps=})."
    )
  cooldown = optax.linear_schedule(1.0, 0.0, cooldown_steps, steps - cooldown_steps)
  return lambda step: schedule(step) * cooldown(step)


def _cosine(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
  return optax.cosine_decay_schedule(peak, steps - warmup_steps)


def _constant(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
  return optax.constant_schedule(peak)


def _inverse_sqrt(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
  """`peak * sqrt(warmup_steps / n)` at step n, counted from 1; without warm-up `peak / sqrt(n)`."""
  return lambda step: peak * jnp.sqrt(max(warmup_steps, 1) / (warmup_steps + 1 + step))


# Functions of a peak, the steps of its warm-up and all steps; they count from the warm-up's end.
SCHEDULES = {"cosine": _cosine, "constant": _constant, "inverse_sqrt": _inverse_sqrt}

CHOICES = {
  "name": OPTIMIZERS, "schedule": SCHEDULES, "states": STATES, "loss_scale": LOSS_SCALES
}  # fmt: skip


def learning_rates(schedule: optax.Schedule) -> Callable[[int], float]:
  """The learning rate of a step, counted from 1.

  The device computes it after the step that it is in. So the host asks for many at once: if each
  step is logged, it does not wait for each.
  """
  many = 1000
  values = jax.jit(jax.vmap(schedule))

  @functools.lru_cache(1)
  def rates(first: int) -> np.ndarray:
    return np.asarray(values(first + jnp.arange(many, dtype=jnp.float32)))

  return lambda step: float(rates((step - 1) // many * many)[(step - 1) % many])


def decays(params):
  """True for tensors with two or more axes, not counting the layer axis of a stack."""
  return jax.tree.map(lambda p, axes: p.ndim - axes >= 2, params, stacked(params))


def matrix_dtype(states: str) -> jnp.dtype:
  """The dtype that a choice of STATES trains matrices in; other parameters are float32."""
  return jnp.dtype(jnp.bfloat16 if states in COLLAGE else jnp.float32)


def cast_matrices(params, dtype: jnp.dtype):
  """The parameters, with those that decay in another dtype."""
  return jax.tree.map(lambda p, yes: p.astype(dtype) if yes else p, params, decays(params))


def stacked(params):
  """The number of layer axes of each parameter: 1 in a scanned stack, else 0."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: int(any(getattr(key, "key", None) == STACK for key in path)), params
  )
