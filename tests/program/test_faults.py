"""The program of random faults: it notices what is lost, and draws end as they should."""

import json
import shutil
import sys

import pytest

from tests import faults
from tests.fault_case import STEPS, Case, Lost, Start, Truth


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def truth(shared):
  return Truth(shared, limit=300)


@pytest.fixture
def case(truth):
  """The run without faults, to be changed; the metrics and the last checkpoint come back."""
  kept = truth.case.folder / "kept"
  shutil.copytree(truth.case.workdir, kept)
  yield truth.case
  shutil.rmtree(truth.case.workdir)
  kept.rename(truth.case.workdir)


def test_the_faults_of_a_draw_depend_on_its_seed():
  assert faults.plan(3) == faults.plan(3)
  assert {name for seed in range(100) for _, name in faults.plan(seed)} == set(faults.FAULTS)


@pytest.mark.slow
def test_a_killed_run_with_a_damaged_checkpoint_is_not_lost(truth, shared, monkeypatch):
  monkeypatch.setattr(faults, "plan", lambda seed: [(10, "damage_checkpoint")])
  row = faults.draw(1, truth, shared, limit=300)
  # If the damaged checkpoint was the only one, the run is refused first.
  assert (row["outcome"], row["starts"]) in {("equal", 2), ("refused", 3)}, row


@pytest.mark.slow
def test_another_value_in_the_metrics_is_lost(truth, case):
  lines = (case.workdir / "metrics.jsonl").read_text().splitlines()
  lines[5] = json.dumps({**json.loads(lines[5]), "loss": 1.0})
  (case.workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  with pytest.raises(Lost, match=r"other values at steps \[6\]"):
    case.check(truth)


@pytest.mark.slow
def test_a_repeated_step_in_the_metrics_is_lost(truth, case):
  text = (case.workdir / "metrics.jsonl").read_text()
  (case.workdir / "metrics.jsonl").write_text(text.partition("\n")[0] + "\n" + text)
  with pytest.raises(Lost, match=r"has steps \[1, 1, 2"):
    case.check(truth)


@pytest.mark.slow
def test_another_final_state_is_lost(truth, case):
  shutil.rmtree(case.checkpoints / str(STEPS))
  (case.checkpoints / str(STEPS - 4)).rename(case.checkpoints / str(STEPS))
  with pytest.raises(Lost, match="the final state differs in "):
    case.check(truth)


@pytest.mark.parametrize(
  ("program", "reason"),
  [
    ("print('step  5/24  loss 1')", "started after step 0 though step 4 was good"),
    ("import sys; sys.exit('Something is wrong.')", "naming no damage: Something is wrong."),
    ("1 / 0", "traceback: ZeroDivisionError"),
    ("import time; time.sleep(60)", "hangs: no end 2 s after step 0"),
  ],
)
def test_a_program_that_ends_wrongly_is_lost(tmp_path, program, reason):
  case = Case(tmp_path, tmp_path, limit=2 if "hangs" in reason else 60)
  case.program, case.excused, case._newest_good = Start([sys.executable, "-c", program]), False, 4
  with pytest.raises(Lost, match=reason):
    case.settle()
  if case.program:
    case.program.close()
