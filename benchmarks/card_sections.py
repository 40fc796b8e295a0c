"""Measures one section of benchmarks/card.py.

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.card_sections matmul \\
      --out rows.jsonl --seconds 100

A kernel that a chip cannot run may end its process, so each section has its own process, and each
row is written as soon as it is measured. If a contender fails, the row's `failed` has the reason,
and the others are raced without it.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import quantize, step
from benchmarks.matmul import bf16_matmul
from benchmarks.operands import Operands, shapes, tops
from benchmarks.tables import CHIP, last, read
from benchmarks.timing import Contender, contender, provenance, race, reason
from sbjax.attention import attention, length_for
from sbjax.models.sizes import SIZES
from sbjax.ops.device import compute_capability, target
from sbjax.ops.matmul import scaled_matmul
from sbjax.ops.registry import NAMES, Backend, get_backend
from sbjax.quantize import INT8, Spec
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.step import make_init
from train.task import model_flops

ROW, TENSOR = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")
STEP_SIZE, SMALLEST_BATCH = "B/16", 8
STEPPERS = ("flax", "switchback", "full")  # Of benchmarks/step.py.
Cases = Iterator[tuple[str, Callable[[], dict]]]  # A case's name, and a function to measure it.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("section", choices=SECTIONS)
  parser.add_argument("--out", required=True)
  parser.add_argument("--seconds", type=float, required=True, help="No case is begun after that.")
  parser.add_argument("--tiny", action="store_true", help="Tiny sizes, on a CPU too.")
  parser.add_argument("--backend", choices=NAMES, help="default: the best that runs here")
  args = parser.parse_args()
  started = time.monotonic()
  with Path(args.out).open("w") as file:

    def emit(line: dict) -> None:
      file.write(json.dumps(line) + "\n")
      file.flush()

    device = jax.devices()[0]
    if device.platform == "cpu" and not args.tiny:
      emit({"refused": f"a GPU or a TPU is needed, and JAX's device here is {device.platform!r}"})
      sys.exit(3)
    ops, lacking = choose_backend(args.backend)
    emit({"device": describe(device) | {"backend": ops.name, "lacking": lacking}})
    run(SECTIONS[args.section](ops, args.tiny), emit, args.seconds - (time.monotonic() - started))


def run(cases: Cases, emit, seconds: float) -> None:
  """Emits a row for each case, until the time left is shorter than the longest case took."""
  started, longest = time.monotonic(), 0.0
  for name, measure in cases:
    begun = time.monotonic()
    if begun - started + longest >= seconds:
      emit({"case": name, "failed": {"case": "left out: no time was left"}})
      continue
    try:
      row = measure()
    except Exception as error:  # From any layer: the next case may work.
      row = {"failed": {"case": reason(error)}}
    emit({"case": name} | row)
    longest = max(longest, time.monotonic() - begun)


def choose_backend(name: str | None = None) -> tuple[Backend, dict[str, str]]:
  """The named backend, or the first of Mosaic, Triton, XLA that runs; why earlier ones do not."""
  if name is not None:
    return get_backend(name), {}
  lacking = {}
  for name in ("mosaic", "triton"):
    try:
      return get_backend(name), lacking
    except NotImplementedError as error:
      lacking[name] = str(error)
  return get_backend("xla"), lacking


def describe(device) -> dict:
  limit, said = memory_limit(device), provenance()
  said.pop("command")  # The card names its own command.
  return said | {
    "compute_capability": compute_capability(target()),
    "memory_gigabytes": round(limit / 1e9, 1) if limit else None,
  }


def memory_limit(device) -> int | None:
  """The bytes of device memory that JAX may use, or None if unknown."""
  return (device.memory_stats() or {}).get("bytes_limit")


def timed(
  candidates: dict[str, tuple[Callable, list]], rounds: int = 5, seconds: float = 0.006
) -> tuple[dict[str, Contender], dict[str, str]]:
  """Races the functions on their input sets; also returns why those that failed did."""
  built, failed = {}, {}
  for name, (function, sets) in candidates.items():
    try:
      one = contender(function, sets)
      jax.block_until_ready(one.call(one.sets))
      built[name] = one
    except Exception as error:
      failed[name] = reason(error)
  race(list(built.values()), rounds=rounds, seconds=seconds)
  return built, failed


def milliseconds(built: dict[str, Contender]) -> dict[str, float]:
  return {name: round(one.seconds * 1e3, 4) for name, one in built.items()}


def matmuls(ops: Backend, tiny: bool) -> Cases:
  """Every matmul of CLIP's linear layers, for a few numbers of tokens and widths."""
  groups = [(64, 32)] if tiny else [(16384, 1280), (65536, 1280), (16384, 768), (16384, 4096)]
  operands = Operands(INT8, elements=2**24 if tiny else 2**29)
  for m, width in groups:
    for n, k in list(shapes((width,)))[: 2 if tiny else None]:
      yield f"{m} x {n} x {k}", functools.partial(matmul, operands, ops, m, n, k, tiny)


