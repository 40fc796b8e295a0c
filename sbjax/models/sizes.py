"""The architectures of CLIP models: two towers and the width of their shared embedding space."""

import dataclasses

from sbjax.ops.rows import GELUS, NORM_EPSILON

IMAGE_POOLS = ("class", "average", "map")
TEXT_POOLS = ("eot", "last")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
  """A vision transformer.

  pool: "class", the features are those of the class token; "average", the patches' mean; "map",
    SigLIP's tower: no class token, a bias of the patch embedding, pooling by attention, and no
    projection.
  pre_norm: a layer norm before the blocks (never with "map").
  activation: of the MLPs, one of sbjax.ops.rows.GELUS.
  norm_epsilon: of all layer norms.
  """

  image_size: int = 224
  patch_size: int
  width: int
  layers: int
  heads: int
  mlp_ratio: float = 4.0
  activation: str = "gelu"
  norm_epsilon: float = NORM_EPSILON
  pool: str = "class"
  pre_norm: bool = True

  def __post_init__(self):
    _check_divides("width", self.width, "heads", self.heads)
    _check_among("activation", self.activation, GELUS)
    _check_among("pool", self.pool, IMAGE_POOLS)
    if self.pool == "map" and self.pre_norm:
      raise ValueError("pool='map' (SigLIP) needs pre_norm=False.")
    if self.pool != "map":  # SigLIP's so400m has patches of 14 pixels, and leaves out 6 of 384.
      _check_divides("image_size", self.image_size, "patch_size", self.patch_size)

  @property
  def patches(self) -> int:
    return (self.image_size // self.patch_size) ** 2

  @property
  def tokens(self) -> int:
    """The patches, and the class token where there is one."""
    return self.patches + (self.pool != "map")

  @property
  def mlp_width(self) -> int:
    return int(self.width * self.mlp_ratio)


def kept_patches(patches: int, dropout: float) -> int:
  """How many of an image's patches a training step keeps."""
  return max(1, int(patches * (1 - dropout)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
  """A transformer over tokens.

  pool: "eot", the features are those of the end token; "last", those of the last position.
  eot_id: the end token, at its first place; of a text without it the first position counts, as in
    transformers. None: the largest id of the text, as in open_clip and OpenAI's CLIP, however many
    rows the table of tokens has.
  causal: a token sees only those before it.
  projection: "matrix", "linear" (a matrix and a bias) or "none".
  activation, norm_epsilon: as in VisionConfig.
  """

  context_length: int = 77
  vocab_size: int = 49408
  width: int
  layers: int
  heads: int
  mlp_ratio: float = 4.0
  eot_id: int | None = None
  activation: str = "gelu"
  norm_epsilon: float = NORM_EPSILON
  pool: str = "eot"
  causal: bool = True
  projection: str = "matrix"

  def __post_init__(self):
    _check_divides("width", self.width, "heads", self.heads)
    _check_among("activation", self.activation, GELUS)
    _check_among("pool", self.pool, TEXT_POOLS)
    _check_among("projection", self.projection, ("matrix", "linear", "none"))
    if not 0 <= self.end_id < self.vocab_size:
      raise ValueError(f"eot_id={self.eot_id} must be below vocab_size={self.vocab_size}.")

  @property
  def end_id(self) -> int:
    """The end token of a table without further rows."""
    return self.vocab_size - 1 if self.eot_id is None else self.eot_id

  @property
  def ignores_padding(self) -> bool:
    """Whether the features do not depend on what comes behind a text's end token."""
    return self.causal and self.pool == "eot"

  @property
  def mlp_width(self) -> int:
    return int(self.width * self.mlp_ratio)


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
  embed_dim: int
  vision: VisionConfig
  text: TextConfig

  def __post_init__(self):
    for tower, width, projects in (
      ("vision", self.vision.width, self.vision.pool != "map"),
      ("text", self.text.width, self.text.projection != "none"),
    ):
      if not projects and width != self.embed_dim:
        raise ValueError(f"Without a projection {tower} {width=} must be {self.embed_dim=}.")


def _check_among(name: str, value: str, known: tuple[str, ...]) -> None:
  if value not in known:
    raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}.")


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
  if value % divisor:
    raise ValueError(f"{name}={value} must be a multiple of {divisor_name}={divisor}.")


# "tiny", "tiny-siglip" and "Ti/16" are ours, for small machines; all others are open_clip's.
SIZES = {
  "tiny": CLIPConfig(
    64,
    VisionConfig(image_size=32, patch_size=8, width=128, layers=3, heads=4),
    TextConfig(context_length=24, vocab_size=1024, width=64, layers=2, heads=2, eot_id=1),
  ),
  "tiny-siglip": CLIPConfig(
    128,
    VisionConfig(
      image_size=32,
      patch_size=8,
      width=128,
      layers=3,
      heads=4,
      activation="gelu_tanh",
      norm_epsilon=1e-6,
      pool="map",
      pre_norm=False,
    ),
    TextConfig(
      context_length=24,
      vocab_size=1024,
      width=64,
      layers=2,
      heads=2,
      activation="gelu_tanh",
      norm_epsilon=1e-6,
      pool="last",
      causal=False,
      projection="linear",
    ),
  ),
  "Ti/16": CLIPConfig(
    192,
    VisionConfig(patch_size=16, width=192, layers=12, heads=3),
    TextConfig(width=192, layers=6, heads=3),
  ),
  "S/16": CLIPConfig(
    384,
    VisionConfig(patch_size=16, width=384, layers=12, heads=6),
    TextConfig(width=384, layers=12, heads=6),
  ),
  "B/32": CLIPConfig(
    512,
    VisionConfig(patch_size=32, width=768, layers=12, heads=12),
    TextConfig(width=512, layers=12, heads=8),
  ),
  "B/16": CLIPConfig(
    512,
    VisionConfig(patch_size=16, width=768, layers=12, heads=12),
    TextConfig(width=512, layers=12, heads=8),
  ),
  "L/14": CLIPConfig(
    768,
    VisionConfig(patch_size=14, width=1024, layers=24, heads=16),
    TextConfig(width=768, layers=12, heads=12),
  ),
  "H/14": CLIPConfig(
    1024,
    VisionConfig(patch_size=14, width=1280, layers=32, heads=16),
    TextConfig(width=1024, layers=24, heads=16),
  ),
  "bigG/14": CLIPConfig(
    1280,
    VisionConfig(patch_size=14, width=1664, layers=48, heads=16, mlp_ratio=4.9231),
    TextConfig(width=1280, layers=32, heads=20),
  ),
}


def open_clip_name(size: str) -> str:
  """open_clip's name of a key of SIZES: "ViT-B-32" for "B/32"; another name as it is."""
  return f"ViT-{size.replace('/', '-')}" if size in SIZES and "/" in size else size
