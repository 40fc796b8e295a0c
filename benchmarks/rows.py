"""Do norms, GELU, gated units and the operations fused with them run at the speed of memory?

  python -m benchmarks.rows

Reports bytes read and written a second, forward and backward, at the widths of CLIP's blocks, next
to a device copy and XLA's definition in the same run. Only the kernels' own time counts: some
kernels write in place, and XLA copies their operands here, which it would not do in a model. Adds
lines to the results.
"""

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_seconds
from benchmarks.timing import append, contender, parser_of, provenance
from sbjax.ops.registry import get_backend
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.quantize import INT8, Spec

WIDTHS = (512, 768, 1024, 1280, 1664)  # Of norms; those of GELU and GLU are four times these.
ROW = Spec(INT8, "rowwise")
# name: (function of a backend, layer norm parameters and operands; operands; bytes an element).
OPERATIONS = {
  "norm_quantize": (lambda ops, norm, x: ops.norm_quantize(x, norm, ROW), 1, 3),
  "norm_backward": (lambda ops, norm, x, dn, dx: ops.norm_backward(x, norm, dn, dx), 3, 10),
  "norm_quantize, rms": (lambda ops, n, x: ops.norm_quantize(x, rms(n), ROW), 1, 3),
  "norm_backward, rms": (lambda ops, n, x, dn, dx: ops.norm_backward(x, rms(n), dn, dx), 3, 10),
  "quantize_sum": (lambda ops, n, dy: ops.quantize_sum((dy,), ROW)[1:], 1, 3),
  "quantize_sum, q k v": (lambda ops, n, *dys: ops.quantize_sum(dys, ROW), 3, 15),
  "quantize_sum, fold": (lambda ops, n, dy: ops.quantize_sum((dy,), ROW, fold=n.scale)[1:], 1, 3),
  "gelu_quantize": (lambda ops, n, h: ops.gelu_quantize(h, ROW, None)[0], 1, 3),
  "gelu_quantize, h kept": (lambda ops, n, h: ops.gelu_quantize(h, ROW, ROW), 1, 4),
  "gelu_backward": (lambda ops, n, h, dg: ops.gelu_backward(h, dg, ROW), 2, 9),
  "gelu_backward, fold": (lambda ops, n, h, dg: ops.gelu_backward(h, dg, ROW, fold=n.scale), 2, 9),
  "glu_quantize": (lambda ops, n, gate, up: ops.glu_quantize(gate, up, ROW)[0], 2, 5),
  "glu_backward": (lambda ops, n, gate, up, dg: ops.glu_backward(gate, up, dg, ROW), 3, 14),
}


def rms(norm: LayerNormParams) -> RMSNormParams:
  return RMSNormParams(norm.scale)


def width_of(operation: str, width: int) -> int:
  """The width of an operation's rows in a block of that width."""
  return 4 * width if operation.startswith("g") else width


def main() -> None:
  parser = parser_of(__doc__, "rows")
  parser.add_argument("--rows", type=int, default=65536)
  parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
  args = parser.parse_args()
  for operation in OPERATIONS:
    for width in args.widths:
      line = measure(operation, args.rows, width_of(operation, width))
      shown = {key: line[key] for key in ("operation", "width", "milliseconds", "of_copy")}
      print(*shown.values(), flush=True)
      append(args.out, [line | provenance()])


def measure(operation: str, rows: int, width: int) -> dict:
  run, operands, bytes_each = OPERATIONS[operation]
  count = max(2, round(400e6 / (rows * width * 2 * operands)))
  norm = LayerNormParams(jnp.full((width,), 1.5), jnp.full((width,), 0.5))
  keys = [jax.random.split(jax.random.key(i), operands) for i in range(count)]
  sets = [tuple(jax.random.normal(k, (rows, width), jnp.bfloat16) for k in own) for own in keys]
  contenders = {"copy": contender(lambda x, *_: jnp.copy(x), sets)}
  for name, backend in (("xla", "xla"), ("ours", None)):
    ops = get_backend(backend)
    contenders[name] = contender(lambda *arrays, ops=ops: run(ops, norm, *arrays), sets)
  copies = "(?i)copy|memcpy"  # XLA's copies of operands.
  seconds = {
    name: kernel_seconds(one, ignored=None if name == "copy" else copies)
    for name, one in contenders.items()
  }
  size = rows * width
  moved = {"copy": 4 * size, "xla": bytes_each * size, "ours": bytes_each * size}
  rates = {name: moved[name] / seconds[name] / 1e12 for name in contenders}
  return {
    "benchmark": "rows",
    "operation": operation,
    "rows": rows,
    "width": width,
    "bytes_an_element": bytes_each,
    "terabytes_per_second": {name: round(rate, 3) for name, rate in rates.items()},
    "milliseconds": {name: round(time * 1e3, 4) for name, time in seconds.items()},
    "of_copy": round(rates["ours"] / rates["copy"], 3),
    "data": "standard normal",
  }


if __name__ == "__main__":
  main()
