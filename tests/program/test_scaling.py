"""benchmarks/scaling.py without GPUs."""

import dataclasses
import json
import math
import tempfile

import matplotlib.pyplot as plt
import pytest

from benchmarks import scaling, scaling_report
from benchmarks.scaling import Case
from benchmarks.scaling_report import sent
from benchmarks.tables import read


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_each_turn_uses_a_gpu_once_and_each_case_has_a_turn(gpus):
  cases = scaling.spread(scaling.cases_of("L/14", gpus), gpus)
  for turn in (turns := scaling.turns(cases)):
    used = [gpu for i in turn for gpu in cases[i].on]
    assert len(used) == len(set(used)) and set(used) <= set(range(gpus))
  assert sorted(i for turn in turns for i in turn) == list(range(len(cases)))
  assert all(len(case.on) == case.devices for case in cases)
  assert turns[0] == list(range(gpus)), "Single GPUs run at the same time."


def test_meshes_of_eight_gpus():
  expected = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (2, 4), (1, 8)]
  assert scaling.meshes_of(8) == expected
  assert {(c.data, c.fsdp) for c in scaling.cases_of("bigG/14", 8) if c.devices > 1} == {
    mesh for mesh in expected if mesh[1] > 1
  }


def test_the_bytes_that_a_gpu_sends_are_those_of_the_compiled_collectives():
  """`sent`, which docs/scaling.md predicts with, beside the collectives of the timed programs."""
  checked = 0
  for row in read("scaling"):
    for case in row.get("cases", ()):
      mesh, ours = (case["data"], case["fsdp"]), case.get("fused", True)
      if not ours or math.prod(mesh) < 4 or "collectives" not in case:
        continue
      summed = {"float32": 4, "bfloat16": 2}[case["gradient_dtype"]]
      predicted = sent(row["row"], *mesh, summed, 4, 1) / 1e6
      assert of_collectives(case["collectives"], *mesh) == pytest.approx(predicted, rel=0.02)
      checked += 1
  assert checked >= 18


def of_collectives(collectives: dict, data: int, fsdp: int) -> float:
  """Megabytes that a device sends; without fsdp the gather and the scatter are the loss's."""
  totals = {kind: sum(mb for mb, _ in dtypes.values()) for kind, dtypes in collectives.items()}
  scattered = sum(totals.get(kind, 0) for kind in ("all-gather", "reduce-scatter"))
  share = (fsdp - 1) / fsdp if fsdp > 1 else 0
  return scattered * share + 2 * (data - 1) / data * totals.get("all-reduce", 0)


def test_an_interrupted_row_is_shown_without_what_it_lacks(tmp_path):
  row = next(r for r in read("scaling") if r.get("gpus") == 4 and r["row"] == "H/14")
  whole, mesh = scaling_report.table([row])[2:], {"data": 4, "fsdp": 1}
  assert "| 4: 4 x 1 | 462, 456 | 2,217, 2,243 | **0.961**, **0.973** | 0.955, 0.976 |" in whole[3]
  of_mesh = [case for case in row["cases"] if case | mesh == case]
  for cases, expected in (
    (row["cases"][:4], whole[:1]),  # Single GPUs alone.
    (of_mesh, [whole[3].replace(" 0.955, 0.976 ", "  ")]),  # Without single GPUs.
    ([case for case in row["cases"] if not case["fused"]], []),
  ):
    assert scaling_report.table([row | {"cases": cases}])[2:] == expected
    scaling_report.plot([row | {"cases": cases}], tmp_path / "scaling.png")
    plt.close("all")


def test_gradients_sent_in_8_bits_are_named_and_fewer_bytes_are_expected():
  row = next(r for r in read("scaling") if r.get("gpus") == 4 and r["row"] == "H/14")
  cases = [c for c in row["cases"] if c["fused"] and c["gradient_dtype"] == "float32"]
  sent_as = [c | {"gradient_exchange": "e4m3"} for c in cases]
  line = scaling_report.table([row | {"cases": sent_as}])[2:][3]
  assert line.startswith("| H/14, 256, gradients sent in e4m3 | 4: 4 x 1 | 462 |")
  assert "| 0.988 |" in line, "1.5 GB at 281 GB/s beside 443.9 ms."


def test_open_clip_is_shown_only_beside_as_many_gpus_of_ours():
  row = next(r for r in read("scaling") if r["benchmark"] == "scaling_open_clip")
  ours = [r for r in read("scaling") if r.get("gpus") == 4 and r["benchmark"] == "scaling"]
  assert len(scaling_report.open_clip_table([row], ours)) == 3
  assert len(scaling_report.open_clip_table([row | {"gpus": 8}], ours)) == 2


def child(said: str):
  """What _start returns, for a process that says so when it is told to go."""
  code = f"print('compiled {{}}', flush=True); input(); {said}"
  process = scaling.subprocess.Popen(
    [*scaling.PYTHON, "-c", code],
    text=True,
    stdin=scaling.subprocess.PIPE,
    stdout=scaling.subprocess.PIPE,
    stderr=(errors := tempfile.TemporaryFile("w+")),  # noqa: SIM115
  )
  return {"process": process, "errors": errors, "error": None}


RESULT = {
  "milliseconds": 10.0, "images_per_second": 100.0, "gigabytes": 1.0, "peak_gigabytes": 1.0,
  "compile_seconds": 1.0, "spread": 0.0, "last_loss": 1.0,
}  # fmt: skip


def says(**changes) -> str:
  return f"print('result ' + {json.dumps(RESULT | changes)!r})"


def test_efficiency_is_relative_to_the_mean_of_single_gpus(monkeypatch):
  single = Case("L/14", 8)
  cases = [dataclasses.replace(single, gpus=gpu) for gpu in "01"]
  cases += [Case("L/14", 8, data=2), Case("L/14", 8, fsdp=2), Case("L/14", 8, 2, fused=False)]
  said = [says(), says(images_per_second=120.0), says(images_per_second=209.0)]
  said += ["raise RuntimeError('it broke')", says()]
  children = iter(map(child, said))
  monkeypatch.setattr(scaling, "_start", lambda case: next(children))
  found = []
  scaling.run_row(cases, found)
  assert [r.get("efficiency") for r in found] == [0.9091, 1.0909, 0.95, None, None]
  assert "it broke" in found[3]["error"]


def test_a_case_that_hangs_is_given_up_and_says_where_it_was(monkeypatch):
  monkeypatch.setattr(scaling, "_start", lambda case: child("import time\ntime.sleep(100)"))
  monkeypatch.setattr(scaling, "_RUN_SECONDS", 1)
  scaling.run_row([Case("L/14", 8)], found := [])
  assert found[0]["error"].startswith("no result in 1 s: Fatal Python error: Aborted")
  assert 'File "<string>", line 2 in <module>' in found[0]["error"]


def test_an_interrupted_row_keeps_what_is_measured(monkeypatch):
  cases = [Case("L/14", 8, gpus="0"), Case("L/14", 8, data=2)]
  children = [child(says()), child("import time; time.sleep(100)")]
  started = iter(children)
  monkeypatch.setattr(scaling, "_start", lambda case: next(started))
  shown = []

  def interrupt(result):
    shown.append(result)
    raise KeyboardInterrupt

  monkeypatch.setattr(scaling, "_shown", interrupt)
  with pytest.raises(KeyboardInterrupt):
    scaling.run_row(cases, found := [])
  assert [r["milliseconds"] for r in found] == [10.0]
  assert all(c["process"].poll() is not None for c in children), "No process is left."
