"""Eight virtual CPU devices and strict JAX for every test."""

import gc
import os

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=8"
  + " --xla_gpu_enable_triton_gemm=false"  # See sbjax.ops.registry.warn_of_inexact_int8.
  # A busy machine is slow, not stuck.
  + " --xla_cpu_collective_call_terminate_timeout_seconds=300"
)
# A collective holds a thread of XLA's CPU pool until all devices reach it. By default the pool has
# one thread a device: concurrent collectives can hold them all and wait for ever.
os.environ.setdefault("PJRT_NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
  # Compilation takes most of the time, and programs run only a few times.
  os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

# Traces make many objects and few cycles: the default collects garbage for a sixth of the time.
gc.set_threshold(100_000, 50, 100)

# XLA's older emitters compile in half of the time. Programs that tests start get this flag, too.
QUICK = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
os.environ["XLA_FLAGS"] += f" {QUICK}"

# optax mixes integer steps with floating-point rates.
_STANDARD_PROMOTION = (
  "test_stable_adamw",
  "test_optimizers_everywhere",
  "test_loss_scale",
  "test_compress_state",
  "test_dither",
  "test_collage",
  "test_optimizer",
  "test_figures",
  "test_finetune",
  "test_step",
  "test_exchange_step",
  "test_main",
  "test_distributed",
  "test_remat",
  "test_unit_training",
  "test_width_transfer",
  "test_scenes_training",
  "test_watch",
)

# Each test is of one tier or needs an extra. README's command runs the core, and .ci/run the tiers;
# tests that are also marked slow are for `.ci/run all`.
_PROGRAM = (
  "test_benchmarks",
  "test_card",
  "test_cli",
  "test_distributed",
  "test_docs",
  "test_examples",
  "test_exchange_step",
  "test_faults",
  "test_figures",
  "test_figures_photos",
  "test_figures_spikes",
  "test_inference",
  "test_loop",
  "test_main",
  "test_remat",
  "test_run_end",
  "test_scaling",
  "test_scenes_training",
  "test_slurm",
  "test_states_benchmark",
  "test_step",
  "test_stop",
  "test_watch",
  "test_watchdog",
)
_KERNELS = ("_mosaic", "_sm90", "_triton")

# Processes take a file at a time (`--dist loadfile`), these first.
_LONGEST = (
  *("test_aot", "test_transformer", "test_step", "test_rows_triton", "test_loop", "test_sharding"),
  *("test_scaled_matmul_sm90", "test_distributed", "test_partition", "test_fused", "test_main"),
  *("test_fused_sharded", "test_card", "test_tiled_loss", "test_checkpoint"),
)


def _file(item):
  return item.module.__name__.rpartition(".")[2]


def _tier(item):
  name = _file(item)
  if name.endswith(_KERNELS):
    return "kernels"
  if name.startswith("test_fuzz"):
    return "fuzz"
  if name in _PROGRAM:
    return "program"
  return None if {"aot", "gpu", "interop", "program"} & set(item.keywords) else "core"


@pytest.fixture(autouse=True)
def strict_jax(request):
  standard = request.module.__name__.rpartition(".")[2] in _STANDARD_PROMOTION
  promotion = "standard" if standard else "strict"
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion(promotion):
    yield


def pytest_configure(config):
  if hasattr(config.option, "loadscopereorder"):  # xdist would begin with the largest files.
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects.
def pytest_collection_modifyitems(config, items):
  if (selected := config.option.markexpr) and "slow" not in selected:
    more = [item for item in items if "slow" in item.keywords]
    items[:] = [item for item in items if "slow" not in item.keywords]
    config.hook.pytest_deselected(items=more)
  names = dict(zip(_LONGEST, range(len(_LONGEST)), strict=True))
  items.sort(key=lambda item: names.get(_file(item), len(names)))
  for item in items:
    if tier := _tier(item):
      item.add_marker(tier)
  if jax.default_backend() != "gpu":
    for item in items:
      if "gpu" in item.keywords:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
