"""How fast is sbjax on this chip, beside plain JAX, and beside the H200 of our result files?

  python -m benchmarks.card

Takes at most ten minutes on any GPU or TPU: matmuls, quantizers, attention, and a training step of
ViT-B/16. Prints a table and writes card_<chip>.json: CONTRIBUTING.md says where to send it, and
`python -m benchmarks.predict --card` reads it. Kernels are Mosaic's where they run, else Triton's.
--backend selects another backend and writes card_<chip>_<backend>.json.

Each section has a share of the time and its own process. If a section or a case fails, the table
and the file give the reason, and the rest goes on. `--tiny` runs everything in tiny sizes, on a CPU
too: a test, whose times mean nothing.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.tables import CHIP, cards, last, read
from train.parallel.xla_flags import for_tpu

SHARES = {"matmul": 0.3, "quantize": 0.12, "attention": 0.13, "step": 0.45}  # Of the time.
CASE = {  # The keys that identify a case of a section, in the result files too.
  "matmul": ("m", "n", "k"),
  "quantize": ("operation", "format", "scaling", "rows", "width", "dtype"),
  "attention": ("batch", "length", "heads", "head_dim", "causal"),
  "step": ("size",),
}
UNITS = {
  "matmul": "TOP/s",
  "quantize": "ms",
  "attention": "ms, forward and backward",
  "step": "images/s",
}
BACKENDS = ("xla", "mosaic", "triton")
PLAIN, OURS = ("flax", "flax_loop", "xla_bf16", "xla"), ("switchback", "ours_int8", "ours")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--minutes", type=float, default=10.0, help="At most.")
  parser.add_argument("--sections", nargs="+", default=list(SHARES), choices=SHARES)
  parser.add_argument("--folder", type=Path, default=Path("."), help="Where the file goes.")
  parser.add_argument("--tiny", action="store_true", help="Tiny sizes, on a CPU too: a test.")
  parser.add_argument("--backend", choices=BACKENDS, help="default: the best that runs here")
  args = parser.parse_args()
  command = " ".join(["python -m benchmarks.card", *sys.argv[1:]])
  card = {"benchmark": "card", "chip": None, "backend": args.backend, "command": command}
  card |= {"device": None, "sections": {}}
  ends, path = time.monotonic() + 60 * args.minutes, None
  for i, name in enumerate(args.sections):
    rest = sum(SHARES[other] for other in args.sections[i:])
    seconds = (ends - time.monotonic()) * SHARES[name] / rest
    print(f"{name}: up to {seconds:.0f} s", flush=True)
    command = [sys.executable, "-m", "benchmarks.card_sections", name]
    command += ["--backend", args.backend] if args.backend else []
    found = run_section(command + ["--tiny"] * args.tiny, seconds)
    device = found.pop("device", None)
    if refused := found.pop("refused", None):
      sys.exit(f"No card was made: {refused}; --tiny runs everything in tiny sizes anywhere.")
    if device and not card["device"]:
      card |= {"chip": device["chip"], "device": device}
      print(in_words(device), flush=True)
    card["sections"][name] = found
    print("\n".join(table(name, found)), flush=True)
    if card["chip"]:
      named = f"_{args.backend}" if args.backend else ""
      path = args.folder / f"card_{slug(card['chip'])}{named}.json"
      path.write_text(json.dumps(card, indent=1) + "\n")
  if path is None:
    sys.exit(
      "No card was made: no section came as far as naming the device; the reasons are above."
    )
  print(f"\nWrote {path}. CONTRIBUTING.md says where to send it.")


def run_section(command: list[str], seconds: float) -> dict:
  """Runs a section's process; returns the rows that it wrote before the end, and what failed."""
  started = time.monotonic()
  flags = os.environ.get("XLA_FLAGS", "")
  environment = os.environ | {
    "XLA_FLAGS": flags if for_tpu() else f"{flags} --xla_gpu_enable_triton_gemm=false".strip(),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"),
  }
  with tempfile.TemporaryDirectory() as folder:
    out, said = Path(folder) / "rows.jsonl", Path(folder) / "stderr"
    command = [*command, "--out", str(out), "--seconds", f"{0.85 * seconds:.0f}"]
    with said.open("w") as errors:
      process = subprocess.Popen(
        command, env=environment, stderr=errors, cwd=Path(__file__).parent.parent
      )
      try:
        code = process.wait(timeout=max(seconds, 0.1))
      except subprocess.TimeoutExpired:
        code = None
      finally:
        process.kill()
        process.wait()
    lines = out.read_text().splitlines() if out.exists() else []
    complaint = said.read_text(errors="replace")
  found = {"rows": [], "seconds": round(time.monotonic() - started, 1)}
  for line in lines:
    try:
      row = json.loads(line)
    except json.JSONDecodeError:  # The end of the process cut this line off.
      continue
    if "case" in row:
      found["rows"].append(row)
    else:
      found |= row
  if code is None:
    found["failed"] = f"stopped after {seconds:.0f} s; the rows are those it had"
  elif code and "refused" not in found:
    found["failed"] = ended_with(code, complaint)
  return found


