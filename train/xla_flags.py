"""XLA's options for training on GPUs, to be set before JAX starts."""

import os

FLAGS = {
  # Its Triton products of int8 are not always exact; see sbjax.backends.warn_of_inexact_int8. A
  # ViT-B/16 step also compiled in a tenth of the time on an H200 and took no longer.
  "xla_gpu_enable_triton_gemm": "false",
  # On two H200s it gained nothing (a ViT-L/14 step: 244 ms without, 245 with it), and took 17 GB.
  "xla_gpu_enable_latency_hiding_scheduler": "false",
  # Larger messages move faster. A ViT-L/14 step with mesh.fsdp=2 took 247 ms with XLA's 30 MB.
  "xla_gpu_all_gather_combine_threshold_bytes": str(256 << 20),
  "xla_gpu_reduce_scatter_combine_threshold_bytes": str(256 << 20),
}


def set_flags() -> None:
  """Adds FLAGS to the environment's XLA_FLAGS, but for those that it sets already."""
  given = os.environ.get("XLA_FLAGS", "")
  new = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given]
  os.environ["XLA_FLAGS"] = " ".join([given, *new]).strip()
