"""Gathers parameters inside a `jax.shard_map`, where each device holds only its shards of them.

Each layer's kernel is gathered separately, and its gradient is scattered as soon as it is computed.
So a device holds its shards, 8 bits a parameter, and the gradients in flight. Microbatches and
rematerialised blocks reuse the gathered kernels.
"""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from sbjax.distributed.fsdp import gather, gather_weight
from sbjax.linear.weight import QuantizedWeight
from sbjax.models.transformer import BlockOptions, is_block_kernel
from train.parallel.sharding import BATCH_AXES, parameter_axes


def gather_parameters(
  params: dict,
  options: BlockOptions,
  mesh: Mesh,
  gradient_dtype: jnp.dtype = jnp.float32,
  gradient_exchange: str = "float32",
) -> dict:
  """The variables of a model's `apply` from this device's shards of its parameters.

  Differentiable: gradients are summed over all devices of the mesh, and each device gets those of
  its shards.

  Args:
    params: as `train.parallel.sharding.parameter_shardings` splits them over the mesh.
    options: those of the model.
    gradient_dtype: dtype in which gradients of the blocks' kernels are summed over devices; other
      gradients are summed in float32.
    gradient_exchange: format in which gradients of all matrices travel between devices; those of
      biases, norms and scalars travel in float32.
  """
  gathered, quantized = {}, {}
  for path, x in flatten_dict(params).items():
    axes = parameter_axes("/".join(path))
    split = "fsdp" if "fsdp" in axes and mesh.shape["fsdp"] > 1 else None
    others = tuple(a for a in BATCH_AXES if mesh.shape[a] > 1 and a != split)
    if not isinstance(x, jax.Array):  # Frozen in 8 bits, or with an adapter: each device has it.
      gathered[path] = x
      continue
    if not is_block_kernel(path):
      axis = x.ndim - len(axes) + axes.index("fsdp") if split else 0
      exchange = gradient_exchange if "fsdp" in axes else "float32"  # RULES names the matrices.
      gathered[path] = gather(x, split, axis=axis, reduce_axes=others, gradient_exchange=exchange)
      continue
    sums = {"gradient_dtype": gradient_dtype, "gradient_exchange": gradient_exchange}
    # One sum for a stack of layers: two H200s sum 400 MB at 281 GB/s and 17 MB at 120.
    x = gather(x, None, reduce_axes=others, **sums)
    recipe = options.recipe_at("/".join(path[:-1]))
    how = {"dtype": options.dtype, "backend": options.backend, **sums}
    kernels = [gather_weight(w, recipe, split, **how) for w in (x if x.ndim == 3 else [x])]
    kernel = jax.tree.map(lambda *a: jnp.stack(a), *kernels) if x.ndim == 3 else kernels[0]
    if isinstance(kernel, QuantizedWeight):
      gathered[path], quantized[path] = kernel.master, (kernel.fwd, kernel.dgrad)
    else:
      gathered[path] = kernel
  return {"params": unflatten_dict(gathered), "quantized": unflatten_dict(quantized)}
