"""What a speedrun trains on, to which accuracy, and the entries that race.

An entry changes how its track is trained; what it reaches is scored by one program.
"""

from typing import NamedTuple


class Entry(NamedTuple):
  """A way to train.

  words: what the table says of it.
  changes: fields of the Config, in the form of the command line, without `--config.`.
  program: "sbjax", "flax" (the same, with blocks of plain Flax layers) or "open_clip".
  steps: those that reach the target, found by trying; 0: the track's.
  """

  words: str
  changes: tuple[str, ...] = ()
  program: str = "sbjax"
  steps: int = 0


class Track(NamedTuple):
  """A data set of drawn scenes, a model and a target.

  scenes: the variant that is drawn (docs/scenes.md).
  shards, each: of the training data, and the images in each, JPEGs of this `quality`.
  classes: images that are scored, each with one object.
  target: the accuracy (acc1) that the mean of an entry's runs has to reach.
  """

  scenes: str
  image_size: int
  shards: int
  each: int
  quality: int
  classes: int
  target: float
  batch_size: int
  steps: int
  changes: tuple[str, ...]
  entries: dict[str, Entry]

  @property
  def values(self) -> dict[str, str]:
    """The changed fields."""
    return dict(change.split("=") for change in self.changes)


_FEWER = ("model.stages=64px until 0.5, 96px drop 0.5 until 0.9, 128px",)
_HALF = ("model.stages=128px drop 0.5 until 0.9, 128px", "data.workers=16", "compile_ahead=False")
_FULL = ("model.recipe=full", "model.text_groups=1", "optimizer.name=adamw")

TRACKS = {
  "b16": Track(
    scenes="scenes",
    image_size=128,
    shards=100,
    each=4096,
    quality=80,  # 95 has more than twice the bytes, and then loaders are what is timed
    classes=4000,
    target=0.43,
    batch_size=1024,
    steps=2400,
    changes=(
      "model.size=B/16",
      "data.tokenizer=clip",
      "data.workers=14",
      "optimizer.learning_rate=1e-3",
      "optimizer.warmup_steps=400",
      "log_every=50",
    ),
    entries={
      "open_clip": Entry("open_clip, compiled, bfloat16, AdamW", program="open_clip"),
      "flax": Entry("plain Flax, bfloat16, AdamW", _FULL, program="flax"),
      "8 bits": Entry("int8, StableAdamW, all tokens", ("model.text_groups=1",)),
      "fewer tokens": Entry("int8, StableAdamW, captions in groups, small images first", _FEWER),
      "muon": Entry(
        "int8, Muon, captions in groups, half of the patches, 900 steps",
        (*_HALF, "optimizer.name=muon", "optimizer.warmup_steps=150"),
        steps=900,
      ),
    },
  ),
  "cpu": Track(
    scenes="scenes/small",
    image_size=48,
    shards=8,
    each=2048,
    quality=95,
    classes=4000,
    target=0.04,
    batch_size=64,
    steps=1000,
    changes=(
      "model.size=tiny",
      "model.context_length=77",
      "model.dtype=float32",
      "model.recipe=full",
      "model.scan=False",
      "data.tokenizer=words",
      "data.streams=8",
      "optimizer.learning_rate=1e-3",
      "optimizer.warmup_steps=200",
      "optimizer.weight_decay=0.1",
      "log_every=50",
    ),
    entries={
      "all tokens": Entry("all tokens", ("model.text_groups=1",)),
      "fewer tokens": Entry(
        "captions in groups, small images first", ("model.stages=32px drop 0.5 until 0.9, 48px",)
      ),
    },
  ),
}
