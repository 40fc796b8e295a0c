"""Tables of tile configs: the user's comes first, and a wrong row says what would be right."""

import dataclasses
import json
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
import triton_case

from sbjax import INT8, Spec, quantize, scaled_matmul
from sbjax.pallas import scaled_matmul_sm90 as sm90
from sbjax.pallas import tuning

KERNEL = "scaled_matmul_triton"
ROW = {"kernel": KERNEL, "chip": "NVIDIA L4", "m": 8192, "n": 768, "k": 768, "config": {}}


@dataclasses.dataclass(frozen=True)
class Config:
  block_m: int = 128
  side: Literal["m", "n"] | None = "m"

  def __post_init__(self):
    if self.block_m % 16:
      raise ValueError(f"block_m={self.block_m} must be a multiple of 16.")


def write(path, *rows):
  path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
  return str(path)


def test_a_table_gives_the_rows_of_its_kernel(tmp_path):
  other = ROW | {"kernel": "scaled_matmul_sm90", "config": {"not": "a field of this Config"}}
  noted = ROW | {"chip": "sm_89", "tops": 1.5, "note": "any"}
  path = write(tmp_path / "table.jsonl", ROW, "\n", other, noted)
  assert tuning.read_table(path, KERNEL, Config) == [ROW, noted]


@pytest.mark.parametrize(
  ("row", "says"),
  [
    ('{"kernel": \n', r"not JSON from column"),
    ("[1]\n", r"an object with the fields kernel, chip, m, n, k, config"),
    ({k: v for k, v in ROW.items() if k != "chip"}, r'"chip" is missing'),
    (ROW | {"kernel": "matmul"}, r'"kernel" must be scaled_matmul_sm90 or .*triton, not \'matmul'),
    (ROW | {"chip": 89}, r'"chip" must be .*"NVIDIA L4" .*"sm_89", not 89'),
    (ROW | {"chip": "8.9"}, r'"chip" must be .*"sm_89", not \'8.9\''),
    (ROW | {"chip": "sm89"}, r'"chip" must be .*"sm_89", not \'sm89\''),
    (ROW | {"m": 0}, r'"m" must be a positive integer, not 0'),
    (ROW | {"n": "768"}, r'"n" must be a positive integer, not \'768\''),
    (ROW | {"k": 24}, r'"k" must be a multiple of 16, not 24'),
    (ROW | {"config": 3}, r'"config" must be an object'),
    (ROW | {"config": {"warp": 4}}, r'no field "warp"; its fields are block_m, side'),
    (ROW | {"config": {"side": "k"}}, r'"side" must be "m" or "n" or null, not "k"'),
    (ROW | {"config": {"block_m": True}}, r'"block_m" must be a positive integer, not true'),
    (ROW | {"config": {"block_m": 24}}, r"block_m=24 must be a multiple of 16"),
    (ROW, r"the same kernel, chip, m, n and k as in line 1"),
  ],
)
def test_a_wrong_row_names_file_line_field_and_what_is_right(tmp_path, row, says):
  path = write(tmp_path / "mine.jsonl", ROW, row)
  with pytest.raises(ValueError, match=rf"SBJAX_TUNING=.*mine\.jsonl, line 2: .*{says}"):
    tuning.read_table(path, KERNEL, Config)


def test_a_missing_table_is_an_error_that_names_it(monkeypatch, tmp_path):
  monkeypatch.setenv("SBJAX_TUNING", str(tmp_path / "none.jsonl"))
  with pytest.raises(
    ValueError, match=r"SBJAX_TUNING=.*none\.jsonl: No such file.*benchmarks\.tune"
  ):
    tuning.user_table(KERNEL, Config)
  monkeypatch.delenv("SBJAX_TUNING")
  assert tuning.user_table(KERNEL, Config) == []


def test_a_table_is_read_once(monkeypatch, tmp_path):
  monkeypatch.setenv("SBJAX_TUNING", write(tmp_path / "table.jsonl", ROW))
  before = tuning.user_table(KERNEL, Config)
  write(tmp_path / "table.jsonl", "{")
  assert tuning.user_table(KERNEL, Config) == before == [ROW]


def test_the_user_s_row_comes_first_and_a_device_before_its_capability():
  ours, theirs = ROW | {"config": {"block_m": 64}}, ROW | {"m": 4096, "config": {"block_m": 32}}
  any_such = ROW | {"chip": "sm_89", "config": {"block_m": 16}}

  def block_m(*tables):
    row = tuning.row_for(tables, 8192, 768, 768, ("NVIDIA L4", "sm_89"), Config)
    return row and row["config"]["block_m"]

  assert block_m([theirs], [ours]) == 32  # Though ours was tuned for just as many rows.
  assert block_m([any_such], [ours]) == 16
  assert block_m([any_such, ours]) == 64
  assert block_m([ROW | {"chip": "sm_80"}, ROW | {"n": 1536}], [ours]) == 64
  assert block_m([ROW | {"chip": "sm_80"}]) is None


def test_mosaic_takes_the_user_s_row_before_its_own(monkeypatch, tmp_path):
  shape = 65536, 5120, 1280
  expected = dataclasses.replace(sm90.config_for(*shape, "NVIDIA H200", 132), width=5)
  row = dict(zip("mnk", shape, strict=True)) | {"config": dataclasses.asdict(expected)}
  row = {"kernel": "scaled_matmul_sm90", "chip": "sm_90"} | row
  monkeypatch.setenv("SBJAX_TUNING", write(tmp_path / "table.jsonl", row))
  assert sm90.config_for(*shape, "NVIDIA H200", 132) == expected
  assert sm90.config_for(65536, 1280, 5120, "NVIDIA H200", 132) != expected


@pytest.mark.parametrize(
  "config", [{"block_m": 96, "split": "m"}, {"block_n": 512}, {"block_k": 48}, {"stages": 1}]
)
def test_a_config_that_hopper_cannot_run_is_refused(tmp_path, config):
  row = ROW | {"kernel": "scaled_matmul_sm90", "config": config}
  (field, value), *_ = config.items()
  with pytest.raises(ValueError, match=rf"line 1: .*{field}={value}"):
    tuning.read_table(write(tmp_path / "table.jsonl", row), "scaled_matmul_sm90", sm90.Config)


@pytest.mark.aot
def test_triton_takes_the_user_s_row_and_computes_the_same(monkeypatch, tmp_path):
  kernels = triton_case.interpreted(KERNEL)
  config = {"block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 2, "group_m": 1}
  row = ROW | {"chip": "sm_90", "m": 40, "n": 48, "k": 64, "config": config}
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
  # Tables are tuned without a residual, for which sm_90 has no registers left in large blocks.
  assert used == [(16, 32, 32, 1), (64, 64, 128, 8)]


@pytest.mark.aot
@pytest.mark.parametrize(
  "config",
  [{"block_m": 96}, {"block_k": 16}, {"block_n": 512}, {"num_warps": 3}, {"num_stages": 9}],
)
def test_a_config_that_triton_cannot_run_is_refused(tmp_path, config):
  kernels = triton_case.interpreted(KERNEL)
  ((field, value),) = config.items()
  with pytest.raises(ValueError, match=rf"line 1: {field}={value} must be"):
    path = write(tmp_path / "table.jsonl", ROW | {"config": config})
    tuning.read_table(path, KERNEL, kernels.Config)
