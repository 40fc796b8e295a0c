"""How wide is FP8-CSCALE's window, the exponents of one constant scale with which a model trains?

  JAX_PLATFORMS=cpu python -m benchmarks.cscale_window --config=configs/quickstart.py \\
      --workdir=runs/cscale --config.optimizer.warmup_steps=20 --config.steps=200

Trains the config's model with the recipe "fp8_cscale:E" for each exponent (`--exponents`), with
"fp8_amax", which takes its scales from the data, and with "full". Perez et al. 2023
(https://arxiv.org/abs/2309.17224) find that CSCALE trains within a window of exponents only. All
see the same batches from the same parameters. `--seeds` and `--parity_steps` are those of
benchmarks/loss_parity.py. The data are the config's: drawn shapes, or with
--config=configs/flickr8k.py --config.data.root=FOLDER Flickr8k's photos. Adds a line for each
recipe to the results, and makes their plot; `--plot` trains nothing. Takes 10 minutes of a core.
"""

from pathlib import Path

import numpy as np
from absl import flags

from benchmarks.loss_parity import compared
from benchmarks.tables import RESULTS, last, read
from benchmarks.timing import append
from train import cli
from train.config import Config

_EXPONENTS = flags.DEFINE_list("exponents", [str(e) for e in range(-4, 17, 2)], "Those to try.")
_PLOT = flags.DEFINE_bool("plot", False, "Only make the plot from the results.")


def main(config: Config, workdir: Path) -> None:
  out = Path(flags.FLAGS.out)
  if not _PLOT.value:
    variants = ["full", "fp8_amax", *(f"fp8_cscale:{int(e)}" for e in _EXPONENTS.value)]
    for row in compared(config, workdir, variants, "cscale_window"):
      append(out, [{"benchmark": "cscale_window", **row}])
  plot(out)


def plot(out: Path) -> None:
  """The mean of the last quarter of losses, for each exponent; the others as horizontal lines."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  rows = last(read(str(out.resolve().with_suffix(""))), "variant")
  losses = {row["variant"]: float(np.mean(row["last_losses"])) for row in rows}
  window = sorted((int(name.partition(":")[2]), y) for name, y in losses.items() if ":" in name)
  figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
  axes.plot(*zip(*window, strict=True), marker="o", label="FP8-CSCALE")
  for name, style in (("fp8_amax", "--"), ("full", ":")):
    axes.axhline(losses[name], color="black", linestyle=style, linewidth=1, label=name)
  axes.set(xlabel="exponent of the constant scale", ylabel="loss, mean of the last quarter")
  axes.legend()
  figure.savefig(out.with_suffix(".png"), dpi=80)
  plt.close(figure)


if __name__ == "__main__":
  # Of the flags that benchmarks/loss_parity.py defines.
  flags.FLAGS.set_default("out", str(RESULTS / "cscale_window.jsonl"))
  flags.FLAGS.set_default("seeds", 1)
  flags.FLAGS.set_default("parity_steps", 150)
  cli.run(main)
