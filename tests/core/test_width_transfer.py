"""benchmarks/width_transfer.py, tiny: data, training under vmap, verdicts, table and plot."""

import io
import json
import math
import tarfile
import types

import jax
import numpy as np
import pytest

from benchmarks import width_report, width_transfer
from benchmarks.byte_lm import ByteLM, config_of, loss_of, read_captions, split, windows_at
from benchmarks.tables import read_file
from sbjax.models.transformer import BlockOptions

pytestmark = pytest.mark.standard_promotion  # As optax needs.

CAPTIONS = [f"a {kind} runs over the {place} ." for kind in ("dog", "cat", "boy") for place in
            ("grass", "sand", "road", "field", "beach")] * 12  # fmt: skip


def write_shard(path, samples):
  with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as shard:
    for i, sample in enumerate(samples):
      for name, contents in (("json", json.dumps(sample)), ("txt", "not read")):
        member = tarfile.TarInfo(f"{i:09}.{name}")
        member.size = len(contents)
        shard.addfile(member, io.BytesIO(contents.encode()))
  return path


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_captions_come_from_the_lists_of_a_shard(name, tmp_path):
  shard = write_shard(tmp_path / name, [{"captions": ["a dog .", "dogs"]}, {"captions": [" é "]}])
  (tmp_path / "b.txt").write_text("more\n")
  data = read_captions([shard, tmp_path / "b.txt"])
  assert data.dtype == np.uint8
  assert data.tobytes().decode() == "a dog .\ndogs\né\nmore"


def test_missing_or_empty_captions_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"no file .*none.tar"):
    read_captions([tmp_path / "none.tar"])
  with pytest.raises(ValueError, match="has no captions"):
    read_captions([write_shard(tmp_path / "a.tar", [{"key": "1"}])])
  with pytest.raises(ValueError, match="have 100 bytes: windows of 16 need 360"):
    split(np.zeros(100, np.uint8), 2, 2, 16, 4)


def test_training_never_reads_a_byte_of_the_test():
  data, length = np.arange(2000) % 251, 16
  starts, tests = split(data.astype(np.uint8), 500, 4, length, 8)
  assert starts.min() >= 0 and starts.max() + length + 1 <= 1901
  np.testing.assert_array_equal(tests[0], data[1900 : 1900 + length + 1])
  np.testing.assert_array_equal(tests[-1], data[-length - 1 :])
  got = windows_at(data, starts[0], length)
  np.testing.assert_array_equal(got, [data[i : i + length + 1] for i in starts[0]])


@pytest.mark.program
@pytest.mark.parametrize("parametrization", ["standard", "unit"])
def test_the_language_model_is_causal_and_starts_at_the_entropy_of_a_byte(parametrization):
  options = BlockOptions(parametrization=parametrization, dtype="float32", attention_backend="xla")
  model = ByteLM(config_of(64, 2, 16), options)
  windows = jax.random.randint(jax.random.key(0), (4, 17), 32, 127).astype("uint8")
  ids = windows[:, :-1].astype("int32")
  params = jax.jit(model.init)(jax.random.key(1), ids)["params"]
  # Standard logits have unit variance, which costs a half.
  assert abs(jax.jit(loss_of, static_argnums=0)(model, params, windows) - math.log(256)) < 0.8
  apply = jax.jit(model.apply)
  logits, other = (apply({"params": params}, x) for x in (ids, ids.at[:, 9:].add(1)))
  np.testing.assert_allclose(other[:, :9], logits[:, :9], rtol=1e-4, atol=1e-5)
  assert not np.allclose(other[:, 9:], logits[:, 9:], atol=1e-3)


@pytest.fixture
def quick_keys():
  """Threefry for every tensor takes long to compile."""
  with jax.default_prng_impl("unsafe_rbg"):
    yield