def ended_with(code: int, complaint: str) -> str:
  """The signal or the exit status, and the last error that was printed."""
  how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
  lines = [line.strip() for line in complaint.splitlines() if line.strip()]
  errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
  return f"{how}: {(errors or lines or ['it said nothing'])[-1][:300]}"


def table(section: str, found: dict) -> list[str]:
  """A line for each case: plain JAX, sbjax and its gain on this chip, then on the H200."""
  lines = [
    f"\n{section}, {UNITS[section]}",
    f"{'':34} {'plain JAX':>10} {'sbjax':>10} {'gain':>6}   {CHIP}: {'plain JAX':>10} {'sbjax':>10}"
    f" {'gain':>6}",
  ]
  known = reference(section)
  for row in found["rows"]:
    theirs = known.get(case(section, row))
    here = "{:>10} {:>10} {:>6}".format(*shown(section, row))
    there = "{:>10} {:>10} {:>6}".format(*shown(section, theirs or {}))
    lines.append(f"{named(row):34} {here}   {'':{len(CHIP)}}  {there}")
    lines += [f"  {name}: {why}" for name, why in row.get("failed", {}).items()]
    if row.get("equal_to_xla_int8") is False:
      lines.append("  WRONG: the int8 product is not that of XLA")
    if theirs and row.get("batch_size") != theirs.get("batch_size"):
      lines.append(f"  (the {CHIP} had {theirs['batch_size']} images a batch)")
  if not found["rows"] and "failed" not in found:
    lines.append("  no rows")
  if "failed" in found:
    lines.append(f"  FAILED: {found['failed']}")
  return lines


def named(row: dict) -> str:
  return f"{row['case']}, {row['batch_size']} images" if "batch_size" in row else row["case"]


def shown(section: str, row: dict) -> tuple[str, str, str]:
  """Plain JAX's figure, ours, and our speedup; "-" if one is missing."""
  figures = figures_of(section, row)
  plain, ours = (next((figures[n] for n in names if n in figures), None) for names in (PLAIN, OURS))
  gain = None
  if plain and ours:
    gain = plain / ours if UNITS[section].startswith("ms") else ours / plain
  texts = ("-" if one is None else f"{one:,.4g}" for one in (plain, ours))
  return *texts, "-" if gain is None else f"{gain:.2f}x"


def figures_of(section: str, row: dict) -> dict[str, float]:
  """The figures by contender, in the section's unit."""
  if section == "matmul":
    return row.get("tops", {})
  if section == "step":
    return {n: one["images_per_second"] for n, one in row.get("contenders", {}).items()
            if "images_per_second" in one}  # fmt: skip
  return row.get("milliseconds", {})


def case(section: str, row: dict) -> tuple:
  return tuple(row.get(key) for key in CASE[section])


def reference(section: str) -> dict[tuple, dict]:
  """The H200's last row of each case: from the result files, or from cards if they have none."""
  rows = cards(section) + (read(section) if section != "attention" else [])
  rows = [row for row in rows if row["chip"] == CHIP and all(key in row for key in CASE[section])]
  return {case(section, row): row for row in last(rows, *CASE[section])}


def in_words(device: dict) -> str:
  memory, capability = device["memory_gigabytes"], device["compute_capability"]
  text = f"{device['chip']}," + (f" compute capability {capability}," if capability else "")
  text += f" {memory} GB for JAX," if memory else ""
  text += f" jax {device['jax']}; sbjax's backend is {device['backend']!r}"
  return text + "".join(f"\n  (not {name!r}: {why})" for name, why in device["lacking"].items())


def slug(chip: str) -> str:
  """The chip's name in a file name: NVIDIA A100-SXM4-80GB is a100-sxm4-80gb."""
  return re.sub(r"[^a-z0-9]+", "-", chip.removeprefix("NVIDIA ").lower()).strip("-")


if __name__ == "__main__":
  main()