def matmul(operands: Operands, ops: Backend, m: int, n: int, k: int, tiny: bool) -> dict:
  sets = operands.sets(m, n, k, megabytes=1e-3 if tiny else 200)
  wide = [(lhs.values.astype(jnp.bfloat16), rhs.values.astype(jnp.bfloat16)) for lhs, rhs in sets]
  built, failed = timed(
    {
      "xla_bf16": (bf16_matmul, wide),
      "xla_int8": (lambda lhs, rhs: scaled_matmul(lhs, rhs, jnp.bfloat16), sets),
      "ours_int8": (lambda lhs, rhs: ops.scaled_matmul(lhs, rhs, jnp.bfloat16), sets),
    }
  )
  row = {
    "m": m,
    "n": n,
    "k": k,
    "tops": {name: float(f"{tops(m, n, k, one.seconds):.4g}") for name, one in built.items()},
    "milliseconds": milliseconds(built),
    "failed": failed,
  }
  if {"xla_int8", "ours_int8"} <= set(built):
    ours, xla = (built[name].call(sets)[0] for name in ("ours_int8", "xla_int8"))
    row["equal_to_xla_int8"] = bool((ours == xla).all())
  return row


def quantizers(ops: Backend, tiny: bool) -> Cases:
  """Activations of several widths, and a weight in both layouts."""
  rows, widths = (64, (32,)) if tiny else (65536, (1280, 768, 4096))
  cases = [("quantize", ROW, rows, width, jnp.bfloat16, 3) for width in widths]
  cases += [("quantize", TENSOR, rows, widths[0], jnp.bfloat16, 5)]
  cases += [("quantize_both", TENSOR, widths[0], 4 * widths[0], jnp.float32, 10)]
  for operation, spec, rows, width, dtype, bytes_each in cases:
    name = f"{operation} {spec.scaling} {rows} x {width}"
    arguments = (ops, operation, spec, rows, width, dtype, bytes_each, tiny)
    yield name, functools.partial(quantizer, *arguments)


def quantizer(ops, operation, spec, rows, width, dtype, bytes_each, tiny) -> dict:
  """bytes_each: the fewest bytes that must be read and written for an element."""
  sets = quantize.operands(rows, width, dtype, megabytes=0 if tiny else 400)
  functions = quantize.candidates(ops, operation, spec)
  built, failed = timed({name: (function, sets) for name, function in functions.items()})
  seconds = {name: one.seconds for name, one in built.items()}
  rates = quantize.terabytes(seconds, rows * width, bytes_each, dtype)
  return {
    **quantize.described(operation, spec, rows, width, dtype),
    "milliseconds": milliseconds(built),
    "terabytes_per_second": {name: float(f"{rate:.4g}") for name, rate in rates.items()},
    "failed": failed,
  }


def attentions(ops: Backend, tiny: bool) -> Cases:
  """Attention of image and text towers, forward and backward."""
  del ops
  shapes_BLHD = {"H/14 image": (64, 257, 16, 80), "B/16 image": (256, 197, 12, 64)}
  shapes_BLHD |= {"B/16 text": (256, 77, 8, 64)}
  if tiny:
    shapes_BLHD = {"tiny text": (2, 9, 2, 16)}
  for name, shape in shapes_BLHD.items():
    yield name, functools.partial(attend, shape, causal=name.endswith("text"))


