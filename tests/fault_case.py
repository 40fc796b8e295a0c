"""A short training run that is interrupted or damaged, and started again until it finishes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from io import BytesIO
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.data.shapes import Shapes

ROOT = Path(__file__).parents[1]
STEPS, EVAL_EVERY = 24, 8
OPTIONS = {
  "data.name": "drawn",
  "data.train_shards": "train-*.tar",
  "data.eval_shards": "test-*.tar",
  "data.label_key": "",
  "model.recipe": "full",
  "model.scan": True,
  "model.image_size": 32,
  "model.context_length": 16,
  "batch_size": 16,
  "steps": STEPS,
  "optimizer.warmup_steps": 2,
  "log_every": 1,
  "eval_every": EVAL_EVERY,
  "eval_batch_size": 32,
  "checkpoint_every": 4,
}
_TIMINGS = {"step_seconds", "data_wait_seconds", "images_per_second", "mfu", "peak_gigabytes"}
_ONE_AT_A_TIME = threading.Lock()  # orbax restores in one thread of this process.


class Lost(Exception):
  """The run did not end as the run without faults, and did not say why."""


class Start:
  """One start of the program. Threads read its output."""

  def __init__(self, command: list[str], environment: dict[str, str] | None = None):
    self.process = subprocess.Popen(
      command,
      cwd=ROOT,
      env=environment,
      text=True,
      errors="replace",
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
    )
    self.out, self.err = [], []
    self._readers = [
      threading.Thread(target=lines.extend, args=(stream,), daemon=True)
      for lines, stream in ((self.out, self.process.stdout), (self.err, self.process.stderr))
    ]
    for reader in self._readers:
      reader.start()

  def running(self) -> bool:
    return self.process.poll() is None

  def signal(self, signum: int) -> None:
    self.process.send_signal(signum)

  @contextlib.contextmanager
  def stopped(self):
    self.signal(signal.SIGSTOP)
    try:
      yield
    finally:
      self.signal(signal.SIGCONT)

  def step(self) -> int:
    """The last step that this process has printed; 0 before the first."""
    steps = re.findall(r"^step +(\d+)/\d+  (?:loss|compiled)", "".join(self.out), re.MULTILINE)
    return int(steps[-1]) if steps else 0

  def continued_after(self) -> int:
    match = re.search(r"Continuing after step (\d+)", "".join(self.out))
    return int(match[1]) if match else 0

  def wait(self, limit: float, until=lambda: False) -> None:
    """Returns when the program has ended or `until()` holds."""
    deadline = time.monotonic() + limit
    while self.running() and not until():
      if time.monotonic() > deadline:
        raise Lost(f"hangs: no end {limit:.0f} s after step {self.step()}")
      time.sleep(0.005)

  def message(self) -> str:
    """The last paragraph on stderr."""
    return "".join(self.err).strip().rpartition("\n\n")[2]

  def close(self) -> str:
    """Ends what is left of the program and its children; returns its output."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()
    for reader in self._readers:
      reader.join()
    self.process.stdout.close()
    self.process.stderr.close()
    return f"exit code {self.process.returncode}\n{''.join(self.out)}\n{''.join(self.err)}"


