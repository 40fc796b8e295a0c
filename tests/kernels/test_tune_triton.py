"""Tuning a matmul: the fastest correct candidate wins; others are listed with a reason."""

import json

import jax.numpy as jnp
import pytest
import triton_case

from benchmarks import tune, tune_mosaic
from sbjax import INT8, Spec, quantize
from sbjax.pallas import tuning

pytestmark = pytest.mark.aot


@pytest.fixture
def triton_tuner(monkeypatch):
  pytest.importorskip("triton", reason="the extra `aot` is not installed")
  from benchmarks import tune_triton

  monkeypatch.setattr(tune_triton, "compute_capability", lambda: 89)
  return tune_triton


@pytest.fixture(params=["triton", "mosaic"])
def tuner(request):
  if request.param == "triton":
    return request.getfixturevalue("triton_tuner")
  return tune_mosaic


@pytest.fixture
def sets():
  lhs, rhs = (quantize(jnp.ones((rows, 32)), Spec(INT8, "rowwise")) for rows in (48, 16))
  return [(lhs, rhs)]


def pretend(monkeypatch, tuner, behave):
  """Replaces the kernel: behave(config) raises, or says whether the result is wrong."""

  def scaled_matmul(lhs, rhs, out_dtype, config):
    wrong = behave(config)
    y = tune.matmul.scaled_matmul(lhs, rhs, out_dtype)
    return y + 1 if wrong else y

  monkeypatch.setattr(tuner.kernel, "scaled_matmul", scaled_matmul)
  # XLA's options are for a GPU.
  build = tune.contender
  monkeypatch.setattr(tune, "contender", lambda function, sets, **_: build(function, sets))


def test_the_fastest_correct_candidate_becomes_the_row(monkeypatch, tuner, sets):
  rule = tuner.rule(48, 16, 32)
  wrong, broken, *usable = (c for c in dict.fromkeys(tuner.FOR_FEW_ROWS) if c != rule)

  def behave(config):
    if config == broken:
      raise RuntimeError("out of resource: shared memory\nand a long story")
    return config == wrong

  pretend(monkeypatch, tuner, behave)
  # Each takes twice as long as the next one; the rule comes first, and XLA last.
  monkeypatch.setattr(
    tune, "kernel_race", lambda contenders: [1e-9 * 2.0**-i for i in range(len(contenders))]
  )
  row = tune.tune(tuner, sets, 48, 16, 32)
  rates = row["candidates"]
  listed = {json.dumps(config): rate for config, rate in rates}
  assert (
    listed[json.dumps(tune.non_defaults(broken))] == "RuntimeError: out of resource: shared memory"
  )
  assert listed[json.dumps(tune.non_defaults(wrong))].endswith("results are not the definition's")
  assert len(listed) == len(usable) + 3
  assert [row["config"], row["tops"]] == rates[-1] and row["config"] != tune.non_defaults(wrong)
  assert row["rule_tops"] == rates[0][1] > 0
  assert row["xla_tops"] == pytest.approx(2 * row["tops"], rel=0.1)
  assert (row["m"], row["n"], row["k"]) == (48, 16, 32)


def test_a_shape_without_a_usable_candidate_says_why(monkeypatch, tuner, sets):
  pretend(monkeypatch, tuner, lambda config: True)
  with pytest.raises(RuntimeError, match=r"No candidate runs at 48 x 16 x 32.*the definition's"):
    tune.tune(tuner, sets, 48, 16, 32)


def test_the_library_reads_the_tables_that_tuning_writes(monkeypatch, triton_tuner, tmp_path):
  path = tmp_path / "mine.jsonl"
  configs = list(dict.fromkeys([*triton_tuner.CANDIDATES, *triton_tuner.FOR_FEW_ROWS]))
  for i, config in enumerate(configs):
    row = {"device": "NVIDIA L4", "m": 64, "n": 16, "k": 16 + 16 * i, "tops": 1.0}
    row["config"] = tune.non_defaults(config)
    tune.write(path, {"kernel": "scaled_matmul_triton"} | row)
  monkeypatch.setenv("SBJAX_TUNING", str(path))
  rows = tuning.user_table("scaled_matmul_triton", triton_tuner.kernel.TileConfig)
  assert [triton_tuner.kernel.TileConfig(**row["config"]) for row in rows] == configs


def test_tables_of_two_kernels_share_a_file(tmp_path):
  path = tmp_path / "mine.jsonl"
  row = {"device": "NVIDIA L4", "m": 64, "n": 16, "k": 16, "config": {}}
  triton, mosaic = ({"kernel": name} | row for name in tuning.KERNELS[::-1])
  for one in (mosaic, triton, mosaic):  # The last one replaces the first.
    tune.write(path, one)
  assert [json.loads(line) for line in path.read_text().splitlines()] == [triton, mosaic]


def test_a_kernel_that_does_not_run_here_is_not_tuned():
  with pytest.raises(SystemExit, match="backend='triton' needs an NVIDIA GPU"):
    tune.choose("triton")
  with pytest.raises(SystemExit, match="no kernel to tune: backend=None is 'xla'"):
    tune.choose(None)


def test_triton_s_tuner_is_chosen_where_triton_runs(triton_tuner):
  triton_case.loaded("triton.scaled_matmul")
  with triton_case.chip(89):
    assert tune.choose(None) == ("scaled_matmul_triton", triton_tuner)
