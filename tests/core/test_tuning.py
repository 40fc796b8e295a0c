"""Tables of tile configs: the user's takes precedence, and wrong rows are clear errors."""

import dataclasses
import json
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
import triton_case

from sbjax import INT8, Spec, quantize, scaled_matmul
from sbjax.pallas import tuning
from sbjax.pallas.sm90 import scaled_matmul as sm90

KERNEL = "scaled_matmul_triton"
ROW = {"kernel": KERNEL, "device": "NVIDIA L4", "m": 8192, "n": 768, "k": 768, "config": {}}


@dataclasses.dataclass(frozen=True)
class TileConfig:
  block_m: int = 128
  side: Literal["m", "n"] | None = "m"

  def __post_init__(self):
    if self.block_m % 16:
      raise ValueError(f"block_m={self.block_m} must be a multiple of 16.")


def write(path, *rows):
  path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
  return str(path)


def test_a_table_gives_the_rows_of_one_kernel(tmp_path):
  other = ROW | {"kernel": "scaled_matmul_sm90", "config": {"not": "a field of this TileConfig"}}
  noted = ROW | {"device": "sm_89", "tops": 1.5, "note": "any"}
  path = write(tmp_path / "table.jsonl", ROW, "\n", other, noted)
  assert tuning.read_table(path, KERNEL, TileConfig) == [ROW, noted]


@pytest.mark.parametrize(
  ("row", "says"),
  [
    ('{"kernel": \n', r"not JSON from column"),
    ("[1]\n", r"an object with the fields kernel, device, m, n, k, config"),
    (
      {"chip" if k == "device" else k: v for k, v in ROW.items()},
      r'"device" is missing; a row has the fields kernel, device, m, n, k, config',
    ),
    (ROW | {"kernel": "matmul"}, r'"kernel" must be scaled_matmul_sm90 or .*triton, not \'matmul'),
    (ROW | {"device": 89}, r'"device" must be .*"NVIDIA L4" .*"sm_89", not 89'),
    (ROW | {"device": "8.9"}, r'"device" must be .*"sm_89", not \'8.9\''),
    (ROW | {"device": "sm89"}, r'"device" must be .*"sm_89", not \'sm89\''),
    (ROW | {"m": 0}, r'"m" must be a positive integer, not 0'),
    (ROW | {"n": "768"}, r'"n" must be a positive integer, not \'768\''),
    (ROW | {"k": 24}, r'"k" must be a multiple of 16, not 24'),
    (ROW | {"config": 3}, r'"config" must be an object'),
    (ROW | {"config": {"warp": 4}}, r'no field "warp"; its fields are block_m, side'),
    (ROW | {"config": {"side": "k"}}, r'"side" must be "m" or "n" or null, not "k"'),
    (ROW | {"config": {"block_m": True}}, r'"block_m" must be a positive integer, not true'),
    (ROW | {"config": {"block_m": 24}}, r"block_m=24 must be a multiple of 16"),
    (ROW, r"the same kernel, device, m, n and k as in line 1"),
  ],
)
def test_a_wrong_row_is_an_error_with_file_line_field_and_right_values(tmp_path, row, says):
  path = write(tmp_path / "mine.jsonl", ROW, row)
  with pytest.raises(ValueError, match=rf"SBJAX_TUNING=.*mine\.jsonl, line 2: .*{says}"):
    tuning.read_table(path, KERNEL, TileConfig)


def test_a_missing_table_is_an_error_with_its_path(monkeypatch, tmp_path):
  monkeypatch.setenv("SBJAX_TUNING", str(tmp_path / "none.jsonl"))
  with pytest.raises(
    ValueError, match=r"SBJAX_TUNING=.*none\.jsonl: No such file.*benchmarks\.tune"
  ):
    tuning.user_table(KERNEL, TileConfig)
  monkeypatch.delenv("SBJAX_TUNING")
  assert tuning.user_table(KERNEL, TileConfig) == []


def test_a_table_is_read_once(monkeypatch, tmp_path):
  monkeypatch.setenv("SBJAX_TUNING", write(tmp_path / "table.jsonl", ROW))
  before = tuning.user_table(KERNEL, TileConfig)
  write(tmp_path / "table.jsonl", "{")
  assert tuning.user_table(KERNEL, TileConfig) == before == [ROW]


