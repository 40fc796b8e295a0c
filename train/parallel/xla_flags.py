"""XLA's flags for training on GPUs; they must be set before JAX starts."""

import importlib.util
import os

FLAGS = {
  # XLA's int8 matmuls in Triton are not always exact: see sbjax.ops.registry.warn_of_inexact_int8.
  # Without them a ViT-B/16 step compiled in a tenth of the time on an H200 and ran as fast.
  "xla_gpu_enable_triton_gemm": "false",
  # It gained nothing on two H200s (a ViT-L/14 step: 244 ms without, 245 with it) and took 17 GB.
  "xla_gpu_enable_latency_hiding_scheduler": "false",
  # Larger messages are faster. With XLA's 30 MB a ViT-L/14 step at mesh.fsdp=2 took 247 ms.
  "xla_gpu_all_gather_combine_threshold_bytes": str(256 << 20),
  "xla_gpu_reduce_scatter_combine_threshold_bytes": str(256 << 20),
}


def set_flags() -> None:
  """Adds those of FLAGS to the environment's XLA_FLAGS that it does not set; none for a TPU."""
  if for_tpu():
    return
  given = os.environ.get("XLA_FLAGS", "")
  new = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given]
  os.environ["XLA_FLAGS"] = " ".join([given, *new]).strip()


def for_tpu() -> bool:
  """Whether JAX has what it needs for a TPU, and no other platform was asked for."""
  platforms = os.environ.get("JAX_PLATFORMS", "")
  return importlib.util.find_spec("libtpu") is not None and platforms in ("", "tpu", "tpu,cpu")
