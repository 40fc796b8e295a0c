"""benchmarks/states.py on the smallest model, with a step that does nothing."""

import jax
import pytest

from benchmarks import states, step, timing
from benchmarks.tables import read_file


@pytest.mark.slow
def test_choices_of_states_take_turns_and_memory_counts_their_bytes(monkeypatch, tmp_path):
  monkeypatch.setitem(step.CASES, "tiny", (8, "none"))
  compiled = (lambda state, batch: (state, len(batch))), {"peak_gigabytes": 0.5}
  monkeypatch.setattr(states, "compiled", lambda *_: compiled)
  monkeypatch.setattr(states, "provenance", dict)
  turns, timed = [], states._Choice.time

  def time(choice, steps):
    turns.append((round(choice.memory()["state_bytes_a_parameter"]), steps))
    return timed(choice, steps)

  monkeypatch.setattr(states._Choice, "time", time)
  out = tmp_path / "states.jsonl"
  options = ["--sizes", "tiny", "--states", "float32", "bfloat16", "--rounds", "2", "--steps", "1"]
  with jax.numpy_dtype_promotion("standard"):  # optax mixes integer steps with floating rates.
    states.main([*options, "--out", str(out)])
  # Each program warms up with three steps, then the order alternates.
  assert turns == 2 * [(8, 3), (4, 3), (8, 1), (4, 1), (4, 1), (8, 1)]
  (line,) = read_file(out)
  for row in line["states"].values():
    assert row["step_peak_gigabytes"] == 0.5
    assert row["update_milliseconds"] > row["step_milliseconds"] >= 0


@pytest.mark.parametrize("out", [["--out", "x/rows.jsonl"], ["--out=x/rows.jsonl"]])
def test_a_recorded_command_leaves_out_the_file_that_it_writes(monkeypatch, out):
  monkeypatch.setattr(timing.sys, "argv", ["states", *out, "--rounds", "2"])
  assert timing._arguments() == ["--rounds", "2"]