def test_the_user_s_table_comes_first_and_a_device_kind_before_its_capability():
  ours, theirs = ROW | {"config": {"block_m": 64}}, ROW | {"m": 4096, "config": {"block_m": 32}}
  by_capability = ROW | {"device": "sm_89", "config": {"block_m": 16}}

  def block_m(*tables):
    row = tuning.row_for(tables, 8192, 768, 768, ("NVIDIA L4", "sm_89"), TileConfig)
    return row and row["config"]["block_m"]

  assert block_m([theirs], [ours]) == 32  # Although ours was tuned for exactly m rows.
  assert block_m([by_capability], [ours]) == 16
  assert block_m([by_capability, ours]) == 64
  assert block_m([ROW | {"device": "sm_80"}, ROW | {"n": 1536}], [ours]) == 64
  assert block_m([ROW | {"device": "sm_80"}]) is None


def test_mosaic_prefers_the_user_s_row_to_its_own(monkeypatch, tmp_path):
  shape = 65536, 5120, 1280
  expected = dataclasses.replace(sm90.config_for(*shape, "NVIDIA H200", 132), raster_width=5)
  row = dict(zip("mnk", shape, strict=True)) | {"config": dataclasses.asdict(expected)}
  row = {"kernel": "scaled_matmul_sm90", "device": "sm_90"} | row
  monkeypatch.setenv("SBJAX_TUNING", write(tmp_path / "table.jsonl", row))
  assert sm90.config_for(*shape, "NVIDIA H200", 132) == expected
  assert sm90.config_for(65536, 1280, 5120, "NVIDIA H200", 132) != expected


@pytest.mark.parametrize(
  "config",
  [{"block_m": 96, "schedule": "cooperative_m"}, {"block_n": 512}, {"block_k": 48}, {"stages": 1}],
)
def test_a_config_that_hopper_cannot_run_is_refused(tmp_path, config):
  row = ROW | {"kernel": "scaled_matmul_sm90", "config": config}
  (field, value), *_ = config.items()
  with pytest.raises(ValueError, match=rf"line 1: .*{field}={value}"):
    tuning.read_table(write(tmp_path / "table.jsonl", row), "scaled_matmul_sm90", sm90.TileConfig)


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"split": None}, r'no field "split"; its fields are .*schedule, .*raster_width'),
    ({"schedule": "m"}, r'"schedule" must be "pingpong" or "cooperative_m" or "cooperative_n"'),
  ],
)
def test_an_old_config_is_an_error_with_the_new_names(tmp_path, config, message):
  row = ROW | {"kernel": "scaled_matmul_sm90", "config": config}
  with pytest.raises(ValueError, match=rf"line 1: .*{message}"):
    tuning.read_table(write(tmp_path / "table.jsonl", row), "scaled_matmul_sm90", sm90.TileConfig)


@pytest.mark.aot
def test_triton_uses_the_user_s_row_and_computes_the_same(monkeypatch, tmp_path):
  kernels = triton_case.interpreted("triton.scaled_matmul")
  config = {"block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 2, "group_m": 1}
  row = ROW | {"device": "sm_90", "m": 40, "n": 48, "k": 64, "config": config}
  monkeypatch.setenv("SBJAX_TUNING", write(tmp_path / "table.jsonl", row))
  used, call = [], kernels.triton_call

  def watched(*operands, **options):
    used.append((options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"], options["GROUP"]))
    return call(*operands, **options)

  monkeypatch.setattr(kernels, "triton_call", watched)
  lhs, rhs = (
    quantize(jnp.asarray(np.random.default_rng(i).normal(size=(rows, 64)), jnp.float32),
             Spec(INT8, "rowwise"))
    for i, rows in enumerate((40, 48))
  )  # fmt: skip
  y = kernels.scaled_matmul(lhs, rhs, jnp.bfloat16)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16))
  kernels.scaled_matmul(lhs, rhs, jnp.bfloat16, residual=jnp.zeros((40, 48), jnp.bfloat16))
  # The table is not used for a residual: on sm_90 its blocks leave no registers for one.
  assert used == [(16, 32, 32, 1), (64, 64, 128, 8)]


@pytest.mark.aot
@pytest.mark.parametrize(
  "config",
  [{"block_m": 96}, {"block_k": 16}, {"block_n": 512}, {"num_warps": 3}, {"num_stages": 9}],
)
def test_a_config_that_triton_cannot_run_is_refused(tmp_path, config):
  kernels = triton_case.interpreted("triton.scaled_matmul")
  ((field, value),) = config.items()
  with pytest.raises(ValueError, match=rf"line 1: {field}={value} must be"):
    path = write(tmp_path / "table.jsonl", ROW | {"config": config})
    tuning.read_table(path, KERNEL, kernels.TileConfig)
