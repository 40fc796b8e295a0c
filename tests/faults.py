"""Draws faults at random against short training runs: python -m tests.faults --seconds 600

A draw trains a tiny CLIP on the CPU, interrupts or damages it one to three times, and starts the
same command until it finishes. What is drawn depends on the seed alone. The outcome is one of

  equal    the final state and metrics.jsonl have the bits of a run without faults
  refused  the same, after the program ended with a message that names the damage, and the damage
           was mended (or the file deleted, if the message says so)
  lost     anything else: other numbers, a traceback, a hang, a good checkpoint that is not used

The program prints a line a draw, and exits with 1 if a draw is lost. It keeps the folder of a lost
draw: start-0.txt and so on are the output of each start.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.commit import COMMIT
from tests.fault_case import EVAL_EVERY, STEPS, Case, Damage, Lost, Start, Truth, remove

OUTCOMES = ("equal", "refused", "lost")
_DISK_BYTES = 80 * 2**20  # A run takes 30 MB.


def kill(case: Case, rng: random.Random) -> None:
  """SIGKILL up to a third of a second later, or up to 3 seconds after the last step."""
  time.sleep(rng.random() * (3 if case.program and case.program.step() == STEPS else 0.3))
  case.kill()


def kill_in_save(case: Case, rng: random.Random) -> None:
  """SIGKILL while the next checkpoint is written."""
  delay = rng.random() * 0.1
  if case.program:
    saving = lambda: any(case.checkpoints.glob("*.orbax-checkpoint-tmp"))  # noqa: E731
    case.program.wait(case.limit, saving)
    time.sleep(delay)
  case.kill()


def recompile(case: Case, rng: random.Random) -> None:
  """SIGKILL; the next start compiles everything again."""
  case.kill()
  case.cached = False


def _announce(case: Case, send) -> None:
  """The program ends on its own after `send(program)`, with all steps saved that it has printed."""
  program = case.program
  if not program:
    return
  case.excused, step = True, program.step()
  send(program)
  case.settle()
  code = program.process.returncode
  if code < 0:
    raise Lost(f"the signal killed it (code {code})")
  if code > 128 and max(case.good_steps(), default=0) < step:
    raise Lost(f"code {code}, but step {step} is not saved: {case.good_steps()}")


def terminate(case: Case, rng: random.Random) -> None:
  """SIGTERM."""
  _announce(case, lambda program: program.signal(signal.SIGTERM))


def warn(case: Case, rng: random.Random) -> None:
  """SIGHUP, SIGUSR1, SIGUSR2 or Ctrl-C."""
  signum = rng.choice((signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT))
  _announce(case, lambda program: program.signal(signum))


def terminate_twice(case: Case, rng: random.Random) -> None:
  """A second SIGTERM up to 20 ms after the first."""
  delay = 0.02 * rng.random()

  def send(program):
    program.signal(signal.SIGTERM)
    time.sleep(delay)
    program.signal(signal.SIGTERM)

  _announce(case, send)


def terminate_group(case: Case, rng: random.Random) -> None:
  """SIGTERM or SIGUSR1 to the process group, with a data worker in it."""
  signum = rng.choice((signal.SIGTERM, signal.SIGUSR1))
  _announce(case, lambda program: os.killpg(program.process.pid, signum))


def terminate_in_evaluation(case: Case, rng: random.Random) -> None:
  """SIGTERM up to a third of a second after the step of the next evaluation."""
  delay = rng.random() / 3
  if case.program:
    due = (case.program.step() // EVAL_EVERY + 1) * EVAL_EVERY
    case.program.wait(case.limit, lambda: case.program.step() >= min(due, STEPS))
    time.sleep(delay)
  _announce(case, lambda program: program.signal(signal.SIGTERM))


def stop(case: Case, rng: random.Random) -> None:
  """SIGSTOP, and SIGCONT up to 4 seconds later."""
  seconds = 4 * rng.random()
  if case.program:
    with case.program.stopped():
      time.sleep(seconds)


def fill(case: Case, rng: random.Random) -> None:
  """The disk has little room left until the program ends; without a mount, files have a limit."""
  room = rng.choice((0, 10_000, 200_000, 2_000_000, 7_000_000))
  if not case.program:
    return
  case.excused = True
  if not os.path.ismount(case.disk):
    resource.prlimit(case.program.process.pid, resource.RLIMIT_FSIZE, (room, room))
    case.settle()
    return
  filler = case.disk / "filler"
  # A write fails if the program took the rest meanwhile.
  with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
    while (free := shutil.disk_usage(case.disk).free) > room:
      file.write(bytes(min(free - room, 2**20)))
  case.settle()
  filler.unlink()


def second_program(case: Case, rng: random.Random) -> None:
  """The same command is started again while the program runs."""
  if not case.program or not 0 < case.program.step() < STEPS - 4:
    return
  with case.program.stopped():  # It cannot end before the second looks.
    second = _beside(case, "train.main")
  message = second.message()
  if second.process.returncode < 1 or "Traceback" in message or str(case.workdir) not in message:
    raise Lost(f"a second program, code {second.process.returncode}: {message or 'no message'}")


def evaluate(case: Case, rng: random.Random) -> None:
  """The newest checkpoint is scored while the program runs and writes others."""
  if not case.program or case.damages:  # It may be right that it finds none.
    return
  scored = _beside(case, "train.evaluate")
  if scored.process.returncode and "no checkpoint" not in scored.message():
    raise Lost(f"evaluation, code {scored.process.returncode}: {scored.message() or 'no message'}")


def _beside(case: Case, program: str) -> Start:
  """A program that has run to its end."""
  start = case.new_start(program)
  try:
    start.wait(case.limit)
  finally:
    case.log(start)
  return start


def kill_worker(case: Case, rng: random.Random) -> None:
  """SIGKILL to a process that decodes the data."""
  if not case.program:
    return
  case.excused = True
  for folder in Path("/proc").glob("[0-9]*"):
    try:
      parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
      if parent == case.program.process.pid and b"spawn_main" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), signal.SIGKILL)
        return
    except (OSError, ProcessLookupError):
      continue  # A process that ended meanwhile.


def kill_import(case: Case, rng: random.Random) -> None:
  """The prepared data is gone, and SIGKILL ends the program that imports it again."""
  case.kill()
  delay = rng.random() * 0.2
  remove(case.prepared)
  case.start()
  case.program.wait(case.limit, lambda: any(case.prepared.glob("*/*incomplete*")))
  time.sleep(delay)
  case.kill()


def damage_checkpoint(case: Case, rng: random.Random) -> None:
  """A file of the newest or of another checkpoint."""
  newest, place = rng.random() < 0.5, rng.random()
  case.kill()
  if steps := sorted(case.good_steps()):
    step = steps[-1] if newest else steps[int(place * len(steps))]
    _damage(case, case.checkpoints / str(step), rng)


def delete_checkpoints(case: Case, rng: random.Random) -> None:
  """The folder of checkpoints is deleted, half of the time under the running program."""
  if rng.random() < 0.5:
    case.kill()
  with case.program.stopped() if case.program else contextlib.nullcontext():
    if case.checkpoints.exists():
      case.damages.append(Damage(case, case.checkpoints))
      shutil.rmtree(case.checkpoints)


def damage_config(case: Case, rng: random.Random) -> None:
  """config.json."""
  case.kill()
  _damage(case, case.workdir / "config.json", rng)


def damage_tokenizer(case: Case, rng: random.Random) -> None:
  """tokenizer.json."""
  case.kill()
  _damage(case, case.workdir / "tokenizer.json", rng)


def damage_metrics(case: Case, rng: random.Random) -> None:
  """metrics.jsonl. The run cannot restore a line, but all others stay."""
  case.kill()
  before = case.records(strict=False)
  if _damage(case, case.workdir / "metrics.jsonl", rng):
    after = case.records(strict=False)
    case.damages[-1].records_lost = [r for r in before if r not in after]
    case.damages[-1].records_altered = [r for r in after if r not in before]


def damage_events(case: Case, rng: random.Random) -> None:
  """A file of TensorBoard events."""
  case.kill()
  _damage(case, case.workdir / "tensorboard", rng)


def damage_data(case: Case, rng: random.Random) -> None:
  """A file of the prepared data, half of the time under the running program."""
  if rng.random() < 0.5:
    case.kill()
  _damage(case, case.prepared, rng)


def delete_tars(case: Case, rng: random.Random) -> None:
  """The tar files, which have been imported."""
  case.kill()
  if (case.data / "tars").exists():
    case.damages.append(Damage(case, case.data / "tars"))
    shutil.rmtree(case.data / "tars")


def _damage(case: Case, path: Path, rng: random.Random) -> bool:
  """Truncates or deletes a file at or under `path`, or flips one of its bits."""
  how, which, place = rng.choice(("truncate", "flip", "delete")), rng.random(), rng.random()
  files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
  # By size, since many names are random.
  files = sorted((p.stat().st_size, str(p)) for p in files if p.name != ".lock")
  files = [(size, name) for size, name in files if size or how == "delete"]
  if not files:
    return False
  size, name = files[int(which * len(files))]
  is_checkpoint = path.parent == case.checkpoints
  case.damages.append(Damage(case, path if is_checkpoint else Path(name)))
  if how == "delete":
    os.unlink(name)
  elif how == "truncate":
    os.truncate(name, int(place * size))
  else:
    with open(name, "r+b") as file:
      file.seek(int(place * size))
      byte = file.read(1)[0]
      file.seek(int(place * size))
      file.write(bytes([byte ^ 1 << rng.randrange(8)]))
  return True


FAULTS = {
  fault.__name__: fault
  for fault in (
    *(kill, kill_in_save, recompile, stop, fill, second_program, evaluate),
    *(terminate, warn, terminate_twice, terminate_group, terminate_in_evaluation),
    *(
      kill_worker,
      kill_import,
      damage_checkpoint,
      delete_checkpoints,
      damage_config,
      damage_tokenizer,
    ),
    *(damage_metrics, damage_events, damage_data, delete_tars),
  )
}


def plan(seed: int) -> list[tuple[int, str]]:
  """The faults of a draw, each with the step at which it comes."""
  rng = random.Random(seed)
  names = rng.choices(list(FAULTS), k=rng.randint(1, 3))
  return list(zip(sorted(rng.randint(0, STEPS) for _ in names), names, strict=True))


def draw(seed: int, truth: Truth, shared: Path, limit: float) -> dict:
  """Carries out the plan of a seed; the row that describes what came of it."""
  faults, started, reason = plan(seed), time.monotonic(), ""
  names = [name for _, name in faults]
  case = Case(shared / f"draw-{seed}", shared, limit)
  case.workers = int(not {"kill_worker", "terminate_group"}.isdisjoint(names))
  mounted = "fill" in names and can_mount(case.disk)
  try:
    shutil.copytree(truth.data, case.data)
    for i, (step, name) in enumerate(faults):
      case.reach(step)
      FAULTS[name](case, random.Random(f"{seed} {i}"))
    case.finish()
    case.check(truth)
    outcome = "refused" if case.refusals else "equal"
  except (Lost, OSError) as error:
    outcome, reason = "lost", str(error)
  finally:
    if case.program:
      case.log(case.program)
    if mounted:
      subprocess.run(["umount", "--lazy", case.disk], check=True)
  if outcome != "lost":
    shutil.rmtree(case.folder)
  return {
    "seed": seed,
    "faults": [f"{name} at step {step}" for step, name in faults],
    "outcome": outcome,
    "starts": case.starts,
    "seconds": round(time.monotonic() - started, 1),
    **({"reason": reason.replace(str(case.folder), "DRAW")} if reason else {}),
  }


def can_mount(folder: Path) -> bool:
  """Makes `folder` a small disk, if the system permits it."""
  options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
  try:
    return subprocess.run(["mount", *options], capture_output=True).returncode == 0
  except FileNotFoundError:
    return False


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--draws", type=int, help="how many; without it, until --seconds")
  parser.add_argument("--seconds", type=float, default=float("inf"), help="no draw starts later")
  parser.add_argument("--seed", type=int, default=0, help="of the first draw")
  parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="draws at a time")
  parser.add_argument("--limit", type=float, default=180, help="seconds until a start hangs")
  parser.add_argument("--out", type=Path, help="a file to add a line of JSON a draw to")
  options = parser.parse_args()
  if options.draws is None and options.seconds == float("inf"):
    parser.error("Give --draws or --seconds.")
  shared = Path(tempfile.mkdtemp(prefix="faults-"))
  if can_mount(shared):
    subprocess.run(["umount", shared], check=True)
  else:
    print("Mounting is not permitted: `fill` limits the size of files instead.")
  rows = run_draws(options, shared)
  print(table(rows))
  print(json.dumps(totals(rows)))
  if options.out:
    append(options.out, totals(rows))
  if any(row["outcome"] == "lost" for row in rows):
    print(f"The folders of lost draws are in {shared}.")
    return 1
  shutil.rmtree(shared)
  return 0


def run_draws(options: argparse.Namespace, shared: Path) -> list[dict]:
  """The rows of the draws, `options.jobs` at a time, each printed when it ends."""
  last_start = time.monotonic() + options.seconds
  print("Training without faults.", flush=True)
  try:
    truth = Truth(shared, 3 * options.limit)
    truth.resume()
  except Lost as error:
    sys.exit(f"The run without faults is lost: {error}. A slow machine needs a larger --limit.")
  seeds = itertools.count(options.seed)
  if options.draws is not None:
    seeds = iter(range(options.seed, options.seed + options.draws))
  rows, lock = [], threading.Lock()

  def work() -> None:
    while time.monotonic() < last_start:
      with lock:
        seed = next(seeds, None)
      if seed is None:
        return
      row = draw(seed, truth, shared, options.limit)
      with lock:
        rows.append(row)
        said = f"{row['outcome']}, {row['seconds']:.0f} s, {', '.join(row['faults'])}"
        print(
          f"seed {row['seed']}: {said}", *row.get("reason", "").splitlines(), sep="\n  ", flush=True
        )
        if options.out:
          append(options.out, row)

  with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    for job in [pool.submit(work) for _ in range(options.jobs)]:
      job.result()
  return rows


def append(path: Path, row: dict) -> None:
  with path.open("a") as file:
    file.write(json.dumps(row | {"commit": COMMIT}) + "\n")


def table(rows: list[dict]) -> str:
  """The outcomes of the draws with each fault."""
  counts = collections.Counter(
    (name, row["outcome"])
    for row in rows
    for name in {fault.partition(" ")[0] for fault in row["faults"]}
  )
  lines = [f"{'':24}{''.join(f'{outcome:>9}' for outcome in OUTCOMES)}"]
  for name in FAULTS:
    lines.append(f"{name:24}{''.join(f'{counts[name, outcome]:9}' for outcome in OUTCOMES)}")
  return "\n".join(lines)


def totals(rows: list[dict]) -> dict:
  counts = collections.Counter(row["outcome"] for row in rows)
  return {
    "draws": len(rows),
    **{outcome: counts[outcome] for outcome in OUTCOMES},
    "command": f"python -m tests.faults {' '.join(sys.argv[1:])}",
    "jax": importlib.metadata.version("jax"),
    "python": platform.python_version(),
    "cores": os.cpu_count(),
  }


if __name__ == "__main__":
  sys.exit(main())