@pytest.mark.program
@pytest.mark.usefixtures("quick_keys")
@pytest.mark.slow
def test_the_program_writes_a_row_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
  (tmp_path / "captions.txt").write_text("\n".join(CAPTIONS))
  out = tmp_path / "rows.jsonl"
  flags = {"widths": "32 64", "contenders": "unit,_fp8_static", "float16_width": 64, "rates": 2}
  flags |= {"steps": 30, "batch": 4, "length": 16, "layers": 1, "tests": 8, "out": out}
  arguments = ["width_transfer", "--captions", str(tmp_path / "captions.txt")]
  for name, values in flags.items():
    arguments += [f"--{name}", *(v.replace("_f", " f") for v in str(values).split())]
  main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="benchmarks.width_transfer"))
  monkeypatch.setitem(width_transfer.provenance.__globals__["sys"].modules, "__main__", main)
  monkeypatch.setattr("sys.argv", arguments)
  width_transfer.main()
  rows = read_file(out)
  assert [(row["contender"], row["width"]) for row in rows] == [
    ("unit, fp8_static", 32), ("unit, fp8_static", 64), ("standard, float32", 64),
    ("standard, float16", 64), ("unit, float16", 64),
  ]  # fmt: skip
  assert all(row["best_loss"] < 4 for row in rows if row["contender"] != "standard, float16")
  assert rows[0]["rates"] == [0.5, 1.0] and len(rows[0]["losses"]) == 2
  monkeypatch.setattr("sys.argv", ["width_report", "--rows", str(out), "--chip", rows[0]["chip"]])
  width_report.main()
  assert "| unit, `fp8_static` | " in capsys.readouterr().out
  assert out.with_suffix(".png").stat().st_size > 1000


def args_for(**changes):
  return width_transfer.parse(["--captions", "x", *changes.pop("more", ())])


@pytest.mark.program
@pytest.mark.usefixtures("quick_keys")
@pytest.mark.slow
def test_rates_under_vmap_train_like_rates_one_by_one(tmp_path):
  (tmp_path / "captions.txt").write_text("\n".join(CAPTIONS))
  data = read_captions([tmp_path / "captions.txt"])
  flags = "widths=32 steps=12 batch=2 length=16 layers=1 tests=4 rates=3"
  sizes = [f"--{flag}" for flag in flags.split()]
  contender = width_transfer.ALL["unit, float32"]
  together, apart = (
    width_transfer.measure(contender, 32, data, args_for(more=[*sizes, "--together", n]))["losses"]
    for n in ("3", "1")
  )
  np.testing.assert_allclose(together, apart, rtol=1e-3)
  assert len(set(apart)) == 3


def row(contender, width, rate, loss, at_edge=False):
  return {"contender": contender, "width": width, "best_rate": rate, "best_loss": loss,
          "at_edge": at_edge}  # fmt: skip


def test_the_verdict_says_which_claims_hold():
  rows = [
    row("standard", 128, 2**-7, 1.5), row("standard", 1024, 2**-9, 1.4),
    row("unit", 128, 2**-4, 1.5), row("unit", 1024, 2**-5, 1.4),
    row("unit, float32", 128, 2**-4, 1.5), row("unit, float32", 256, 2**-4, 1.4),
    row("unit, fp8_static", 128, 2**-4, 1.506), row("unit, fp8_static", 256, 2**-4, 1.4),
    row("standard, float32", 256, 2**-7, 1.4), row("standard, float16", 256, None, None),
    row("unit, float16", 256, 2**-4, 1.42),
  ]  # fmt: skip
  assert width_transfer.verdict(rows) == {
    "standard: rate_spread": 4.0, "standard: rate_spread as claimed": True,
    "unit: rate_spread": 2.0, "unit: rate_spread as claimed": True,
    "fp8_excess": 0.004, "fp8_excess as claimed": True,
    "unit: float16_excess": 0.01429, "unit: float16_excess as claimed": False,
    "standard: float16_excess": math.inf, "standard: float16_excess as claimed": True,
  }  # fmt: skip
  at_edge = [*rows[:2], row("unit", 128, 2**-4, 1.5, at_edge=True), rows[3]]
  assert not width_transfer.verdict(at_edge)["unit: rate_spread as claimed"]
  assert width_transfer.verdict(rows[:1]) == {}


def test_the_best_rate_ignores_those_that_diverged():
  assert width_transfer.best([1, 2, 4], [3.0, 2.0, None]) == {
    "best_rate": 2, "best_loss": 2.0, "at_edge": False}  # fmt: skip
  assert width_transfer.best([1, 2], [None, None])["best_rate"] is None
  assert width_transfer.best([1, 2, 4], [3.0, 2.5, 2.0])["at_edge"]
