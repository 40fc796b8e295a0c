"""Eight virtual CPU devices and strict JAX for every test."""

import gc
import os
import pathlib
import signal

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

# `nohup` and a shell's `&` ignore these, and programs that tests start and signal would, too.
for _number, _default in (
  (signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler),
):  # fmt: skip
  if signal.getsignal(_number) is signal.SIG_IGN:
    signal.signal(_number, _default)

# Traces make many objects and few cycles: the default collects garbage for a sixth of the time.
gc.set_threshold(100_000, 50, 100)

# Each function of a program in a module of its own would take a quarter more of compiling's time,
# and XLA's older emitters compile in half of it. Programs that tests start get these flags, too.
QUICK = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
  QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] += f" {QUICK}"

TESTS = pathlib.Path(__file__).parent
# A test is of the tier whose folder has its file, or needs what its own mark says.
OTHER = {"aot", "gpu", "interop", "program"}


@pytest.fixture(autouse=True)
def strict_jax(request):
  promotion = "standard" if "standard_promotion" in request.keywords else "strict"
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion(promotion):
    yield


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects.
def pytest_collection_modifyitems(config, items):
  if (selected := config.option.markexpr) and "slow" not in selected:
    more = [item for item in items if "slow" in item.keywords]
    items[:] = [item for item in items if "slow" not in item.keywords]
    config.hook.pytest_deselected(items=more)
  for item in items:
    tier = item.path.relative_to(TESTS).parts[0]
    if tier != "core" or not OTHER & {mark.name for mark in item.iter_markers()}:
      item.add_marker(tier)
  if jax.default_backend() != "gpu":
    for item in items:
      if "gpu" in item.keywords:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