class Damage:
  """A file or folder as it was before it was damaged."""

  def __init__(self, case: "Case", path: Path):
    self.path, self._root = path, case.folder
    self.backup = case.folder / f"backup-{len(case.damages)}-{time.monotonic_ns()}"
    copy = shutil.copytree if path.is_dir() else shutil.copyfile
    copy(path, self.backup)
    self.records_lost, self.records_altered = [], []

  def named_by(self, message: str) -> int:
    """How many characters of this path the message names: of the file or a folder that holds it."""
    inside = self.path.relative_to(self._root).parts  # disk/run/... or data/...
    names = [str(self._root.joinpath(*inside[:n])) for n in range(2, len(inside) + 1)]
    return max((len(name) for name in names if name in message), default=0)

  def undo(self) -> None:
    remove(self.path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if self.backup.is_dir() else shutil.copyfile
    copy(self.backup, self.path)


class Case:
  """A run in `folder`: at most one start of it at a time, and what was damaged so far."""

  def __init__(self, folder: Path, shared: Path, limit: float):
    self.folder, self.limit = folder, limit
    self.disk, self.data = folder / "disk", folder / "data"
    self.workdir = self.disk / "run"
    self.disk.mkdir(parents=True)
    self.program: Start | None = None
    self.damages: list[Damage] = []
    self.excused = self.cached = True
    self.workers = self.starts = self.refusals = 0
    self._newest_good = 0
    self._environment = {
      **os.environ,
      "TMPDIR": str(folder),
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
      "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if self._environment.pop("PYTHONDONTWRITEBYTECODE", ""):
      self._environment["PYTHONPYCACHEPREFIX"] = str(shared / "bytecode")  # Starts take half.

  @property
  def prepared(self) -> Path:
    return self.data / "prepared"

  @property
  def checkpoints(self) -> Path:
    return self.workdir / "checkpoints"

  def new_start(self, program: str = "train.main") -> Start:
    paths = {"data.root": self.data / "tars", "data.data_dir": self.prepared}
    options = {**OPTIONS, **paths, "data.workers": self.workers}
    command = [sys.executable, "-m", program, "--config=configs/quickstart.py"]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    environment = {**self._environment, "JAX_ENABLE_COMPILATION_CACHE": str(self.cached).lower()}
    return Start([*command, f"--workdir={self.workdir}"], environment)

  def start(self) -> None:
    self._newest_good = max(self.good_steps(), default=0)
    self.program, self.excused = self.new_start(), False
    self.cached = True

  def reach(self, step: int) -> None:
    """Runs the program until it has printed `step`, or written its tokenizer if `step` is 0."""
    started = self.workdir / "tokenizer.json"
    while True:
      if self.program is None:
        self.start()
      reached = lambda: self.program.step() >= step if step else started.exists()  # noqa: E731
      self.program.wait(self.limit, reached)
      if self.program.running() or self.settle():
        return

  def finish(self) -> None:
    """Starts the program until it ends with success."""
    while True:
      if self.program is None:
        self.start()
      if self.settle():
        return

  def kill(self) -> None:
    if self.program is not None and self.program.running():
      self.program.signal(signal.SIGKILL)
      self.excused = True
    if self.program is not None:
      self.settle()

  def settle(self) -> bool:
    """Waits for the end of the program and judges it. A refusal is cured as its message says."""
    program = self.program
    program.wait(self.limit)
    code = program.process.returncode
    self.log(program)
    self.program = None
    traceback = re.search(r"Traceback \(most.*\n(?:\s.*\n)*(.*)", "".join(program.err))
    if traceback:
      raise Lost(f"traceback: {traceback[1]}")
    if program.step() and program.continued_after() < self._newest_good:
      raise Lost(
        f"started after step {program.continued_after()} though step {self._newest_good} was good"
      )
    if code == 0:
      return True
    if self.excused:
      if code > 0 and not program.message():
        raise Lost(f"ended with code {code} and no message")
      return False
    self._cure(code, program.message())
    return False

  def _cure(self, code: int, message: str) -> None:
    self.refusals += 1
    damage = max(self.damages, key=lambda damage: damage.named_by(message), default=None)
    if code < 0 or damage is None or not damage.named_by(message):
      raise Lost(f"ended with code {code}, naming no damage: {message}")
    self.damages.remove(damage)
    advice = re.search(r"[Dd]elete (\S+?)[.,;:]?(\s|$)", message)
    if advice and Path(advice[1]).is_relative_to(self.folder):
      remove(Path(advice[1]))
    else:
      damage.undo()

  def good_steps(self) -> list[int]:
    """The steps of the complete and undamaged checkpoints."""
    damaged = {damage.path for damage in self.damages}
    steps = [p for p in self.checkpoints.glob("*") if p.name.isdecimal() and p not in damaged]
    return [] if self.checkpoints in damaged else [int(path.name) for path in steps]

  def log(self, program: Start) -> None:
    (self.folder / f"start-{self.starts}.txt").write_text(program.close())
    self.starts += 1

  def check(self, truth: "Truth") -> None:
    """Raises Lost unless state and metrics are those of the run without faults."""
    if self.result()["step"] != STEPS:
      raise Lost(f"result.json is of step {self.result()['step']}")
    state = self.state()
    for name, array in truth.state.items():
      if name not in state or state[name].tobytes() != array.tobytes():
        raise Lost(f"the final state differs in {name}")
    altered = [r for damage in self.damages for r in damage.records_altered]
    gone = [r for damage in self.damages for r in damage.records_lost]
    records = [r for r in self.records() if r not in altered]
    if records != [r for r in truth.records if r in records or r not in gone]:
      wrong = [r["step"] for r in records if r not in truth.records]
      steps = [r["step"] for r in records if "loss" in r]
      raise Lost(f"metrics.jsonl has steps {steps}, and other values at steps {wrong}")

  def result(self) -> dict:
    path = self.workdir / "result.json"
    if not path.exists():
      raise Lost("no result.json")
    return json.loads(path.read_text())

  def state(self) -> dict[str, np.ndarray]:
    """The arrays of the last checkpoint by name."""
    path = self.checkpoints / str(STEPS) / "state"
    if not path.exists():
      raise Lost(f"no checkpoint of step {STEPS}")
    with _ONE_AT_A_TIME, ocp.StandardCheckpointer() as checkpointer:
      leaves = jax.tree_util.tree_leaves_with_path(checkpointer.restore(path))
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}

  def records(self, strict: bool = True) -> list[dict]:
    """The lines of metrics.jsonl without timings; without those that are damaged unless strict."""
    path, records = self.workdir / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
      try:
        record = json.loads(line)
        records.append({k: v for k, v in record.items() if k not in _TIMINGS})
      except (ValueError, AttributeError) as error:
        if strict:
          raise Lost(f"metrics.jsonl has a line {line[:60]!r}") from error
    return records


class Truth:
  """What a run without faults leaves. Also fills the caches and prepares the data of all draws."""

  def __init__(self, shared: Path, limit: float):
    self.case = case = Case(shared / "whole", shared, limit)
    write_tars(case.data / "tars")
    case.finish()
    self.data, self.records, self.state = case.data, case.records(), case.state()

  def resume(self) -> None:
    """Repeats the last steps, which compiles what only a resumed run needs."""
    remove(self.case.checkpoints / str(STEPS))
    self.case.finish()
    self.case.check(self)


def write_tars(folder: Path) -> None:
  """Three shards of drawn pictures with their captions."""
  folder.mkdir(parents=True)
  builder = Shapes(config="tiny", data_dir=str(folder))
  for name, split, first, count in (("train-0", "train", 0, 48), ("train-1", "train", 48, 48),
                                    ("test-0", "test", 0, 32)):  # fmt: skip
    with tarfile.open(folder / f"{name}.tar", "w") as tar:
      for i, example in list(builder._generate_examples(split))[first : first + count]:
        captions = json.dumps({"captions": example["captions"]}).encode()
        for extension, content in (("png", example["image"]), ("json", captions)):
          info = tarfile.TarInfo(f"{i:06d}.{extension}")
          info.size = len(content)
          tar.addfile(info, BytesIO(content))


def remove(path: Path) -> None:
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
