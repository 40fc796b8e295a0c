"""Is attention at CLIP's lengths faster by our kernels than by cuDNN, and as exact?

  python -m benchmarks.attention

Times the kernels of each backend, forward and backward, in one run on the same normal data, beside
PyTorch's attention where it is installed. cuDNN gets an even number of tokens, as JAX needs it.
Errors are in norm, relative to float64. Adds lines to the results.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import kernel_seconds
from benchmarks.tables import RESULTS
from benchmarks.timing import append, contender, provenance
from sbjax.attention import attention, length_for
from sbjax.ops.registry import runs

# Batch, tokens, heads, head size, causal: CLIP's towers, and image towers with half of the patches.
CASES = {
  "H/14 image": (256, 257, 16, 80, False),
  "L/14 image": (256, 257, 16, 64, False),
  "bigG/14 image": (128, 257, 16, 104, False),
  "B/16 image": (512, 197, 12, 64, False),
  "B/32 image": (1024, 50, 12, 64, False),
  "H/14 text": (256, 77, 16, 64, True),
  "L/14 text": (256, 77, 12, 64, True),
  "H/14 image, half": (256, 129, 16, 80, False),
  "L/14 image, half": (256, 129, 16, 64, False),
  "B/16 image, half": (512, 99, 12, 64, False),
  "B/32 image, half": (1024, 26, 12, 64, False),
  "SO400M image": (256, 256, 16, 72, False),
  "SO400M text": (256, 64, 16, 72, False),
}
# Between CLIP's lengths, for the choice of a backend.
LENGTHS = (50, 66, 81, 99, 129, 145, 161, 177, 197, 256, 257, 320, 384, 512)
HEAD_DIMS = (64, 80, 88, 96, 104, 128)
FEW = 2  # Examples whose error is measured.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", help="default: benchmarks/results/attention*.jsonl")
  parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument(
    "--lengths", nargs="*", type=int, help="these or LENGTHS instead, without PyTorch"
  )
  parser.add_argument("--head_dims", nargs="+", type=int, default=HEAD_DIMS, help="of --lengths")
  args = parser.parse_args()
  kind = "attention" if args.lengths is None else "attention_lengths"
  out = args.out or RESULTS / f"{kind}.jsonl"
  cases = {name: CASES[name] for name in args.cases}
  if args.lengths is not None:
    pairs = itertools.product(args.head_dims, args.lengths or LENGTHS)
    cases = {f"{n} tokens, {d}": (65_536 // n, n, 16, d, False) for d, n in pairs}
  rows = (measure(*case, check=args.lengths is None) for case in cases.values())
  if args.lengths is None:
    rows = list(rows)  # All of them first: PyTorch's profiler stops JAX's.
  for (name, case), row in zip(cases.items(), rows, strict=True):
    if args.lengths is None:
      measure_torch(row, *case)
    print(name, row["milliseconds"], row["errors"], flush=True)
    append(out, [{"benchmark": kind, "case": name} | row | provenance()])


def measure(batch, length, heads, head_dim, causal, check: bool = True) -> dict:
  """Milliseconds of kernels and errors, each forward and backward, of each contender."""
  qkvd = draw(batch, length, heads, head_dim)
  exact = reference([x[:FEW] for x in qkvd], causal) if check else []
  times, errors = {}, {}
  for name, (tokens, run) in contenders(length, head_dim, causal).items():
    padded = tuple(jnp.pad(x, ((0, 0), (0, tokens - length), (0, 0), (0, 0))) for x in qkvd)
    times[name], results = by_jax(run, padded)
    if check:
      results = [x[:FEW, :length] for x in results]
      errors[name] = [error(x, e) for x, e in zip(results, exact, strict=True)]
  pairs = length * (length + 1) / 2 if causal else length**2
  return {
    **{"batch": batch, "length": length, "heads": heads, "head_dim": head_dim, "causal": causal},
    "milliseconds": {name: milliseconds(both) for name, both in times.items()},
    "errors": {name: rounded(found) for name, found in errors.items()},
    # Two products forward, five backward.
    "gflop": [round(2 * n * batch * heads * head_dim * pairs / 1e9, 1) for n in (2, 7)],
    "data": "standard normal",
  }


def contenders(length: int, head_dim: int, causal: bool) -> dict:
  """By name, the tokens that attention by JAX takes here, and a function of q, k and v."""
  found = {}
  for name in ("cudnn", *(name for name in ("mosaic", "triton") if runs(name))):
    tokens = length_for(length, jnp.dtype(jnp.bfloat16), head_dim, name)
    run = functools.partial(attention, causal=causal, length=length, backend=name)
    if name == "cudnn" or supports(run, (1, tokens, 1, head_dim)):
      found[name] = tokens, run
  return found


def supports(run, shape) -> bool:
  """Whether our kernels take q, k and v of this shape."""
  try:
    jax.eval_shape(run, *[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3)
  except NotImplementedError:
    return False
  return True


def draw(batch, length, heads, head_dim):
  """q, k, v and the gradient of the output."""
  keys = jax.random.split(jax.random.key(0), 4)
  shape = (batch, length, heads, head_dim)
  return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)


def value_and_gradients(run, q, k, v, do):
  o, backward = jax.vjp(run, q, k, v)
  return o, *backward(do)


def reference(qkvd, causal) -> list[np.ndarray]:
  """The output and the gradients of q, k and v in float64."""
  q, k, v, do = (np.asarray(x).astype(np.float64).swapaxes(1, 2) for x in qkvd)
  scale = q.shape[-1] ** -0.5
  logits = q @ k.swapaxes(2, 3) * scale
  if causal:
    logits = np.where(np.tri(q.shape[2], dtype=bool), logits, -np.inf)
  p = np.exp(logits - logits.max(axis=3, keepdims=True))
  p /= p.sum(axis=3, keepdims=True)
  o = p @ v
  ds = p * (do @ v.swapaxes(2, 3) - np.sum(o * do, axis=3, keepdims=True)) * scale
  results = o, ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
  return [x.swapaxes(1, 2) for x in results]


def error(x, exact) -> float:
  return float(np.linalg.norm(np.asarray(x).astype(np.float64) - exact) / np.linalg.norm(exact))


def by_jax(run, qkvd):
  both = contender(functools.partial(value_and_gradients, run), [qkvd])
  forward = kernel_seconds(contender(lambda q, k, v, do: run(q, k, v), [qkvd]))
  return (forward, kernel_seconds(both)), both.call(both.sets)[0]


def measure_torch(row: dict, batch, length, heads, head_dim, causal) -> None:
  """Adds PyTorch's backends to a row, if it is installed."""
  try:
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend  # pyright: ignore[reportMissingImports]
  except ImportError:
    return
  if not torch.cuda.is_available():
    return
  qkvd = draw(batch, length, heads, head_dim)
  exact = reference([x[:FEW] for x in qkvd], causal)
  for name, kind in {"cuDNN": "CUDNN", "flash": "FLASH", "efficient": "EFFICIENT"}.items():
    backend = getattr(SDPBackend, f"{kind}_ATTENTION")
    try:
      times, results = by_torch(backend, causal, qkvd)
    except RuntimeError as refusal:
      print(f"torch {name}: {str(refusal).splitlines()[0][:80]}")
      continue
    row["milliseconds"][f"torch {name}"] = milliseconds(times)
    errors = [error(x[:FEW], e) for x, e in zip(results, exact, strict=True)]
    row["errors"][f"torch {name}"] = rounded(errors)


def by_torch(backend, causal, qkvd, calls: int = 10):
  import torch  # pyright: ignore[reportMissingImports]
  from torch.nn import functional  # pyright: ignore[reportMissingImports]
  from torch.nn.attention import sdpa_kernel  # pyright: ignore[reportMissingImports]

  *qkv, do = (torch.from_dlpack(x).transpose(1, 2) for x in qkvd)
  qkv = [x.detach().requires_grad_() for x in qkv]

  def seconds(run):
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
      for _ in range(calls):
        run()
      torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / calls / 1e6

  def forward():
    return functional.scaled_dot_product_attention(*qkv, is_causal=causal)

  def both():
    o = forward()
    return o, *torch.autograd.grad(o, qkv, do)

  with sdpa_kernel([backend]):
    times = seconds(forward), seconds(both)
    return times, [x[:FEW].detach().transpose(1, 2).float().cpu().numpy() for x in both()]


def milliseconds(seconds) -> list[float]:
  return [round(t * 1e3, 4) for t in seconds]


def rounded(errors) -> list[float]:
  return [float(f"{e:.2e}") for e in errors]


if __name__ == "__main__":
  main()
