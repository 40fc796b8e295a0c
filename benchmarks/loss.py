"""How long does a contrastive loss take over a large batch, and how exact is it?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.loss [--devices 2]

Times forward and backward in tiles (tiled_loss.py), with two kinds of products, and plain
(train/loss.py), with the logits [B, B] in memory and products in float32. Adds a line to the
results with the errors relative to float64 at a batch of 2,048, and one for each batch and width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import Contender, append, parser_of, provenance, race
from train.loss import siglip, softmax_contrastive
from train.parallel import tiled_loss
from train.parallel.tiled_loss import tiled_siglip, tiled_softmax
from train.task import BF16_PEAK

LOSSES = {  # name: (plain loss, tiled loss, (scale, bias))
  "softmax": (softmax_contrastive, tiled_softmax, (100.0,)),
  "siglip": (siglip, tiled_siglip, (100.0, -20.0)),
}
CONTENDERS = {"tiled, float16": "float16", "tiled, bfloat16": "bfloat16", "plain": None}


def main() -> None:
  parser = parser_of(__doc__, "loss")
  parser.add_argument("--devices", type=int, default=1)
  parser.add_argument("--batches", type=int, nargs="+", default=[8192, 32768])
  parser.add_argument("--widths", type=int, nargs="+", default=[1024, 512])
  parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
  parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
  parser.add_argument("--small", type=int, default=2048, help="batch of the errors")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument(
    "--tile", type=int, nargs=2, metavar=("LOGITS", "COLUMNS"), help="of tiled_loss.TILE, COLUMNS"
  )
  args = parser.parse_args()
  if args.tile:
    tiled_loss.TILE, tiled_loss.COLUMNS = args.tile
  mesh = Mesh(np.array(jax.devices()[: args.devices]), ("data",))
  for name in args.losses:
    line = errors(name, mesh, args.small, args.widths[0], args.contenders)
    append(args.out, [line | provenance()])
    for width in args.widths:
      for batch in args.batches:
        line = measure(name, mesh, batch, width, args.contenders, args.rounds)
        append(args.out, [line | provenance()])


def with_gradients(name: str, mesh: Mesh, contender: str):
  """A function of features and scalars: ((loss, metrics), gradients), ready for jit."""
  plain, tiled, scalars = LOSSES[name]
  numbers, products = tuple(range(2 + len(scalars))), CONTENDERS[contender]
  if products is None:  # On several devices XLA inserts the gather.
    return jax.value_and_grad(plain, numbers, has_aux=True)
  axes = ("data",) if mesh.size > 1 else ()
  function = functools.partial(tiled, products=products, axes=axes)
  take = jax.value_and_grad(function, numbers, has_aux=True)

  def run(*arguments):
    result, (d_image, d_text, *shares) = take(*arguments)
    return result, (d_image, d_text, *(jax.lax.psum(x, axes) for x in shares))

  if not axes:
    return take
  specs = (P("data"), P("data"), *(P(),) * len(scalars))
  return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P(), specs), check_vma=False)


def measure(name: str, mesh: Mesh, batch: int, width: int, names: list[str], rounds: int) -> dict:
  """Milliseconds and gigabytes of each contender at one size."""
  arguments = draw(name, mesh, batch, width)
  raced, found = {}, {}
  for key in names:
    function = with_gradients(name, mesh, key)
    compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    found[key] = {
      "temporary_gigabytes": round(memory.temp_size_in_bytes / 1e9, 3),
      "features_gigabytes": round(
        (memory.argument_size_in_bytes + memory.output_size_in_bytes) / 1e9, 3
      ),
    }
    raced[key] = Contender(lambda sets, compiled=compiled: compiled(*sets[0]), [arguments])
  race(list(raced.values()), rounds=rounds, seconds=0.1)
  products = (3 if name == "siglip" else 4) * 3  # Of 16 bits, over all pairs.
  flops, peak = products * 2 * batch**2 * width, BF16_PEAK.get(jax.devices()[0].device_kind)
  for key, one in raced.items():
    found[key] |= {
      "milliseconds": round(one.seconds * 1e3, 3),
      "spread": one.spread,
    }
    if peak and CONTENDERS[key]:
      found[key]["of_16_bit_peak"] = round(flops / one.seconds / peak / mesh.size, 3)
    print(
      f"{name:8} B {batch:6} E {width:5} {mesh.size} x {key:16} {one.seconds * 1e3:9.2f} ms"
      f" {found[key]['temporary_gigabytes']:7.2f} GB beside the features",
      flush=True,
    )
  return {
    "benchmark": "loss",
    "loss": name,
    "batch": batch,
    "width": width,
    "devices": mesh.size,
    "contenders": found,
    "data": "normal features of unit length, own texts with a cosine of about 0.2",
  }


def errors(name: str, mesh: Mesh, batch: int, width: int, names: list[str]) -> dict:
  """The relative error of the loss, and of each gradient by norm, against float64."""
  arguments = draw(name, mesh, batch, width)
  loss, gradients = in_float64(name, *(np.asarray(x) for x in arguments))
  found = {}
  for key in names:
    (value, _), got = jax.jit(with_gradients(name, mesh, key))(*arguments)
    of = {"loss": abs(float(value) - loss) / loss}
    for argument, x, wanted in zip(
      ("image", "text", "scale", "bias"), got, gradients, strict=False
    ):
      of[argument] = np.linalg.norm(np.float64(x) - wanted) / np.linalg.norm(wanted)
    found[key] = {argument: float(f"{error:.3g}") for argument, error in of.items()}
    print(
      f"{name:8} B {batch:6} E {width:5} {mesh.size} x {key:16} errors {found[key]}", flush=True
    )
  return {
    "benchmark": "loss_errors",
    "loss": name,
    "batch": batch,
    "width": width,
    "devices": mesh.size,
    "relative_errors": found,
  }


def draw(name: str, mesh: Mesh, batch: int, width: int):
  def features(key):
    image, noise = jax.random.normal(key, (2, batch, width))
    text = 0.2 * image + noise
    return [x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (image, text)]

  rows = NamedSharding(mesh, P("data"))
  scalars = (jnp.float32(x) for x in LOSSES[name][2])
  image, text = jax.jit(features, out_shardings=[rows, rows])(jax.random.key(0))
  return image, text, *(jax.device_put(x, NamedSharding(mesh, P())) for x in scalars)


def in_float64(name: str, image, text, scale, bias=0.0):
  """The loss and its gradients in float64, by their formulas."""
  image, text, scale, bias = (np.float64(x) for x in (image, text, scale, bias))
  products, own = image @ text.T, np.eye(len(image))
  logits = scale * products + bias

  def softmax(axis):
    exp = np.exp(logits - logits.max(axis, keepdims=True))
    total = exp.sum(axis, keepdims=True)
    return exp / total, np.log(total) + logits.max(axis, keepdims=True)

  if name == "softmax":
    (p, rows), (q, columns) = softmax(1), softmax(0)
    loss = np.mean((rows[:, 0] + columns[0]) / 2 - np.diag(logits))
    g = (p + q - 2 * own) / 2
  else:
    sign = 2 * own - 1
    loss = np.logaddexp(0, -sign * logits).sum() / len(image)
    g = -sign / (1 + np.exp(sign * logits))
  g /= len(image)
  return loss, (scale * g @ text, scale * g.T @ image, np.sum(g * products), np.sum(g))


if __name__ == "__main__":
  main()
