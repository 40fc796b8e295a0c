"""What the files of one sample say, for imports and for evaluation: its image, captions and label.

A sample is {ending: content}, as `tar_shards.samples` reads it; the ending is all after the first
dot of a file's name, in lower case. In place of a content that cannot be read is the reason.
"""

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from train.data import decode
from train.data.decode import Limits

IMAGES = ("jpg", "jpeg", "png", "webp", "avif", "gif", "bmp", "tif", "tiff")  # The first counts.
OUT_OF_RANGE = "label out of range"
READ = (*IMAGES, "txt", "json", "cls")


class Unusable(Exception):
  """A sample cannot be used.

  `reason` is the same for all samples with the same problem, `detail` is for this one.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(reason, detail)
    self.reason, self.detail = reason, detail

  def __str__(self) -> str:
    return f"{self.reason} ({self.detail})" if self.detail else self.reason


Files = Mapping[str, bytes | Unusable]


def image(files: Files) -> bytes:
  """The encoded image.

  Raises:
    Unusable: there is none.
  """
  ending = next((ending for ending in IMAGES if ending in files), None)
  if ending is None:
    raise Unusable("no image", _there(files))
  return _content(files, ending)


def check_image(content: bytes, limits: Limits) -> None:
  """Raises Unusable for an image that is beyond the limits or cannot be decoded."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Pillow warns of odd metadata, which does not matter here.
      decode.upright(content, limits)
  except MemoryError:
    raise  # An error of the machine, not of the image.
  except Exception as error:  # Each of Pillow's decoders has its own errors.
    raise undecodable(error) from error


def undecodable(error: BaseException) -> Unusable:
  """What a sample is whose image raised an error as it was decoded."""
  if isinstance(error, decode.BeyondLimits):
    return Unusable(f"image with {error}")
  return Unusable("undecodable image")


class Wanted(NamedTuple):
  """The texts that a sample must have.

  Where both captions and labels are wanted, a sample may lack its label; in a split to evaluate,
  its captions.
  """

  captions: bool
  caption_key: str
  num_classes: int | None  # Labels are less; None: labels are left out.
  trains: bool  # whether the split is the one to train on


class Texts(NamedTuple):
  captions: list[str]
  source: str  # of the captions; "": there are none
  label: int | None  # -1: the sample has none; None: no label is wanted


def texts(files: Files, wanted: Wanted) -> Texts:
  """The captions and the label of a sample.

  Raises:
    Unusable: one that is wanted is missing or wrong.
  """
  found, source, number = [], "", None
  both = wanted.captions and wanted.num_classes is not None
  if wanted.captions and (
    wanted.trains or not both or "cls" not in files or {"txt", "json"} & set(files)
  ):
    found, source = captions(files, wanted.caption_key)
  if both and "cls" not in files:
    number = -1
  elif wanted.num_classes is not None:
    number = label(files)
    if not 0 <= number < wanted.num_classes:
      raise Unusable(OUT_OF_RANGE, str(number))
  return Texts(found, source, number)


def captions(files: Files, key: str = "") -> tuple[list[str], str]:
  """The captions, and where they are from: "txt", or the key of the json.

  key: of the json's captions, a text or a list of texts. "": those of the txt, a caption a line;
    if it has none, those of the json at "captions" or "caption".

  Raises:
    Unusable: there is none, or it is no text.
  """
  source, texts = "txt", []
  if not key and "txt" in files:
    texts = lines(_content(files, "txt"))
  if not texts and "json" in files:
    source, texts = _captions_of_json(_content(files, "json"), key)
  if not texts:
    raise Unusable("no caption", f"json without {key!r}" if key else _there(files))
  if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
    raise Unusable("unreadable text")  # JSON can escape half a character, which UTF-8 lacks.
  return texts, source


def _captions_of_json(content: bytes, key: str) -> tuple[str, list[str]]:
  try:
    fields = json.loads(content.decode("utf-8-sig"))
    source = key or next((k for k in ("captions", "caption") if fields.get(k)), "caption")
    texts = fields.get(source) or []
  except (ValueError, RecursionError, AttributeError) as error:
    raise Unusable("unreadable text") from error
  texts = [texts] if isinstance(texts, str) else texts
  if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
    raise Unusable("unreadable text")
  return f"json's {source}", [text.strip() for text in texts if text.strip()]


def label(files: Files) -> int:
  """The number in the cls. Labels count from 0.

  Raises:
    Unusable: there is no cls, or it holds something else.
  """
  if "cls" not in files:
    raise Unusable("no label", _there(files))
  text = "\n".join(lines(_content(files, "cls")))
  try:
    if not text.removeprefix("-").isdecimal():
      raise ValueError(text)
    return int(text)  # Raises for thousands of digits.
  except ValueError as error:
    raise Unusable("unreadable label", f"{text[:20]!r}") from error


def lines(content: bytes) -> list[str]:
  """The lines of a text that are not empty. Unicode's further line ends may be in a line.

  Raises:
    Unusable: it is not UTF-8.
  """
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise Unusable("unreadable text") from error
  found = text.replace("\r", "\n").split("\n")
  return [line.strip() for line in found if line.strip()]


def wanted(with_captions: bool, with_labels: bool) -> str:
  """The files that a sample must have, in words."""
  words = [f"an image ({', '.join(IMAGES)})"]
  words += ["a caption (txt or json)"] * with_captions + ["a cls"] * with_labels
  return " and ".join(words)


def _content(files: Files, ending: str) -> bytes:
  content = files[ending]
  if isinstance(content, Unusable):
    raise content
  return content


def _there(files: Iterable[str]) -> str:
  return f"it has {', '.join(list(files)[:5])}" if files else "it has no file"
