"""How many seconds of training does an accuracy take?

  python -m benchmarks.speedrun --folder=/tmp/speedrun

Draws the scenes of a track once, trains its entries with the same seeds one after the other, scores
each run, and adds a row for it to results/speedrun.jsonl. Runs that a row is there for are not made
again. The track "cpu" is for two cores; "b16", a ViT-B/16 on a GPU, needs open_clip_torch. The
rules are in docs/speedrun.md.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

# This process draws the scenes; those that train need a GPU's memory.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

from benchmarks.speedrun import data, runs, table
from benchmarks.speedrun.tracks import TRACKS
from benchmarks.tables import read_file
from benchmarks.timing import append, parser_of, provenance


def main(arguments: Sequence[str] | None = None) -> None:
  parser = parser_of(__doc__, "speedrun")
  parser.add_argument("--track", default="cpu", choices=TRACKS)
  parser.add_argument("--folder", type=Path, required=True, help="of the data and the runs")
  parser.add_argument("--entries", nargs="+", help="by default all of the track")
  parser.add_argument("--seeds", type=int, nargs="+", default=[0])
  parser.add_argument("--seconds", type=float, default=1800, help="that a run may take")
  args = parser.parse_args(arguments)
  track = TRACKS[args.track]
  names = args.entries or list(track.entries)
  if unknown := [name for name in names if name not in track.entries]:
    parser.error(f"--entries {unknown[0]!r} is none of {', '.join(track.entries)}")
  rows = read_file(Path(args.out)) if Path(args.out).is_file() else []
  rows = [row for row in rows if row["track"] == args.track]
  there = {(row["entry"], row["words"], row["seed"]) for row in rows}
  described = data.write(track, args.folder / args.track)
  for seed in args.seeds:
    for name in names:
      entry = track.entries[name]
      if (name, entry.words, seed) in there:
        continue
      row = {"benchmark": "speedrun", "track": args.track, "entry": name, **entry._asdict()}
      workdir = args.folder / args.track / f"{name.replace(' ', '_')}-{seed}"
      try:
        row |= runs.run(track, entry, args.folder / args.track, workdir, seed, args.seconds)
        row["reached"] = row["acc1"] >= track.target
      except runs.Failed as error:
        row |= {"seed": seed, "error": str(error), "reached": False}
      row |= {"target": track.target, "data": described} | provenance()
      append(args.out, [row])
      rows.append(row)
      print(json.dumps({k: row.get(k) for k in ("entry", "seed", "seconds", "acc1", "error")}))
  print("\n".join(table.of(rows)))


if __name__ == "__main__":
  main()
