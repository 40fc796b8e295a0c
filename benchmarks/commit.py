"""The commit that makes a result. It needs no JAX, whose processes must not fork."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit_of(folder: Path) -> str | None:
  """The commit checked out there, with "-dirty" if tracked files other than results differ from it.

  Where the code is without its repository, SBJAX_COMMIT, or None.
  """
  git = ["git", "--git-dir=.git"]
  files = ["--untracked-files=no", "--", ".", ":!benchmarks/results"]
  try:
    commit, changes = (
      subprocess.run(
        [*git, *command], cwd=folder, capture_output=True, text=True, check=True
      ).stdout
      for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", *files])
    )
  except (OSError, subprocess.CalledProcessError):
    return os.environ.get("SBJAX_COMMIT")
  return commit.strip() + "-dirty" * bool(changes)


COMMIT = commit_of(ROOT)  # Once, at the start: the checkout may change while a benchmark runs.
