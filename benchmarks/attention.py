"""Is attention at CLIP's lengths faster by our kernels than by cuDNN, and as exact?

  python -m benchmarks.attention
  python -m benchmarks.attention --tune --cases "L/14 image"

Times the kernels of each backend, forward and backward, in one run on the same normal data, beside
PyTorch's attention and tokamax's where they are installed. cuDNN gets an even number of tokens, as
JAX needs it. Errors are in norm, relative to float64. Adds lines to the results. --tune times
kernels in other configs instead, and adds no lines.
"""

import argparse
import functools
import itertools
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import kernel_seconds
from benchmarks.timing import append, contender, provenance
from sbjax.attention import attention, length_for
from sbjax.backends import get_backend

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
}
FEW = 2  # Examples whose error is measured.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/attention.jsonl")
  parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument("--tune", action="store_true")
  args = parser.parse_args()
  for name in args.cases:
    if args.tune:
      tune(*CASES[name])
      continue
    row = {"benchmark": "attention", "case": name} | measure(*CASES[name])
    print(name, row["milliseconds"], row["errors"], flush=True)
    append(args.out, [row | provenance()])


def measure(batch: int, length: int, heads: int, head_dim: int, causal: bool) -> dict:
  """Milliseconds of kernels and errors, each forward and backward, of each contender."""
  qkvd = draw(batch, length, heads, head_dim)
  exact = reference([x[:FEW] for x in qkvd], causal)
  times, errors = {}, {}
  for backend in ("cudnn", "triton"):
    tokens = length_for(length, jnp.dtype(jnp.bfloat16), head_dim, backend)
    padded = tuple(jnp.pad(x, ((0, 0), (0, tokens - length), (0, 0), (0, 0))) for x in qkvd)
    run = functools.partial(attention, causal=causal, length=length, backend=backend)
    both = contender(functools.partial(value_and_gradients, run), [padded])
    forward = kernel_seconds(contender(lambda q, k, v, do, run=run: run(q, k, v), [padded]))
    times[backend] = forward, kernel_seconds(both)
    (results,) = both.call(both.sets)
    errors[backend] = [error(x[:FEW, :length], e) for x, e in zip(results, exact, strict=True)]
  for name, run in rivals(causal).items():
    try:
      times[name], results = run(qkvd)
    except (RuntimeError, NotImplementedError, ValueError) as refusal:
      print(f"{name}: {str(refusal).splitlines()[0][:80]}")
      continue
    errors[name] = [error(x[:FEW], e) for x, e in zip(results, exact, strict=True)]
  pairs = length * (length + 1) / 2 if causal else length**2
  return {
    **{"batch": batch, "length": length, "heads": heads, "head_dim": head_dim, "causal": causal},
    "milliseconds": {name: [round(t * 1e3, 4) for t in both] for name, both in times.items()},
    "errors": {name: [float(f"{e:.2e}") for e in found] for name, found in errors.items()},
    # Two products forward, five backward.
    "gflop": [round(2 * n * batch * heads * head_dim * pairs / 1e9, 1) for n in (2, 7)],
    "data": "standard normal",
  }


def tune(batch: int, length: int, heads: int, head_dim: int, causal: bool) -> None:
  """Prints the kernels' times in several configs, the fastest last."""
  from sbjax.pallas import attention_triton as kernels

  ops = get_backend("triton")
  *qkv, do = (x[:, :, None] for x in draw(batch, length, heads, head_dim))
  options, do = {"causal": causal, "length": length}, do[:, :, 0]
  o, lse = ops.attention_forward(*qkv, **options)
  directions = {
    "forward": (kernels.attention_forward, tuple(qkv), (64, 128), (64, 128, 256), (1,)),
    "backward": (kernels.attention_backward, (o, lse, do, *qkv), (64, 128), (32, 64, 128), (1, 2)),
  }
  for direction, (kernel, arrays, blocks_q, blocks_k, parts) in directions.items():
    configs = [kernels.Config(*c) for c in itertools.product(blocks_q, blocks_k, (4, 8), parts)]

    def compiled(config, kernel=kernel, arrays=arrays):
      try:
        return contender(functools.partial(kernel, **options, config=config), [arrays])
      except Exception as failure:  # Too little shared memory.
        print(config, str(failure).splitlines()[0][:80])

    with futures.ThreadPoolExecutor() as pool:
      programs = dict(zip(configs, pool.map(compiled, configs), strict=True))
    found = {config: kernel_seconds(one) for config, one in programs.items() if one}
    for config in sorted(found, key=lambda c: -found[c]):
      print(f"{direction} {found[config] * 1e3:.4f} ms {config}", flush=True)


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


def rivals(causal: bool) -> dict:
  """What else is installed: name -> function of q, k, v, do to ((seconds, seconds), results)."""
  found = {}
  try:
    import tokamax  # pyright: ignore[reportMissingImports]

    run = functools.partial(
      tokamax.dot_product_attention, is_causal=causal, implementation="mosaic_gpu"
    )
    found["tokamax"] = functools.partial(by_jax, run)
  except ImportError:
    pass
  try:
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend  # pyright: ignore[reportMissingImports]

    if torch.cuda.is_available():
      kinds = {"cuDNN": "CUDNN", "flash": "FLASH", "efficient": "EFFICIENT"}
      for name, kind in kinds.items():
        backend = getattr(SDPBackend, f"{kind}_ATTENTION")
        found[f"torch {name}"] = functools.partial(by_torch, backend, causal)
  except ImportError:
    pass
  return found


def by_jax(run, qkvd):
  both = contender(functools.partial(value_and_gradients, run), [qkvd])
  forward = kernel_seconds(contender(lambda q, k, v, do: run(q, k, v), [qkvd]))
  return (forward, kernel_seconds(both)), both.call(both.sets)[0]


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
    return times, [x.transpose(1, 2).float().cpu().numpy() for x in both()]


if __name__ == "__main__":
  main()