def attend(shape, causal: bool) -> dict:
  batch, length, heads, head_dim = shape
  padded = length_for(length, jnp.dtype(jnp.bfloat16), head_dim)
  key = jax.random.key(0)
  q, k, v, dy = jax.random.normal(key, (4, batch, padded, heads, head_dim), jnp.bfloat16)

  def ours(q, k, v, dy):
    y, backward = jax.vjp(lambda *qkv: attention(*qkv, causal=causal, length=length), q, k, v)
    return y, backward(dy)

  def plain(q, k, v, dy):
    run = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
    y, backward = jax.vjp(run, *(x[:, :length] for x in (q, k, v)))
    return y, backward(dy[:, :length])

  sets = [(q, k, v, dy)]
  built, failed = timed({"xla": (plain, sets), "ours": (ours, sets)})
  sizes = {"batch": batch, "length": length, "heads": heads, "head_dim": head_dim}
  return sizes | {"causal": causal, "milliseconds": milliseconds(built), "failed": failed}


def steps(ops: Backend, tiny: bool) -> Cases:
  """A training step at the result files' batch size, halved until it fits into memory."""
  named = None if ops.name == get_backend().name else ops.name
  size = "tiny" if tiny else STEP_SIZE
  batch_size, remat = (SMALLEST_BATCH, "none") if tiny else step.CASES[size]
  if not tiny and (limit := memory_limit(jax.devices()[0])):
    (known,) = (row for row in last(read("step"), "chip", "size")
                if (row["chip"], row["size"]) == (CHIP, size))  # fmt: skip
    largest = max(one["peak_gigabytes"] for one in known["contenders"].values()) * 1e9
    while batch_size > SMALLEST_BATCH and largest * batch_size / known["batch_size"] > 0.9 * limit:
      batch_size //= 2
  yield f"ViT-{size}", functools.partial(fitting_step, size, batch_size, remat, named)


def fitting_step(size: str, batch_size: int, remat: str, backend: str | None = None) -> dict:
  """A step's row; halves the batch while memory is too small."""
  while True:
    try:
      return train_step(size, batch_size, remat, backend)
    except Exception as error:
      if not is_out_of_memory(error) or batch_size <= SMALLEST_BATCH:
        raise
      print(f"{size}: {batch_size} images do not fit: {reason(error)}", flush=True)
    batch_size //= 2


def is_out_of_memory(error: Exception) -> bool:
  said = str(error).lower()
  return isinstance(error, MemoryError) or "resource_exhausted" in said or "out of memory" in said


def train_step(
  size: str, batch_size: int, remat: str, backend: str | None = None, rounds: int = 3
) -> dict:
  config, device = SIZES[size], jax.devices()[0]
  optimizer, _ = make_optimizer(OptimizerConfig(), steps=20_000)
  batch, state, compiled, found, failed = step.draw(config, batch_size), None, {}, {}, {}
  for name in STEPPERS:
    task = step.task_of(name, config, remat, backend)
    try:
      if state is None:
        state = jax.jit(make_init(task, optimizer, seed=0))()
      compiled[name], found[name] = step.compiled(task, optimizer, state, batch)
    except Exception as error:
      if is_out_of_memory(error):
        raise
      failed[name] = reason(error)
      continue
    peak, limit = found[name]["peak_gigabytes"] * 1e9, memory_limit(device)
    if limit and peak > limit:
      raise MemoryError(f"{name} needs {peak / 1e9:.1f} of {limit / 1e9:.1f} GB")
  times, _, _ = step.race(compiled, state, batch, rounds)
  flops, base = model_flops(config, batch_size), times.get("flax")
  for name, each in times.items():
    speedup = round(statistics.median(base) / statistics.median(each), 3) if base else None
    found[name] |= step.rates(each, batch_size, flops) | {"speedup": speedup}
  return {
    "size": size,
    "batch_size": batch_size,
    "remat": remat,
    "model_teraflops": round(flops / 1e12, 2),
    "contenders": found,
    "failed": failed,
  }


SECTIONS = {
  "matmul": matmuls,
  "quantize": quantizers,
  "attention": attentions,
  "step": steps,
}

if __name__ == "__main__":
  main()
