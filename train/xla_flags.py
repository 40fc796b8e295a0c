"""XLA's options for training on GPUs, to be set before JAX starts."""

import os

FLAGS = {
  # Its Triton products of int8 are not always exact; see sbjax.backends.warn_of_inexact_int8. A
  # ViT-B/16 step also compiled in a tenth of the time on an H200 and took no longer.
  "xla_gpu_enable_triton_gemm": "false",
  # Between two H200s 17 MB are summed at 120 GB/s, 400 MB at 281.
  "xla_gpu_all_gather_combine_threshold_bytes": str(256 << 20),
  "xla_gpu_all_reduce_combine_threshold_bytes": str(256 << 20),
  "xla_gpu_reduce_scatter_combine_threshold_bytes": str(256 << 20),
}


def set_flags() -> None:
  """Adds FLAGS to the environment's XLA_FLAGS, but for those that it sets already."""
  given = os.environ.get("XLA_FLAGS", "")
  new = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given]
  os.environ["XLA_FLAGS"] = " ".join([given, *new]).strip()
