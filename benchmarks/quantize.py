"""Do the quantizers run at the speed of memory?

  python -m benchmarks.quantize

Reports bytes read and written a second, next to a device copy in the same run. The rates use the
kernels' own time: a kernel takes less than 0.1 ms, and gaps between launches are not its speed.
`milliseconds` is the time from call to call; lines without `kernel_milliseconds` have rates by that
time. `differing` counts results that differ from the definition on a CPU, where divisions are
exact. Adds lines to the results; docs/studies/mosaic_quantizer.md describes `mosaic` in older ones.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import kernel_race
from benchmarks.timing import append, contender, parser_of, provenance, race
from sbjax.ops.registry import get_backend
from sbjax.quantize import E4M3, INT8, Spec

WIDTHS = (768, 1024, 1280, 1664, 3072, 4096, 5120, 6656, 8192, 16384)
ROW = Spec(INT8, "rowwise")


def main() -> None:
  parser = parser_of(__doc__, "quantize")
  parser.add_argument("--rows", type=int, default=65536)
  args = parser.parse_args()
  tensor = Spec(INT8, "tensorwise")
  cases = [("quantize", ROW, args.rows, width, jnp.bfloat16, 3) for width in WIDTHS]
  cases += [("quantize", Spec(E4M3, "rowwise"), args.rows, 1280, jnp.bfloat16, 3)]
  cases += [("quantize", tensor, args.rows, 1280, jnp.bfloat16, 5)]
  cases += [("quantize_transposed", ROW, args.rows, 1280, jnp.bfloat16, 5)]
  for width in (768, 1280, 4096):  # The weight of fc1: both layouts, float32.
    cases += [("quantize_transposed", tensor, width, 4 * width, jnp.float32, 9)]
    cases += [("quantize_both", tensor, width, 4 * width, jnp.float32, 10)]
  for operation, spec, rows, width, dtype, bytes_each in cases:
    line = measure(operation, spec, rows, width, dtype, bytes_each)
    print(" ".join(f"{key}={value}" for key, value in line.items() if key != "data"), flush=True)
    append(args.out, [line | provenance()])


def measure(operation, spec, rows, width, dtype, bytes_each) -> dict:
  """bytes_each: the fewest bytes that must be read and written for an element."""
  functions = candidates(get_backend(None), operation, spec)
  sets = operands(rows, width, dtype)
  contenders = {name: contender(function, sets) for name, function in functions.items()}
  race(list(contenders.values()), rounds=7, seconds=0.006)
  seconds = dict(zip(contenders, kernel_race(list(contenders.values())), strict=True))
  rates = terabytes(seconds, rows * width, bytes_each, dtype)
  expected = on_cpu(getattr(get_backend("xla"), operation), *sets[0], spec)
  found = {name: one.call(sets)[0] for name, one in contenders.items() if name != "copy"}
  return {
    "benchmark": "quantize",
    **described(operation, spec, rows, width, dtype),
    "terabytes_per_second": {name: round(rate, 3) for name, rate in rates.items()},
    "milliseconds": {name: round(one.seconds * 1e3, 4) for name, one in contenders.items()},
    "kernel_milliseconds": {name: round(time * 1e3, 4) for name, time in seconds.items()},
    "of_copy": round(rates["ours"] / rates["copy"], 3),
    "differing": {name: differing(result, expected) for name, result in found.items()},
    "data": "standard normal",
  }


def candidates(ops, operation: str, spec: Spec) -> dict:
  """The operation by `ops` and by XLA, and a device copy: functions of x."""
  ours, xla = (getattr(one, operation) for one in (ops, get_backend("xla")))
  return {"copy": jnp.copy, "xla": lambda x: xla(x, spec), "ours": lambda x: ours(x, spec)}


def operands(rows: int, width: int, dtype, megabytes: int = 400) -> list:
  """At least two sets of x."""
  count = max(2, round(megabytes * 1e6 / (rows * width * jnp.dtype(dtype).itemsize)))
  return [(jax.random.normal(jax.random.key(i), (rows, width), dtype),) for i in range(count)]


def terabytes(seconds: dict[str, float], size: int, bytes_each: int, dtype) -> dict[str, float]:
  """10^12 bytes a second of `candidates`: a copy moves all elements twice."""
  copied = 2 * jnp.dtype(dtype).itemsize
  return {
    name: (copied if name == "copy" else bytes_each) * size / time / 1e12
    for name, time in seconds.items()
  }


def described(operation: str, spec: Spec, rows: int, width: int, dtype) -> dict:
  """A line's description of its case."""
  return {
    "operation": operation,
    "format": spec.dtype.name,
    "scaling": spec.scaling,
    "rows": rows,
    "width": width,
    "dtype": jnp.dtype(dtype).name,
  }


def on_cpu(operation, x, spec):
  with jax.default_device(jax.devices("cpu")[0]):
    return jax.jit(operation, static_argnums=1)(np.asarray(x), spec)


def differing(found, expected) -> int:
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in pairs)


if __name__ == "__main__":
  main()
