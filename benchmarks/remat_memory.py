"""How much memory does a step take with each remat policy, and which policy fits which card?

  python -m benchmarks.remat_memory

Compiles the step of benchmarks/step.py's contender "switchback" for an H200 that may be absent, for
each row of CASES, with one policy of `remat="auto"` after the other until the smallest card holds
it. Needs JAX's CUDA plugin (`pip install -e '.[train,test,aot]'`), and minutes for each policy.
Adds a line for each row to the results: the GB of the arguments, and of what is temporary.
"""

import jax
from jax.sharding import PartitionSpec as P

from benchmarks import absent_gpu, step
from benchmarks.remat_report import CARDS, fits
from benchmarks.timing import append, parser_of, provenance
from sbjax.models import SIZES
from train.config import OptimizerConfig
from train.memory import SAVED
from train.optimizer import make_optimizer
from train.step import make_init

CASES = {  # Size: images a batch.
  "B/32": (1024,),
  "B/16": (512, 1024),
  "L/14": (256, 512),
  "H/14": (256,),
  "bigG/14": (128,),
}


def main() -> None:
  parser = parser_of(__doc__, "remat_memory")
  parser.add_argument("--sizes", nargs="+", default=list(CASES), choices=CASES)
  args = parser.parse_args()
  for size in args.sizes:
    for batch_size in CASES[size]:
      row = {"benchmark": "remat_memory", "size": size, "batch_size": batch_size}
      row |= {"recipe": "switchback", "compiled_for": "NVIDIA H200", "gigabytes": {}}
      for policy in SAVED:
        found = row["gigabytes"][policy] = gigabytes(size, batch_size, policy)
        print(f"{size:8} {batch_size:5} {policy:15} {sum(found):6.1f} GB {found}", flush=True)
        if all(fits(sum(found), card) for card, _ in CARDS.values()):
          break
      append(args.out, [row | provenance()])


def gigabytes(size: str, batch_size: int, policy: str) -> list[float]:
  """Of the arguments, and of what is temporary."""
  with absent_gpu.mesh(90, (1,), ("data",)) as mesh:
    task = step.task_of("switchback", SIZES[size], policy)
    optimizer, _ = make_optimizer(OptimizerConfig(), steps=20_000)
    state = jax.eval_shape(make_init(task, optimizer, seed=0))
    batch = jax.eval_shape(lambda: step.draw(SIZES[size], batch_size))
    state, batch = jax.tree.map(
      lambda x: absent_gpu.argument(mesh, x.shape, x.dtype, P()), (state, batch)
    )
    _, found = step.compiled(task, optimizer, state, batch)
  peak, temporary = found["peak_gigabytes"], found["temporary_gigabytes"]
  return [round(peak - temporary, 2), temporary]


if __name__ == "__main__":
  main()
