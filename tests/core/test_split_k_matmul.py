"""The weight gradient as a sum of several products: their number and their sum."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.ops import split_k as module
from sbjax.ops.split_k import num_splits, split_k_matmul

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results/wgrad_time.jsonl"
MEASURED = [json.loads(line) for line in RESULTS.read_text().splitlines()]


class Chip:
  platform, device_kind = "gpu", "NVIDIA H200"

  def __init__(self, compute_capability="9.0", core_count=132):
    self.compute_capability, self.core_count = compute_capability, core_count


@pytest.fixture
def h200(monkeypatch):
  monkeypatch.setattr(module, "target", Chip)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_split_products_add_up_to_the_whole(parts, dtype):
  rng = np.random.default_rng(0)
  # Integers whose sums are exact in float32 and bfloat16.
  x, dy = (rng.integers(-2, 3, (24, width)).astype(np.float32) for width in (16, 8))
  got = split_k_matmul(jnp.bfloat16(x), jnp.bfloat16(dy), dtype, parts=parts)
  assert got.dtype == dtype
  np.testing.assert_array_equal(got.astype(jnp.float32), x.T @ dy)


@pytest.mark.parametrize("row", MEASURED, ids=lambda r: f"{r['layer']} {r['k']}x{r['n']}")
def test_num_splits_is_near_the_fastest_measured(row, h200):
  times = row["milliseconds"]
  fastest = min(time for name, time in times.items() if name.startswith("bf16"))
  chosen = times[f"bf16 in {num_splits(row['tokens'], row['k'], row['n'])}"]
  assert chosen <= 1.05 * fastest
  assert chosen <= times["bf16 in 1"]


def test_vit_h_and_bigg_are_split(h200):
  assert num_splits(66048, 1280, 5120) == num_splits(66048, 5120, 1280) == 2
  assert num_splits(33024, 1664, 8192) > 1


def test_few_tokens_are_not_split(h200):
  assert [num_splits(tokens, 1280, 5120) for tokens in (0, 1024, 16382, 16384)] == [1, 1, 1, 2]


def test_indivisible_tokens_are_not_split(h200, monkeypatch):
  assert num_splits(66049, 1280, 5120) == 1
  monkeypatch.setattr(jax, "device_count", lambda: 5)
  assert num_splits(66048, 1280, 5120) == 1


@pytest.mark.parametrize(("dtype", "parts"), [(jnp.bfloat16, 2), (jnp.float32, 1)])
def test_only_16_bit_operands_are_split(dtype, parts, h200):
  x, dy = (jax.ShapeDtypeStruct((66048, width), dtype) for width in (1280, 5120))
  jaxpr = jax.make_jaxpr(lambda x, dy: split_k_matmul(x, dy, jnp.float32))(x, dy)
  products = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if "dot" in eqn.primitive.name]
  assert products == [(1280, 5120) if parts == 1 else (parts, 1280, 5120)]


@pytest.mark.parametrize("chip", [Chip("8.0", 108), Chip("9.0", None)])
def test_devices_without_measurements_do_not_split(chip, monkeypatch):
  monkeypatch.setattr(module, "target", lambda: chip)
  assert num_splits(66048, 1280, 5120) == 1


def test_a_cpu_does_not_split():
  assert num_splits(66048, 1280, 5120) == 1


def test_tokens_sharded_over_devices_are_not_moved():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  x, dy = (jax.ShapeDtypeStruct((48, width), jnp.float32, sharding=rows) for width in (16, 8))
  text = (
    jax.jit(lambda x, dy: split_k_matmul(x, dy, jnp.float32, parts=3))
    .lower(x, dy)
    .compile()
    .as_text()
  )
  assert "all-reduce" in text
  assert not any(moving in text for moving in ("all-gather", "all-to-all", "collective-permute"))


def test_within_shard_map_num_splits_ignores_the_device_count(h200, monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 5)
  splits = []

  def local(x):
    splits.append(num_splits(66048, 1280, 5120))
    return x

  everywhere, mesh = jax.sharding.PartitionSpec(), jax.make_mesh((8,), ("data",))
  jax.shard_map(local, mesh=mesh, in_specs=everywhere, out_specs=everywhere)(jnp.zeros(8))
  assert splits == [2]
