"""Out-of-memory errors: recognized, parsed, and answered with options that need less memory."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from train.config import Config, LoraConfig, MeshConfig, ModelConfig
from train.errors import RunError
from train.memory import asked_bytes, explain, explain_out_of_memory, is_out_of_memory
from train.parallel.sharding import make_mesh, replicated
from train.step import AdapterState, TrainState

GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."
TEXTS = {
  GPU: 68719476736,
  "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB.": 64 * 2**30,
  "RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes.": 34359738368,
  "RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0":
    2 * 2**30,
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.":
    None,
  "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory"
  " required for HLO temporaries (512.00G) exceeds available HBM (15.75G).": None,
}  # fmt: skip
OTHERS = [
  "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 196608, available: 166912",
  "RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)",
  "INVALID_ARGUMENT: shapes do not match",
]


def device(kind="NVIDIA H200", platform="gpu", **stats):
  return SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats or None)


def run(devices=8, fsdp=1, batch_size=64, width=1000, **fields):
  """The parts of a Run that memory depends on: `width`**2 parameters and two moments of each."""
  mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:devices])
  sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
  params = {"kernel": jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=sharding)}
  state = TrainState(None, params, {"mu": params, "nu": params})
  model = {"remat": fields.pop("remat", "none"), "recipe": fields.pop("recipe", "switchback")}
  config = Config(model=ModelConfig(size="tiny", **model), batch_size=batch_size, **fields)
  return SimpleNamespace(config=config, mesh=mesh, abstract_state=state)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[20:50])
def test_out_of_memory_errors_are_recognized_and_their_bytes_parsed(text):
  assert is_out_of_memory(jax.errors.JaxRuntimeError(text))
  assert asked_bytes(text) == TEXTS[text]


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_are_raised_unchanged(text):
  error = jax.errors.JaxRuntimeError(text)
  with (
    pytest.raises(jax.errors.JaxRuntimeError) as raised,
    explain_out_of_memory(run(), lambda: "step 1"),
  ):
    raise error
  assert raised.value is error
  assert not is_out_of_memory(RuntimeError(GPU))


def test_an_allocator_error_becomes_one_message():
  with pytest.raises(RunError) as raised, explain_out_of_memory(run(), lambda: "step 1"):
    jnp.zeros(1 << 45).block_until_ready()
  assert str(raised.value).startswith("Out of memory on a device (cpu), at step 1: 140,737.5 GB")
  assert is_out_of_memory(raised.value.__cause__)


def test_a_run_of_adapters_counts_its_frozen_base_and_is_not_offered_fsdp():
  made = run(fsdp=1, lora=LoraConfig(rank=8))
  frozen = {"values": jax.ShapeDtypeStruct((3000, 1000), jnp.int8)}
  frozen = jax.tree.map(lambda x: x.update(sharding=replicated(made.mesh)), frozen)
  made.abstract_state = AdapterState(*made.abstract_state, frozen)
  text = explain(GPU, made, "step 7", device())
  assert "7.0 MB of parameters and 8.0 MB of optimizer state" in text
  assert "4.0 MB of grad" in text and "fsdp" not in text


def test_the_message_gives_sizes_for_each_device():
  stats = {"bytes_limit": 100 * 10**9, "bytes_in_use": 30 * 10**9}
  text = explain(GPU, run(fsdp=4, batch_size=64, accumulate=2), "step 7", device(**stats))
  assert "(NVIDIA H200), at step 7: 68.7 GB were asked for at once" in text
  assert "JAX may use 100.0 GB there, and 30.0 GB were in use" in text
  # A quarter of 4 MB of parameters and of 8 MB of moments.
  assert "1.0 MB of parameters and 2.0 MB of optimizer state" in text and "1.0 MB of grad" in text
  assert "batch_size=64 is 8 images a device, 4 at a time" in text


def choices(run, during="step 1", **stats) -> list[str]:
  lines = explain(GPU, run, during, device(platform="tpu", **stats)).splitlines()
  return [re.split(r"[:,] ", line.strip(), maxsplit=1)[0] for line in lines if line[0] == " "]


def test_only_unused_options_are_offered():
  assert choices(run()) == [
    "--config.model.remat=block", "--config.accumulate=2", "--config.model.recipe=switchback_m",
    "--config.batch_size", "--config.mesh.fsdp=8",
  ]  # fmt: skip
  done = run(fsdp=8, batch_size=16, accumulate=2, remat="block", recipe="switchback_m")
  assert choices(done) == ["--config.batch_size", "more devices than 8"]
  assert choices(run(devices=1))[-1] == "more devices"
  assert "--config.model.recipe=switchback_cm" in choices(run(recipe="switchback_c"))
  # "auto" is left only before the step is compiled.
  assert choices(run(remat="auto"))[0] == "--config.accumulate=2"


def test_an_offered_accumulate_divides_the_batch():
  assert "--config.accumulate=3" in choices(run(batch_size=8 * 9))
  assert "--config.accumulate=9" in choices(run(batch_size=8 * 9, accumulate=3))


def test_fsdp_is_offered_first_for_a_large_state():
  assert choices(run(width=1000), bytes_limit=20 * 10**6)[0] == "--config.mesh.fsdp=8"
  assert choices(run(width=1000), bytes_limit=20 * 10**9)[0] == "--config.model.remat=block"


def test_a_smaller_eval_batch_size_is_offered_during_evaluation():
  offered = choices(run(), during="the evaluation after step 4")
  assert offered[0] == "--config.eval_batch_size"
  assert "--config.batch_size" not in offered


def test_mem_fraction_is_offered_unless_it_is_set(monkeypatch):
  name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
  monkeypatch.delenv(name, raising=False)
  assert f"{name}=0.95" in explain(GPU, run(), "step 1", device())
  monkeypatch.setenv(name, "0.9")
  assert name not in explain(GPU, run(), "step 1", device())
