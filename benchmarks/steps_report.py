"""README's table and plot of training steps; benchmarks/report.py writes them."""

import matplotlib.pyplot as plt

FLAX, OURS = ("flax", "flax_loop"), ("switchback", "switchback_loop")


def best(contenders: dict, names) -> dict:
  """The fastest of the named contenders that were measured."""
  measured = [contenders[name] for name in names if name in contenders]
  if not measured:
    raise SystemExit(f"The last line has none of {names}: {list(contenders)}. Measure it again.")
  return min(measured, key=lambda one: one["milliseconds"])


def case_of(row) -> tuple:
  return row["size"], row["remat"]


def short_table(steps: list[dict], open_clip: list[dict]) -> list[str]:
  """README's table: a line for each size, in the order of `steps`."""
  lines = [
    "| one training step | images | plain Flax, bf16 | `switchback` | over Flax | over open_clip |",
    "|---|---|---|---|---|---|",
  ]
  over = {case_of(row): row["milliseconds"] / row["sbjax"]["milliseconds"] for row in open_clip}
  for row in steps:
    flax, ours = (best(row["contenders"], names) for names in (FLAX, OURS))
    remat = ", remat" if row["remat"] == "block" else ""
    gain = f"{over[case_of(row)]:.2f}x" if case_of(row) in over else ""
    lines.append(
      f"| ViT-{row['size']}{remat} | {row['batch_size']} | {flax['milliseconds']:.0f} ms |"
      f" {ours['milliseconds']:.0f} ms | **{ours['speedup']:.2f}x** | {gain} |"
    )
  return lines


def texts_table(rows: list[dict]) -> list[str]:
  """Steps whose texts are in groups of some captions' lengths, over those of all positions."""
  lines = ["| model | images | all 77 positions | captions like | positions | step | ratio |"]
  lines.append("|---|---|---|---|---|---|---|")
  for row in rows:
    padded = row["contenders"]["switchback"]
    for name, captions in (("flickr8k", "Flickr8k's"), ("cc12m", "CC12M's")):
      ours = row["contenders"][f"switchback_{name}"]
      positions = sum(length * count for length, count in ours["text_groups"]) / row["batch_size"]
      lines.append(
        f"| ViT-{row['size']} | {row['batch_size']} | {padded['milliseconds']:.1f} ms |"
        f" {captions} | {positions:.1f} | {ours['milliseconds']:.1f} ms |"
        f" **{padded['milliseconds'] / ours['milliseconds']:.2f}x** |"
      )
  return lines


def open_clip_table(rows: list[dict]) -> list[str]:
  lines = [
    "| model | images | open_clip, compiled | sbjax, `switchback` | ratio | memory |",
    "|---|---|---|---|---|---|",
  ]
  for row in rows:
    ours = row["sbjax"]
    remat = ", every block rematerialised" if row["remat"] == "block" else ""
    memory = f"{row['gigabytes']}, {ours['gigabytes']} GB" if row["gigabytes"] else ""
    lines.append(
      f"| ViT-{row['size']}{remat} | {row['batch_size']} | {row['milliseconds']:.0f} ms |"
      f" {ours['milliseconds']:.0f} ms | **{row['milliseconds'] / ours['milliseconds']:.2f}x** |"
      f" {memory} |"
    )
  return lines


def plot(steps: list[dict], open_clip: list[dict], path) -> None:
  """Step times relative to plain Flax: a group for each model, a bar for each contender."""
  clip = {case_of(row): row["milliseconds"] for row in open_clip}
  bars = {"plain Flax, bf16": [], "open_clip, compiled, bf16": [], "sbjax, switchback": []}
  for row in steps:
    times = (
      best(row["contenders"], FLAX)["milliseconds"],
      clip.get(case_of(row)),
      best(row["contenders"], OURS)["milliseconds"],
    )
    for name, time in zip(bars, times, strict=True):
      bars[name].append((time, times[0]))
  figure, axis = plt.subplots(figsize=(8, 3.2))
  colors = ("tab:gray", "tab:orange", "tab:blue")
  for i, ((name, pairs), color) in enumerate(zip(bars.items(), colors, strict=True)):
    shown = [(n + 0.27 * (i - 1), *pair) for n, pair in enumerate(pairs) if pair[0] is not None]
    places, heights = [n for n, _, _ in shown], [time / flax for _, time, flax in shown]
    axis.bar(places, heights, 0.25, label=name, color=color)
    for place, time, flax in shown:
      axis.text(place, time / flax + 0.01, f"{time:.0f}", ha="center", fontsize=8)
  labels = [
    f"ViT-{row['size']}\n{row['batch_size']} images"
    + (", remat" if row["remat"] == "block" else "")
    for row in steps
  ]
  axis.set_xticks(range(len(steps)), labels, fontsize=9)
  axis.set_ylabel("time of a step, over plain Flax\n(milliseconds above the bars)", fontsize=9)
  axis.set_ylim(0, 1.15)
  axis.spines[["top", "right"]].set_visible(False)
  axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
  figure.tight_layout()
  figure.savefig(path, dpi=110)
