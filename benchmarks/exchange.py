"""How long does the exchange of a model's gradients take in each format, and how exact is it?

  python -m benchmarks.exchange                # all GPUs of the machine
  python -m benchmarks.exchange --no_p2p       # through host memory: imitates GPUs on PCIe
  python -m benchmarks.exchange --tiny         # eight CPU devices, a tiny CLIP: no timing to cite

Each device draws heavy-tailed gradients of a CLIP, and `quantized_pmean` averages them. Each format
has its own process. Adds a line to results/exchange.jsonl: milliseconds, signal to noise against
the float32 mean in decibels, collectives of the compiled program and their bytes a value, and
temporary memory. benchmarks/scaling.py times whole steps:

  python -m benchmarks.scaling --rows H/14 --only data=2 --change '{"gradient_exchange": "e4m3"}'
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time

FORMATS = ("float32", "bfloat16", "e4m3", "int8")
_SECONDS = 400  # For a process.
_TINY = {
  "JAX_PLATFORMS": "cpu",
  "PJRT_NPROC": "64",  # Devices that wait in a collective hold a thread each.
  "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/exchange.jsonl")
  parser.add_argument("--size", default="H/14", help="a key of sbjax.models.SIZES")
  parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
  parser.add_argument("--tile", type=int, default=512)
  parser.add_argument("--tiny", action="store_true", help="eight CPU devices and a tiny CLIP")
  parser.add_argument("--no_p2p", action="store_true", help="NCCL uses host memory, not NVLink")
  parser.add_argument("--case", help=argparse.SUPPRESS)  # JSON: this process measures it.
  args = parser.parse_args()
  if args.case:
    print("result " + json.dumps(measure(**json.loads(args.case))), flush=True)
    return
  if args.tiny:
    args.size = "tiny"
    os.environ.update(_TINY)
  if args.no_p2p:
    os.environ["NCCL_P2P_DISABLE"] = "1"
  found = [run(form, args.size, args.tile) for form in args.formats]
  line = {"benchmark": "exchange", "size": args.size, "tile": args.tile, "p2p": not args.no_p2p}
  line |= {"formats": found}
  print(table(line), flush=True)
  from benchmarks.timing import append, provenance  # Imports JAX, which takes the GPUs.

  append(args.out, [line | provenance()])


def table(line: dict) -> str:
  """A line for each format: time, and what it takes and loses."""
  rows = [f"{'format':9} {'ms':>8} {'over float32':>13} {'bytes a value':>14} {'decibels':>9}"]
  found = [row for row in line["formats"] if "milliseconds" in row]
  base = next((row["milliseconds"] for row in found if row["format"] == "float32"), None)
  for row in found:
    gain = f"{base / row['milliseconds']:.2f}x" if base else ""
    exact = "" if row["decibels"] is None else f"{row['decibels']:.1f}"
    rows.append(
      f"{row['format']:9} {row['milliseconds']:8.2f} {gain:>13} {row['bytes_a_value']:14.2f}"
      f" {exact:>9}"
    )
  return "\n".join(rows)


def run(form: str, size: str, tile: int) -> dict:
  """Measures a format in a process of its own; its `error` if that fails."""
  case = json.dumps({"form": form, "size": size, "tile": tile})
  command = [sys.executable, "-m", "benchmarks.exchange", "--case", case]
  try:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("result ")]
    result = json.loads(lines[0].partition(" ")[2]) if lines else {"error": ended.stderr[-1500:]}
  except subprocess.TimeoutExpired:
    result = {"error": f"no result in {_SECONDS} s"}
  print(form, result.get("error") or f"{result['milliseconds']} ms", flush=True)
  return {"format": form, **result}


def measure(form: str, size: str, tile: int) -> dict:
  """Milliseconds, decibels, bytes a value and memory of a format, on all devices here."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from jax.sharding import AxisType
  from jax.sharding import PartitionSpec as P

  from benchmarks.collectives import collectives
  from sbjax.distributed.exchange import quantized_pmean
  from sbjax.models import CLIP, SIZES
  from train.step import make_init
  from train.task import CLIPTask

  mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
  shapes = jax.eval_shape(make_init(CLIPTask(CLIP(SIZES[size])), optax.identity(), 0)).params
  leaves, structure = jax.tree.flatten(shapes)

  def draw():
    # In one array: XLA compiles a draw for each leaf in minutes.
    values = _draw(jax.random.key(jax.lax.axis_index("data")), sum(x.size for x in leaves))
    ends = np.cumsum([x.size for x in leaves])
    parts = jnp.split(values, ends[:-1])
    return structure.unflatten([v.reshape(1, *x.shape) for v, x in zip(parts, leaves, strict=True)])

  def exchange(gradients):
    local = jax.tree.map(lambda x: x[0], gradients)
    return quantized_pmean(local, "data", format=form, tile=tile)

  def energies(gradients, means):
    """Of the float32 mean and of the error."""
    exact = jax.tree.map(lambda x: jax.lax.pmean(x[0], "data"), gradients)
    error = jax.tree.map(jnp.subtract, means, exact)
    return optax.tree.norm(exact, squared=True), optax.tree.norm(error, squared=True)

  def on_devices(function, in_specs, out_specs):
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))

  gradients = on_devices(draw, (), P("data"))()
  step = on_devices(exchange, P("data"), P()).lower(gradients).compile()
  means = step(gradients)
  signal, noise = map(float, on_devices(energies, (P("data"), P()), (P(), P()))(gradients, means))
  del means
  times = _times(lambda: step(gradients))
  values = sum(math.prod(x.shape) for x in leaves)
  moved = collectives(step.as_text())
  megabytes = sum(mb for kind in moved.values() for mb, _ in kind.values())
  return {
    "devices": mesh.size,
    "million_values": round(values / 1e6, 3),
    "milliseconds": round(statistics.median(times) * 1e3, 3),
    "spread": round((max(times) - min(times)) / statistics.median(times), 4),
    "decibels": round(10 * math.log10(signal / noise), 2) if noise else None,  # None: exact.
    "collectives": moved,
    "bytes_a_value": round(megabytes * 1e6 / values, 3),
    "temporary_bytes_a_value": round(step.memory_analysis().temp_size_in_bytes / values, 3),
  }


def _draw(key, size: int):
  """Student's t with 3 degrees of freedom, times a factor for each 1,024 numbers: [size].

  t is a normal number over the root of the mean of three squares of others. (`jax.random.t` draws
  gamma numbers in a loop.)
  """
  import jax
  import jax.numpy as jnp

  tails, rows = jax.random.split(key)
  shape = (-(-size // 1024), 1024)
  factors = jnp.exp(jax.random.normal(rows, (shape[0], 1)))
  normal, *others = (jax.random.normal(k, shape) for k in jax.random.split(tails, 4))
  t = normal / jnp.sqrt(sum(jnp.square(x) for x in others) / 3)
  return (1e-4 * factors * t).reshape(-1)[:size]


def _times(call, rounds: int = 5, calls: int = 5) -> list[float]:
  """Seconds of a call, in the mean of several."""
  import jax

  times = []
  for _ in range(rounds):
    started = time.perf_counter()
    for _ in range(calls):
      result = jax.block_until_ready(call())
      del result
    times.append((time.perf_counter() - started) / calls)
  return times


if __name__ == "__main__":
  main()
