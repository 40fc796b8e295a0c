"""Is the 8-bit matmul faster than XLA's, and how near is it to the chip's peak?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.matmul

Times every forward and dgrad matmul of CLIP's linear layers, including the scales. `xla_int8` is
the definition, compiled by XLA with cuBLAS for the product. `xla_int8_triton` is XLA's own Triton
kernel, autotuned, with the scales in a form that XLA fuses. It is slow to compile, so it needs
--triton_gemm. With small tiles it may be wrong, so its error is recorded. Our int8 results are
compared with xla_int8's bit for bit, and our fp8 results with a float32 product (`fp8_error`),
since a tensor core keeps fewer bits of a sum. Small matmuls take a few microseconds, as long as a
launch, so their lines also have the kernels' own time. Adds a line for each shape to the results.
"""

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_race
from benchmarks.operands import DISTRIBUTION, WIDTHS, Operands, shapes, tops
from benchmarks.timing import TRITON_GEMM, append, contender, parser_of, provenance, race
from sbjax.ops.matmul import scaled_matmul
from sbjax.ops.registry import get_backend
from sbjax.pallas.sm90.scaled_matmul import MANY_ROWS
from sbjax.quantize import E4M3, INT8


def main() -> None:
  parser = parser_of(__doc__, "matmul")
  parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536, 131072])
  parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
  parser.add_argument("--triton_gemm", action="store_true", help="Race XLA's Triton kernels too.")
  parser.add_argument("--triton", action="store_true", help="Race our Triton kernel too.")
  args = parser.parse_args()
  int8, fp8 = Operands(INT8), Operands(E4M3)
  ceiling = measure(int8, fp8, 32768, 8192, 8192, "ceiling")["tops"]["ours_int8"]
  for m in args.tokens:
    for (n, k), layer in shapes(args.widths).items():
      row = measure(int8, fp8, m, n, k, layer, args.triton_gemm, args.triton)
      row |= {"int8_ceiling": ceiling}
      append(args.out, [row | provenance()])
      rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tops"].items())
      # Truncation errors of a tensor core over K random products grow with the root of K.
      is_near = row["fp8_error"] <= 2**-7 * max(1, (k / 4096) ** 0.5)
      equal = "equal" if row["equal_to_xla_int8"] and is_near else "NOT EQUAL"
      print(f"{m:6} x {n:5} x {k:5} {layer:15} {rates}  {equal}", flush=True)


def measure(int8, fp8, m, n, k, layer, triton_gemm=False, triton=False) -> dict:
  sets = int8.sets(m, n, k)
  wide = [(lhs.values.astype(jnp.bfloat16), rhs.values.astype(jnp.bfloat16)) for lhs, rhs in sets]
  fp8_sets = fp8.sets(m, n, k)
  ours = get_backend(None).scaled_matmul
  cublas = {TRITON_GEMM: False}
  contenders = {
    "xla_bf16": contender(bf16_matmul, wide, **cublas),
    "xla_int8": contender(lambda a, b: scaled_matmul(a, b, jnp.bfloat16), sets, **cublas),
    "ours_int8": contender(lambda a, b: ours(a, b, jnp.bfloat16), sets),
    "ours_fp8": contender(lambda a, b: ours(a, b, jnp.bfloat16), fp8_sets),
  }
  if triton_gemm:
    contenders["xla_int8_triton"] = contender(fusible_int8_matmul, sets, **{TRITON_GEMM: True})
  if triton:
    theirs = get_backend("triton").scaled_matmul
    contenders["triton_int8"] = contender(lambda a, b: theirs(a, b, jnp.bfloat16), sets)
  equal = bool((first(contenders["ours_int8"]) == first(contenders["xla_int8"])).all())
  race(list(contenders.values()), rounds=5, seconds=0.006)
  line = {
    "benchmark": "matmul",
    "layer": layer,
    "m": m,
    "n": n,
    "k": k,
    "tops": {name: round(tops(m, n, k, one.seconds), 1) for name, one in contenders.items()},
    "spread": {name: one.spread for name, one in contenders.items()},
    "equal_to_xla_int8": equal,
    "fp8_error": error(first(contenders["ours_fp8"]), *fp8_sets[0]),
    "data": DISTRIBUTION,
  }
  if triton_gemm:
    line["xla_int8_triton_error"] = error(first(contenders["xla_int8_triton"]), *sets[0])
  if m <= MANY_ROWS:
    seconds = zip(contenders, kernel_race(list(contenders.values())), strict=True)
    line["kernel_microseconds"] = {name: round(1e6 * time, 2) for name, time in seconds}
  return line


def bf16_matmul(lhs, rhs):
  return jax.lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())))


def fusible_int8_matmul(lhs, rhs):
  """Multiplies by one scale after the other: XLA's Triton kernel fuses this, not their product."""
  total = jax.lax.dot_general(
    lhs.values, rhs.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
  )
  return (total.astype(jnp.float32) * lhs.scale * rhs.scale.T).astype(jnp.bfloat16)


def error(y, lhs, rhs, rows: int = 256) -> float:
  """The largest error in the first rows, relative to their largest value; bfloat16's is 2^-9."""

  @jax.jit
  def largest(y, lhs, rhs):
    a, b = lhs.values[:rows].astype(jnp.float32), rhs.values.astype(jnp.float32)
    exact = jnp.dot(a, b.T, precision="highest") * lhs.scale[:rows] * rhs.scale.T
    return jnp.abs(y[:rows].astype(jnp.float32) - exact).max() / jnp.abs(exact).max()

  return round(float(largest(y, lhs, rhs)), 5)


def first(one):
  return one.call(one.sets)[0]


if __name__ == "__main__":
  main()
