"""How fast are several GPUs of one machine, compared with one?

  python -m benchmarks.scaling --gpus 4

Times whole training steps as train.main compiles them, in the cases of `cases_of`: on each GPU by
itself, on `data` x `fsdp` GPUs, and plain Flax (recipe "full" in models/flax_block.py) on the
same GPUs. Each case has its own process. The processes of a row compile at the same time, and each
holds up to 3 GB of its GPUs from then on. They are timed in turns, cases on different GPUs in the
same turn, while the others wait. Adds a line for each row to results/scaling.jsonl, also if it is
interrupted: milliseconds, images a second, efficiency, memory, compile time, MFU, time by kernel
groups, and the collectives of the compiled step by kind and dtype. Efficiency is images a second
over the number of GPUs times those of a single GPU, the mean of all.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

from train.parallel import xla_flags

_COMPILE_SECONDS, _RUN_SECONDS = 360, 180
# SIGABRT ends a process that hangs; faulthandler then writes where its threads were.
PYTHON = (sys.executable, "-X", "faulthandler")


@dataclasses.dataclass(frozen=True)
class Case:
  size: str
  batch_size: int  # of a device
  data: int = 1
  fsdp: int = 1
  recipe: str = "switchback"
  fused: bool = True  # False: plain Flax
  remat: str = "none"
  gradient_dtype: str = "float32"
  gradient_exchange: str = "float32"
  flags: str = ""  # further XLA_FLAGS
  gpus: str = ""  # numbers of the GPUs, with commas; "" takes the first

  @property
  def devices(self) -> int:
    return self.data * self.fsdp

  @property
  def name(self) -> str:
    recipe = self.recipe if self.fused else "flax"
    return f"{recipe} data={self.data} fsdp={self.fsdp} {self.gradient_dtype}"

  @property
  def on(self) -> tuple[int, ...]:
    """The numbers of its GPUs."""
    return tuple(map(int, self.gpus.split(","))) if self.gpus else tuple(range(self.devices))


@dataclasses.dataclass(frozen=True)
class Row:
  batch_size: int  # of a device
  remat: str = "none"
  flax: tuple[tuple[int, str], ...] = ()  # Plain Flax's images a device, and remat.
  data_alone: bool = True  # Whether there are meshes with fsdp=1.


ROWS = {
  "L/14": Row(256, flax=((256, "none"),)),
  # Plain Flax has no room for 256 images; with remat it does fewer a second than 128 without.
  "H/14": Row(256, flax=((128, "none"),)),
  "B/32": Row(1024, flax=((1024, "none"),)),
  "bigG/14": Row(128, flax=((128, "block"),), data_alone=False),
}


def meshes_of(gpus: int) -> list[tuple[int, int]]:
  """(data, fsdp) on 2, 4, ... GPUs: one axis has all of them, or `data` has 2."""
  counts = [2**i for i in range(1, gpus.bit_length())]
  return list(dict.fromkeys(m for n in counts for m in ((n, 1), (2, n // 2), (1, n))))


def cases_of(size: str, gpus: int, meshes: list[tuple[int, int]] | None = None) -> list[Case]:
  """Each GPU by itself, and each mesh with ours in both gradient dtypes and plain Flax."""
  row = ROWS[size]
  meshes = meshes or [m for m in meshes_of(gpus) if row.data_alone or m[1] > 1]
  cases = [Case(size, row.batch_size, remat=row.remat, gpus=str(gpu)) for gpu in range(gpus)]
  for data, fsdp in meshes:
    ours = Case(size, row.batch_size, data, fsdp, remat=row.remat)
    cases += [ours, dataclasses.replace(ours, gradient_dtype="bfloat16")]
    cases += [Case(size, n, data, fsdp, "full", False, remat) for n, remat in row.flax]
  return cases


def spread(cases: list[Case], gpus: int) -> list[Case]:
  """Gives the cases of fewer GPUs the parts of the machine in turn, so that they share turns."""
  used, found = defaultdict(int), []
  for case in cases:
    if not case.gpus:
      first = used[case.devices] % (gpus // case.devices) * case.devices
      used[case.devices] += 1
      numbers = range(first, first + case.devices)
      case = dataclasses.replace(case, gpus=",".join(map(str, numbers)))
    found.append(case)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/scaling.jsonl")
  parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
  parser.add_argument("--gpus", type=int, default=2, choices=[2, 4, 8], help="of this machine")
  parser.add_argument("--meshes", nargs="+", help="DATAxFSDP, for example 8x1 2x4; not a row's own")
  parser.add_argument("--only", default="", help="a pattern of the cases' names")
  parser.add_argument("--change", default="{}", help="JSON: fields that all cases change")
  parser.add_argument("--case", help=argparse.SUPPRESS)  # JSON: this process measures it.
  args = parser.parse_args()
  if args.case:
    measure(Case(**json.loads(args.case)))
    return
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # Saves what is measured by then.
  meshes = [tuple(map(int, m.split("x"))) for m in args.meshes or ()]
  for size in args.rows:
    cases = cases_of(size, args.gpus, meshes)
    cases = [dataclasses.replace(c, **json.loads(args.change)) for c in cases]
    cases = [c for c in cases if re.search(args.only, c.name)]
    found = []
    try:
      run_row(spread(cases, args.gpus), found)
    finally:
      line = {"benchmark": "scaling", "row": size, "gpus": args.gpus, "cases": found}
      from benchmarks.timing import append, provenance  # Imports JAX, which takes the GPUs.

      append(args.out, [line | provenance()])


def run_row(cases: list[Case], found: list[dict]) -> None:
  """Runs each case in its own process; adds its measurements or its `error` to `found`."""
  children = [_start(case) for case in cases]
  try:
    started = time.perf_counter()
    for child in children:
      _read(child, "compiled", _COMPILE_SECONDS - (time.perf_counter() - started))
    for turn in turns(cases):
      for i in turn:
        _go(children[i])
      for i in turn:
        result = _read(children[i], "result", _RUN_SECONDS) or children[i]["error"]
        found.append({"case": cases[i].name, **dataclasses.asdict(cases[i]), **result})
        _stop(children[i])
      add_efficiency(found)
      for result in found[-len(turn) :]:
        print(_shown(result), flush=True)
  finally:
    for child in children:
      _stop(child)


def add_efficiency(found: list[dict]) -> None:
  """Images a second over those of as many single GPUs, for the cases of ours."""
  singles = [r["images_per_second"] for r in found if _devices(r) == 1 and "milliseconds" in r]
  for result in found:
    if singles and result["fused"] and "images_per_second" in result:
      of_singles = _devices(result) * statistics.mean(singles)
      result["efficiency"] = round(result["images_per_second"] / of_singles, 4)


def turns(cases: list[Case]) -> list[list[int]]:
  """The numbers of the cases by turns: those of a turn have no GPU in common."""
  left, found = list(range(len(cases))), []
  while left:
    turn, taken = [], set()
    for i in left:
      if taken.isdisjoint(cases[i].on):
        turn.append(i)
        taken.update(cases[i].on)
    found.append(turn)
    left = [i for i in left if i not in turn]
  return found


def _go(child: dict) -> None:
  if child["error"] is None:
    child["process"].stdin.write("go\n")
    child["process"].stdin.flush()


def _stop(child: dict) -> None:
  process = child["process"]
  process.kill()
  process.wait()
  for file in (process.stdin, process.stdout, child["errors"]):
    with contextlib.suppress(BrokenPipeError):
      file.close()


def _devices(result: dict) -> int:
  return result["data"] * result["fsdp"]


def _start(case: Case) -> dict:
  flags = os.environ.get("XLA_FLAGS", "") + " " + case.flags
  environment = {
    **os.environ,
    "XLA_FLAGS": flags.strip(),
    "CUDA_VISIBLE_DEVICES": ",".join(map(str, case.on)),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # The processes of a row share the GPUs.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97",
  }
  command = [*PYTHON, "-m", "benchmarks.scaling", "--case"]
  errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # Open as long as the process runs.
  process = subprocess.Popen(
    [*command, json.dumps(dataclasses.asdict(case))],
    env=environment,
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=errors,
  )
  return {"process": process, "errors": errors, "error": None}


def _read(child: dict, kind: str, seconds: float):
  """The next line of that kind that a child prints; None, with its `error` set, if none comes."""
  deadline = time.perf_counter() + max(seconds, 1)
  out = child["process"].stdout
  while child["error"] is None and time.perf_counter() < deadline:
    if not select.select([out], [], [], 1.0)[0]:
      continue
    line = out.readline()
    if not line:
      child["error"] = {"error": _said(child)}
    elif line.startswith(kind + " "):
      return json.loads(line.partition(" ")[2])
  if child["error"] is None:
    child["process"].send_signal(signal.SIGABRT)
    child["error"] = {"error": f"no {kind} in {seconds:.0f} s: {_said(child)}"}
  return None


def _said(child: dict) -> str:
  """The end of what a process that ends wrote to stderr."""
  with contextlib.suppress(subprocess.TimeoutExpired):
    child["process"].wait(10)
  child["errors"].seek(0)
  return child["errors"].read()[-3000:]


def measure(case: Case) -> None:
  """Compiles a case, waits for its turn and times it; prints "compiled" and "result" with JSON."""
  xla_flags.set_flags()
  import jax

  from benchmarks.collectives import collectives
  from benchmarks.kernels import exposed, grouped, idle, origins_of
  from benchmarks.step import draw, profile, race, rates
  from sbjax.models.clip import CLIP
  from sbjax.models.flax_block import FlaxBlock
  from sbjax.models.sizes import SIZES
  from sbjax.models.transformer import Block, BlockOptions
  from train.config import MeshConfig, OptimizerConfig
  from train.optimizer import make_optimizer
  from train.parallel.sharding import batch_sharding, make_mesh, replicated, state_shardings
  from train.step import make_init, make_train_step
  from train.task import CLIPTask, model_flops

  config, batch_size = SIZES[case.size], case.batch_size * case.devices
  mesh = make_mesh(MeshConfig(data=case.data, fsdp=case.fsdp))
  options = BlockOptions(recipe=case.recipe, remat=case.remat, unroll=0)
  task = CLIPTask(CLIP(config, options, block=Block if case.fused else FlaxBlock))
  optimizer, _ = make_optimizer(OptimizerConfig(), steps=20_000)
  init = make_init(task, optimizer, seed=0)
  state = jax.eval_shape(init)
  shardings, rows = state_shardings(state, state.params, mesh), batch_sharding(mesh)
  make_batch = jax.jit(lambda: draw(config, batch_size), out_shardings=rows)
  batch = jax.eval_shape(make_batch)
  dtype = jax.numpy.dtype(case.gradient_dtype)
  sums = {"gradient_dtype": dtype, "gradient_exchange": case.gradient_exchange}
  step = make_train_step(task, optimizer, 0, mesh=mesh, **sums)
  step = jax.jit(
    step,
    in_shardings=(shardings, rows),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
    donate_argnums=0,
  )
  started = time.perf_counter()
  lowered = step.lower(state, batch)
  lowering = time.perf_counter() - started
  step = lowered.compile()
  memory = step.memory_analysis()
  found = {
    "lower_seconds": round(lowering, 1),
    "compile_seconds": round(time.perf_counter() - started, 1),  # Lowering included.
    "collectives": collectives(step.as_text()),
    "gigabytes": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9, 2),
  }
  make_state = jax.jit(init, out_shardings=shardings).lower().compile()
  make_batch = make_batch.lower().compile()
  print("compiled " + json.dumps(found), flush=True)
  sys.stdin.readline()

  started = time.perf_counter()
  state, batch = jax.block_until_ready((make_state(), make_batch()))
  state, metrics, _ = step(state, batch)
  jax.block_until_ready(metrics)
  found["first_step_seconds"] = round(time.perf_counter() - started, 1)
  times, state, losses = race({case.name: step}, state, batch, rounds=5)
  stats = jax.devices()[0].memory_stats() or {}
  found |= rates(times[case.name], batch_size, model_flops(config, case.batch_size))
  found |= {
    "peak_gigabytes": round(stats.get("peak_bytes_in_use", 0) / 1e9, 2),
    "last_loss": round(losses[case.name], 5),
    "chip": jax.devices()[0].device_kind,
  }
  if jax.default_backend() == "gpu":
    listed, state = profile(step, state, batch)
    found["milliseconds_by_group"] = {
      **grouped(listed, origins_of(step.as_text())),
      "between GPUs, nothing else": round(exposed(listed, "nccl"), 3),
      "no kernel": round(idle(listed), 3),
    }
  print("result " + json.dumps(found), flush=True)


def _shown(result: dict) -> str:
  name = f"{result['size']:8} {result['case']:26} {result['remat']:5}"
  if "error" in result:
    return f"{name} {result['error'][-300:]}"
  efficiency = result.get("efficiency")
  return (
    f"{name} {result['milliseconds']:8.1f} ms {result['images_per_second']:7.0f} images/s"
    f" {'' if efficiency is None else f'{efficiency:.3f}':5} {result['gigabytes']:6.1f}"
    f" {result['peak_gigabytes']:6.1f} GB, compiled in {result['compile_seconds']:.0f} s,"
    f" spread {result['spread']:.3f}, loss {result['last_loss']}"
  )


if __name__ == "__main__":
  main()
