"""A GPU's card: failures give reasons and stop nothing else; time and memory have limits."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest
import triton_case

from benchmarks import card, step, tables
from benchmarks import card_sections as sections
from benchmarks.tables import CHIP, read
from sbjax.models.sizes import CLIPConfig, TextConfig, VisionConfig
from sbjax.models.transformer import Block
from sbjax.ops.registry import get_backend


def rows_of(cases, seconds=60.0):
  rows = []
  sections.run(cases, rows.append, seconds)
  return rows


@pytest.mark.parametrize("name", ["matmul", "quantize", "attention"])
def test_a_section_measures_its_cases_on_a_cpu(name):
  with jax.numpy_dtype_promotion("standard"):  # JAX's attention gradient promotes.
    rows = rows_of(sections.SECTIONS[name](get_backend("xla"), tiny=True))
  contenders = {
    "matmul": {"xla_bf16", "xla_int8", "ours_int8"},
    "quantize": {"copy", "xla", "ours"},
    "attention": {"xla", "ours"},
  }[name]
  for row in rows:
    assert row["failed"] == {} and set(row["milliseconds"]) == contenders
    assert set(card.CASE[name]) <= set(row)
    assert all(time > 0 for time in row["milliseconds"].values())
    assert row.get("equal_to_xla_int8", True)
    json.dumps(row)
  assert len({row["case"] for row in rows}) == len(rows) > 0


def test_card_cases_are_in_the_result_files(monkeypatch):
  monkeypatch.setattr(sections, "Operands", lambda *_, **__: None)
  for name in ("matmul", "quantize"):
    known = card.reference(name)
    sizes = [
      case.args[2:5] if name == "matmul" else (case.args[1], case.args[3], case.args[4])
      for _, case in sections.SECTIONS[name](get_backend("xla"), tiny=False)
    ]
    measured = {key if name == "matmul" else (key[0], key[3], key[4]) for key in known}
    assert len(sizes) > 4 and set(sizes) <= measured


def test_a_failed_contender_gives_its_error_and_the_others_are_timed():
  def broken(x):
    raise RuntimeError("out of resource: shared memory\nmore")

  built, failed = sections.timed({"bad": (broken, [(1.0,)]), "good": (jnp.sin, [(1.0,)])})
  assert failed == {"bad": "RuntimeError: out of resource: shared memory"}
  assert set(sections.milliseconds(built)) == {"good"}


def test_a_failed_or_late_case_records_its_reason_and_later_cases_run():
  def fails():
    raise ValueError("no such thing")

  cases = [("bad", fails), ("good", lambda: {"x": 1})]
  assert rows_of(iter(cases)) == [
    {"case": "bad", "failed": {"case": "ValueError: no such thing"}},
    {"case": "good", "x": 1},
  ]
  slow = ("slow", lambda: time.sleep(0.2) or {})
  rows = rows_of(iter([slow, slow, *cases]), seconds=0.3)
  assert [row.get("failed") for row in rows] == [
    None,
    *[{"case": "left out: no time was left"}] * 3,
  ]


@pytest.mark.slow
def test_a_step_is_measured_on_a_cpu(monkeypatch):
  small = dict(width=16, layers=1, heads=1)
  vision = VisionConfig(image_size=8, patch_size=4, **small)
  text = TextConfig(context_length=6, vocab_size=16, eot_id=1, **small)
  monkeypatch.setitem(sections.SIZES, "tiny", CLIPConfig(16, vision, text))
  monkeypatch.setattr(sections, "STEPPERS", ("full",))
  monkeypatch.setattr(step, "race", lambda steps, *_: ({name: [0.5] for name in steps}, None, None))
  with jax.numpy_dtype_promotion("standard"):  # optax promotes.
    ((name, measure),) = sections.steps(get_backend("xla"), tiny=True)
    row = measure()
  assert name == "ViT-tiny" and row["failed"] == {} and row["batch_size"] == 8
  assert row["contenders"]["full"]["images_per_second"] == 16
  assert {"compile_seconds", "peak_gigabytes", "milliseconds"} <= set(row["contenders"]["full"])
  assert row["contenders"]["full"]["attention_backend"] == "xla"


def test_a_step_contender_that_does_not_compile_does_not_stop_the_others(monkeypatch):
  def compiled(task, *_):
    if task.model.block is Block:
      raise NotImplementedError("no kernel")
    return "step", {"compile_seconds": 1.0, "peak_gigabytes": 1.0}

  monkeypatch.setattr(sections, "make_init", lambda *_, **__: lambda: 0)
  monkeypatch.setattr(step, "draw", lambda *_: None)
  monkeypatch.setattr(step, "compiled", compiled)
  monkeypatch.setattr(step, "race", lambda steps, *_: ({name: [2.0] for name in steps}, None, None))
  row = sections.train_step("tiny", 8, "none")
  assert row["failed"] == {
    name: "NotImplementedError: no kernel" for name in ("switchback", "full")
  }
  assert row["contenders"]["flax"]["images_per_second"] == 4
  monkeypatch.setattr(sections, "memory_limit", lambda _: 0.5e9)
  with pytest.raises(MemoryError, match=r"flax needs 1\.0 of 0\.5 GB"):
    sections.train_step("tiny", 8, "none")


@pytest.mark.parametrize(
  "said", ["RESOURCE_EXHAUSTED: Out of memory", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"]
)
def test_only_out_of_memory_errors_halve_the_batch(monkeypatch, said):
  tried = []

  def train(size, batch_size, remat, backend):
    tried.append(batch_size)
    if batch_size > 16:
      raise RuntimeError(said)
    return {"batch_size": batch_size}

  monkeypatch.setattr(sections, "train_step", train)
  assert sections.fitting_step("B/16", 64, "none") == {"batch_size": 16} and tried == [64, 32, 16]

  def never_fits(*_):
    tried.append(_)
    raise MemoryError("never")

  tried.clear()
  monkeypatch.setattr(sections, "train_step", never_fits)
  with pytest.raises(MemoryError, match="never"):
    sections.fitting_step("B/16", 32, "none")
  assert len(tried) == 3

  def wrong(*_):
    raise RuntimeError("illegal instruction")

  monkeypatch.setattr(sections, "train_step", wrong)
  with pytest.raises(RuntimeError, match="illegal"):
    sections.fitting_step("B/16", 64, "none")


@pytest.mark.parametrize(("gigabytes", "batch"), [(140, 512), (46, 256), (22, 128), (6, 32)])
def test_the_first_batch_size_depends_on_device_memory(monkeypatch, gigabytes, batch):
  monkeypatch.setattr(sections, "memory_limit", lambda _: gigabytes * 1e9)
  ((_, measure),) = sections.steps(get_backend("xla"), tiny=False)
  assert measure.args == ("B/16", batch, "none", None)


def section(program, seconds=20.0):
  """The result of a section whose process runs this program; `emit` writes a line."""
  emit = (
    "import json, os, sys, time\n"
    "file = open(sys.argv[sys.argv.index('--out') + 1], 'w')\n"
    "def emit(**line): print(json.dumps(line), file=file, flush=True)\n"
  )
  return card.run_section([sys.executable, "-c", emit + program], seconds)


def test_a_section_returns_its_rows_and_its_device():
  result = section("emit(device={'chip': 'any'}); emit(case='1', m=2)")
  assert result.pop("seconds") >= 0
  assert result == {"device": {"chip": "any"}, "rows": [{"case": "1", "m": 2}]}


def test_a_section_that_crashes_returns_its_rows_and_the_reason():
  result = section("emit(case='1'); os.abort()")
  assert result["rows"] == [{"case": "1"}] and "ended by SIGABRT" in result["failed"]
  result = section(
    "emit(case='1'); file.write('{\"case'); file.flush(); raise ValueError('bad chip')"
  )
  assert result["rows"] == [{"case": "1"}]
  assert result["failed"] == "ended with status 1: ValueError: bad chip"


def test_a_section_is_stopped_at_its_time_limit():
  started = time.monotonic()
  result = section("emit(case='1'); time.sleep(60)", seconds=1.5)
  assert time.monotonic() - started < 15
  assert result["rows"] == [{"case": "1"}] and result["failed"].startswith("stopped after 2 s")


def test_a_section_runs_with_exact_int8_matmuls(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
  result = section("emit(case=os.environ['XLA_FLAGS'])")
  assert result["rows"][0]["case"] == "--xla_mine=1 --xla_gpu_enable_triton_gemm=false"
  monkeypatch.setattr(card, "for_tpu", lambda: True)
  result = section("emit(case=os.environ['XLA_FLAGS'])")
  assert result["rows"][0]["case"] == "--xla_mine=1"


def test_a_table_shows_h200_figures_from_the_result_files():
  sizes = {"m": 65536, "n": 5120, "k": 1280}
  row = {"case": "65536 x 5120 x 1280", **sizes, "tops": {"xla_bf16": 100.0, "ours_int8": 250.0}}
  theirs = [r for r in read("matmul") if r["chip"] == CHIP and sizes.items() <= r.items()][-1]
  *_, line = card.table("matmul", {"rows": [row]})
  ours, plain = (theirs["tops"][name] for name in ("ours_int8", "xla_bf16"))
  assert line.split()[5:8] == ["100", "250", "2.50x"]
  assert line.split()[8:] == [f"{plain:,.4g}", f"{ours:,.4g}", f"{ours / plain:.2f}x"]


def test_gains_are_ratios_of_times_or_rates():
  assert (
    card.shown("quantize", {"milliseconds": {"copy": 1.0, "xla": 3.0, "ours": 2.0}})[2] == "1.50x"
  )
  each = {"flax": {"images_per_second": 100.0}, "switchback": {"images_per_second": 150.0}}
  assert card.shown("step", {"contenders": each}) == ("100", "150", "1.50x")
  assert card.shown("attention", {"milliseconds": {"xla": 3.0}}) == ("3", "-", "-")


def test_a_table_shows_failures_and_wrong_results():
  rows = [
    {"case": "1 x 2 x 3", "failed": {"ours_int8": "RuntimeError: no"}, "tops": {"xla_bf16": 1.0}},
    {"case": "4 x 5 x 6", "equal_to_xla_int8": False},
  ]
  text = "\n".join(card.table("matmul", {"rows": rows, "failed": "stopped after 9 s"}))
  assert "ours_int8: RuntimeError: no" in text and "WRONG: the int8 product" in text
  assert "FAILED: stopped after 9 s" in text
  step = {"case": "ViT-B/16", "size": "B/16", "batch_size": 64, "contenders": {}}
  text = "\n".join(card.table("step", {"rows": [step]}))
  assert "ViT-B/16, 64 images" in text and f"(the {CHIP} had 512 images a batch)" in text


def test_a_card_of_a_gpu_that_computes_as_another_says_so(monkeypatch):
  monkeypatch.setenv("SBJAX_ASSUME_CAPABILITY", "80")
  with triton_case.chip(90):
    said = sections.describe(jax.devices()[0])
  assert (said["chip"], said["compute_capability"]) == ("NVIDIA as sm_80", 80)
  assert card.slug("NVIDIA H200 as sm_80") == "h200-as-sm-80"


def test_a_tpu_has_no_compute_capability():
  device = {"chip": "TPU v5 lite", "compute_capability": None, "memory_gigabytes": 17.0,
            "jax": "0.11.2", "backend": "xla", "lacking": {}}  # fmt: skip
  assert card.in_words(device) == (
    "TPU v5 lite, 17.0 GB for JAX, jax 0.11.2; sbjax's backend is 'xla'"
  )
  assert card.slug("TPU v5 lite") == "tpu-v5-lite"


def test_a_card_file_is_named_after_its_device():
  names = ("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA L40")
  assert [card.slug(n) for n in names] == ["a100-sxm4-80gb", "geforce-rtx-4090", "l40"]


def main(monkeypatch, tmp_path, *arguments):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setattr("sys.argv", ["card", "--folder", str(tmp_path), *arguments])
  card.main()


def test_tiny_makes_a_card_on_a_cpu(monkeypatch, tmp_path, capsys):
  main(monkeypatch, tmp_path, "--tiny", "--sections", "quantize")
  assert f"Wrote {tmp_path}/card_cpu.json" in capsys.readouterr().out
  made = json.loads((tmp_path / "card_cpu.json").read_text())
  assert made["chip"] == "cpu" and made["device"]["backend"] == "xla"
  assert made["command"].startswith("python -m benchmarks.card") and "command" not in made["device"]
  rows = made["sections"]["quantize"]["rows"]
  assert len(rows) == 3 and all(row["failed"] == {} for row in rows)


def test_without_a_gpu_the_card_is_refused_in_one_sentence(monkeypatch, tmp_path):
  with pytest.raises(SystemExit, match=r"^No card was made: a GPU or a TPU .*'cpu'; --tiny .*\.$"):
    main(monkeypatch, tmp_path, "--sections", "quantize")
  assert not list(tmp_path.iterdir())


def test_a_crashed_section_does_not_stop_the_card(monkeypatch, tmp_path, capsys):
  limits = []

  def run_section(command, seconds):
    limits.append(seconds)
    if command[-1] == "matmul":
      return {"rows": [], "seconds": 1.0, "failed": "ended by SIGSEGV: it said nothing"}
    device = {"chip": "NVIDIA L4", "compute_capability": 89, "memory_gigabytes": 22.0,
              "jax": "0.11.2", "backend": "triton", "lacking": {"mosaic": "no"}}  # fmt: skip
    return {"device": device, "rows": [], "seconds": 1.0}

  monkeypatch.setattr(card, "run_section", run_section)
  main(monkeypatch, tmp_path)
  said = capsys.readouterr().out
  assert "FAILED: ended by SIGSEGV" in said and "NVIDIA L4, compute capability 89, 22.0 GB" in said
  made = json.loads((tmp_path / "card_l4.json").read_text())
  assert list(made["sections"]) == ["matmul", "quantize", "attention", "step"]
  assert "SIGSEGV" in made["sections"]["matmul"]["failed"]
  # Later sections may use the time that a section leaves.
  assert limits[0] == pytest.approx(180, abs=1) and limits[-1] == pytest.approx(600, abs=1)


@pytest.mark.slow
def test_a_named_backend_writes_its_own_card_file(monkeypatch, tmp_path, capsys):
  main(monkeypatch, tmp_path, "--tiny", "--sections", "quantize", "--backend", "xla")
  (path,) = tmp_path.iterdir()
  assert path.stem.endswith("_xla") and json.loads(path.read_text())["device"]["backend"] == "xla"
  with pytest.raises(SystemExit):
    main(monkeypatch, tmp_path, "--tiny", "--sections", "quantize", "--backend", "mosaic")
  assert "backend='mosaic' needs an NVIDIA GPU" in capsys.readouterr().out
  monkeypatch.setattr(tables, "RESULTS", tmp_path)
  assert tables.cards("quantize") == []  # Other cards are compared with the best backend.
