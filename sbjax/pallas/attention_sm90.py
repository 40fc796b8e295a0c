"""Softmax attention's backward pass on Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA.

The kernel is persistent: one thread block runs on each SM and takes one head of one example after
another. Its keys and values stay in shared memory, and a ring of tiles of 64 queries passes by.
Each of the five products is computed once, by two compute warpgroups. A third one loads ahead.

Registers hold the gradients of all keys and values with heads of 64, or up to 129 tokens. Otherwise
keys come in parts of 128: a head's queries pass by once for each, and the sums of dQ stay in shared
memory.

Heads that are not 64 wide have two blocks of columns, since wgmma reads at most 128 bytes of a row.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from sbjax import device as devices
from sbjax.pallas import attention_triton
from sbjax.pallas.attention_block_sm90 import (
  COMPUTE_WARPGROUPS,
  Block,
  Config,
  Plan,
  default_config,
  fits,
)
from sbjax.pallas.attention_compute_sm90 import ComputeWarpgroup
from sbjax.pallas.attention_memory_sm90 import MemoryWarpgroup
from sbjax.pallas.attention_parts_sm90 import TILE

attention_forward = attention_triton.attention_forward


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
  """`sbjax.attention_ops.attention_backward`, but for the rounding of sums.

  Padding, and what does not fit (`attention_block_sm90.fits`), go to Triton.

  Args:
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.
  """
  batch, tokens, _, heads, head_dim = qkv[0].shape
  if not fits(tokens, head_dim) or length != tokens:
    return attention_triton.attention_backward(o, lse, do, *qkv, causal=causal, length=length)
  config = config or default_config(tokens, head_dim)
  plan = Plan(batch, tokens, heads, head_dim, qkv[0].dtype, causal, config)
  blocks = min(batch * heads, num_sms or devices.num_sms(devices.target()) or 132)
  kernel = plgpu.kernel(
    functools.partial(_kernel, plan=plan),
    out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv],
    grid=(blocks,),
    grid_names=("sm",),
    num_threads=COMPUTE_WARPGROUPS + 1,
    thread_name="warpgroup",
    kernel_name="sbjax_attention_backward",
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      unsafe_no_auto_barriers=True,  # `commit_smem` stands where one is needed.
      lowering_semantics=plgpu.LoweringSemantics.Lane,
    ),
    interpret=interpret,
  )
  results = kernel(*qkv, o[:, :, None], do[:, :, None], jnp.pad(lse.reshape(-1), (0, TILE)))
  return tuple(results)


def _kernel(*refs, plan: Plan):
  """Makes the gradients of qkv; `refs` are qkv, o, do and lse, and the gradients."""

  @functools.partial(pl.run_scoped, **plan.shared_memory(), collective_axes="warpgroup")
  def _(**shared):
    block = Block(plan, refs, **shared)
    pl.when(block.warpgroup == COMPUTE_WARPGROUPS)(MemoryWarpgroup(block).run)
    pl.when(block.warpgroup < COMPUTE_WARPGROUPS)(ComputeWarpgroup(block).run)
