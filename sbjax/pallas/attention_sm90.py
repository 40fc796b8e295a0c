"""Softmax attention's backward pass on Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA.

The kernel is persistent: one thread block runs on each SM and takes one head of one example after
another. Its keys and values stay in shared memory, and a ring of tiles of 64 queries passes by.
Each of the five products is computed once, by two compute warpgroups. A third one loads ahead.

Registers hold the gradients of all keys and values with heads of 64, or up to 129 tokens. Otherwise
keys come in parts of 128: a head's queries pass by once for each. The sums of dQ stay in shared
memory, or, where they do not fit, dS leaves and a second kernel makes dQ (`attention_dq_sm90`).

Heads that are not 64 wide have two blocks of columns, since wgmma reads at most 128 bytes of a row.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from sbjax.pallas import attention_forward_sm90 as forward
from sbjax.pallas import attention_triton
from sbjax.pallas.attention_block_sm90 import (
  Block,
  Config,
  Plan,
  default_config,
  fits,
)
from sbjax.pallas.attention_compute_sm90 import ComputeWarpgroup
from sbjax.pallas.attention_dq_sm90 import with_query_gradient
from sbjax.pallas.attention_memory_sm90 import MemoryWarpgroup
from sbjax.pallas.attention_parts_sm90 import COMPUTE_WARPGROUPS, TILE, persistent_kernel


def attention_forward(
  *qkv: jax.Array, causal: bool, length: int, **options
) -> tuple[jax.Array, jax.Array]:
  """`sbjax.ops.attention.attention_forward`, but for the rounding of sums.

  Padding, and what does not fit (`attention_forward_sm90.fits`), go to Triton. `options` are of
  `attention_forward_sm90.attention_forward`.
  """
  _, tokens, _, _, head_dim = qkv[0].shape
  if not forward.fits(tokens, head_dim) or length != tokens:
    return attention_triton.attention_forward(*qkv, causal=causal, length=length)
  return forward.attention_forward(*qkv, causal=causal, **options)


def attention_backward(
  o: jax.Array,
  lse: jax.Array,
  do: jax.Array,
  *qkv: jax.Array,
  causal: bool,
  length: int,
  config: Config | None = None,
  num_sms: int | None = None,
  interpret=False,
) -> tuple[jax.Array, ...]:
  """`sbjax.ops.attention.attention_backward`, but for the rounding of sums.

  Padding, and what does not fit (`attention_block_sm90.fits`), go to Triton.

  Args:
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.
  """
  _, tokens, _, _, head_dim = qkv[0].shape
  if not fits(tokens, head_dim) or length != tokens:
    return attention_triton.attention_backward(o, lse, do, *qkv, causal=causal, length=length)
  config = config or default_config(tokens, head_dim)
  plan = Plan.of(qkv, causal, config)
  blocks = plan.thread_blocks(num_sms)
  out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv]
  if not plan.has_dq:
    # dS, transposed. Rows of whole sectors, of 32 bytes.
    shape = plan.batch * plan.heads, plan.tokens, pl.cdiv(plan.tokens, 16) * 16
    out_type.append(jax.ShapeDtypeStruct(shape, plan.dtype))
  kernel = persistent_kernel(
    functools.partial(_kernel, plan=plan),
    out_type,
    name="sbjax_attention_backward",
    blocks=blocks,
    interpret=interpret,
  )
  do, lse = do[:, :, None], jnp.pad(lse.reshape(-1), (0, TILE))
  results = kernel(*qkv, o[:, :, None], do, lse)
  if plan.has_dq:
    return tuple(results)
  *dqkv, ds = results
  dq = with_query_gradient(dqkv[0], ds, *qkv, blocks=blocks, interpret=interpret)
  return dq, *dqkv[1:]


def _kernel(*refs, plan: Plan):
  """Makes the gradients of qkv; `refs` are qkv, o, do and lse, the gradients, and delta."""
  names = plan.buffers() | plan.barriers()

  @functools.partial(pl.run_scoped, **names, collective_axes="warpgroup")
  def _(**shared):
    block = Block(plan, refs, **shared)
    pl.when(block.warpgroup == COMPUTE_WARPGROUPS)(MemoryWarpgroup(block).run)
    pl.when(block.warpgroup < COMPUTE_WARPGROUPS)(ComputeWarpgroup(block).run)
