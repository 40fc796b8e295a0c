"""The programs of examples/ run as a user runs them, and print their losses."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


# embed.py trains nothing: tests/program/test_inference.py runs it.
TRAINING = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "embed")


@pytest.mark.parametrize("path", TRAINING, ids=lambda p: p.stem)
def test_an_example_runs_and_prints_its_losses(path, tmp_path):
  env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  run = subprocess.run(
    [sys.executable, "-W", "error", path], capture_output=True, text=True, cwd=tmp_path, env=env
  )
  assert run.returncode == 0, run.stderr
  losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
  assert len(losses) > 5


def test_an_example_has_at_most_80_lines():
  for path in (ROOT / "examples").glob("*.py"):
    assert len(path.read_text().splitlines()) <= 80, path
