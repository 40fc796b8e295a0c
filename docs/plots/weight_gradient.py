"""Makes docs/images/weight_gradient.png: why SwitchBack keeps the weight gradient in 16 bits.

  python docs/plots/weight_gradient.py

The relative error of a matmul that sums over K, in int8 with one scale for each row and in
bfloat16, for K from the width of a layer to the tokens of a batch. Random data, seconds on a CPU.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from sbjax import INT8, Spec, quantize, scaled_matmul

IMAGE = Path(__file__).parent.parent / "images/weight_gradient.png"
ROWS = 128
LENGTHS = [2**power for power in range(8, 17)]
DRAWS = {
  "normal": jax.random.normal,
  "heavy-tailed (Student's t, 3 degrees)": lambda key, shape: jax.random.t(key, 3.0, shape),
}


def int8(lhs, rhs):
  spec = Spec(INT8, "rowwise")
  return scaled_matmul(quantize(lhs, spec), quantize(rhs, spec), jnp.float32)


def bfloat16(lhs, rhs):
  lhs, rhs = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (lhs, rhs))
  return lhs @ rhs.T


def error(matmul, draw, length):
  """The relative error of `matmul` for lhs and rhs [ROWS, length]."""
  keys = jax.random.split(jax.random.key(0))
  lhs, rhs = (draw(key, (ROWS, length)) for key in keys)
  exact = lhs @ rhs.T
  return float(jnp.linalg.norm(matmul(lhs, rhs) - exact) / jnp.linalg.norm(exact))


def main():
  figure, axis = plt.subplots(figsize=(7, 4.2))
  for low, high, name in (
    (768, 8192, "y and dx sum over\na layer's width"),
    (16384, 65536, "dw sums over\nthe tokens"),
  ):
    axis.axvspan(low, high, color="gray", alpha=0.15, lw=0)
    axis.text((low * high) ** 0.5, 60, name, ha="center", va="top", fontsize=8)
  for matmul, marker in ((int8, "o"), (bfloat16, "s")):
    for (name, draw), line in zip(DRAWS.items(), ("--", "-"), strict=True):
      errors = [100 * error(matmul, draw, length) for length in LENGTHS]
      axis.loglog(LENGTHS, errors, marker + line, label=f"{matmul.__name__}, {name}")
      print(matmul.__name__, name, [f"{value:.2f}" for value in errors])
  axis.set_ylim(0.02, 80)
  axis.set_xscale("log", base=2)
  axis.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
  axis.set_xlabel("K, the length of the sum")
  axis.set_ylabel("relative error, %")
  axis.grid(alpha=0.3)
  axis.legend(fontsize=8, loc="lower left")
  figure.tight_layout()
  figure.savefig(IMAGE, dpi=100)


if __name__ == "__main__":
  main()
