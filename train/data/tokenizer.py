"""Turns text into token ids `[N, L]` with Hugging Face `tokenizers`.

A row is `<start> tokens <end> 0 0 ...` for all vocabularies. Truncation keeps the end token,
since a CLIP text tower pools at its first occurrence. `clip` gives open_clip's ids; `bpe` is
trained on the captions of the run; any other `tokenizer.json` is used unchanged.

A tower that reads the last position (SigLIP's) also reads what pads a row. With the vocabularies
of SigLIP's weights a row is theirs: `tokens <end> <pad> <pad> ...` of a text in lower case without
punctuation.
"""

import collections
import gzip
import html
import importlib.util
import itertools
import json
import pathlib
import string
from collections.abc import Callable, Iterable, Sequence

import ftfy
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.data.spiece import SUFFIX, read_spiece
from train.paths import local_path

_START, _END = "<start_of_text>", "<end_of_text>"
# Names of start and end tokens in other tokenizer.json files, most specific first.
_STARTS = (_START, "<|startoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "[CLS]")
_ENDS = (_END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# The end tokens of SigLIP's vocabularies and what pads a text: Gemma's (SigLIP 2), which also has
# "</s>", a tag of HTML; T5's and mT5's.
_SIGLIP_PADS = {"<eos>": "<pad>", "</s>": "</s>"}
# The tokenizers in the folders of published weights, in the order in which they are looked for.
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")

_CLIP_FILE = "bpe_simple_vocab_16e6.txt.gz"
_CLIP_MERGES = 48_894  # how many lines after the header CLIP uses
# A contraction, a word, a digit or a run of signs. The two code points reproduce IGNORECASE in
# open_clip: U+017F folds to s, and U+0345 is not a sign because it folds to a letter.
_CLIP_WORDS = r"'[s\x{17f}]|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}\x{345}]+"


# No cleaning or normalizer changes it.
_PLAIN_TEXT = "two brown dogs run on a beach and 3 children play football near red cars it is sunny"

# `_clean` but for broken encodings and HTML, as normalizers of tokenizer.json.
_CLEANING = [
  {"type": "NFC"},
  {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
  {"type": "Strip", "strip_left": True, "strip_right": True},
  {"type": "Lowercase"},
]
# The same of `_canonicalize`.
_CANONICALIZING = [
  {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
  {"type": "Replace", "pattern": {"Regex": r"[!-/:-@\[-`{-~]"}, "content": ""},
  *_CLEANING,
]


class Tokenizer:
  """Token ids of texts; `sot_id` is None if rows have no start token.

  `cleaning` is open_clip's name for how texts are cleaned: "lower", "canonicalize", or "" for none.
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer, pool: str = "eot"):
    """pool: the position that the text tower reads, `TextConfig.pool`."""
    self._tokenizer = tokenizer
    self.vocab_size: int = tokenizer.get_vocab_size()
    # Vocabularies with CLIP's special tokens need CLIP's cleaning; others have a normalizer.
    ours = tokenizer.token_to_id(_START) is not None
    siglip = pool == "last" and not ours and _first_id(tokenizer, (*_SIGLIP_PADS,)) is not None
    self.sot_id: int | None = None if siglip else _first_id(tokenizer, _STARTS)
    eot_id = _first_id(tokenizer, (*_SIGLIP_PADS,) if siglip else _ENDS)
    if eot_id is None:
      raise ValueError(f"The tokenizer has no end token: expected one of {', '.join(_ENDS)}.")
    self.eot_id: int = eot_id
    end, first = tokenizer.id_to_token(eot_id), tokenizer.id_to_token(0)
    self._pad = _SIGLIP_PADS[end] if siglip else first if first == "<pad>" else end
    # What follows the end token counts for nothing but in a tower that reads the last position.
    self.pad_id: int = tokenizer.token_to_id(self._pad) if pool == "last" else 0
    self.cleaning = "canonicalize" if siglip else "lower" if ours else ""
    self._clean = {"canonicalize": _canonicalize, "lower": _clean, "": str}[self.cleaning]

  def __call__(self, texts: Sequence[str], context_length: int) -> np.ndarray:
    """int32 `[len(texts), context_length]`, `pad_id` after the end token."""
    start = [] if self.sot_id is None else [self.sot_id]
    room = context_length - len(start) - 1
    if room < 1:
      raise ValueError(f"{context_length=} leaves no room for text: at least 3 is needed.")
    encodings = self._tokenizer.encode_batch(
      [self._clean(text) for text in texts], add_special_tokens=False
    )
    ids = np.full((len(texts), context_length), self.pad_id, np.int32)
    for row, encoding in zip(ids, encodings, strict=True):
      tokens = [*start, *encoding.ids[:room], self.eot_id]
      row[: len(tokens)] = tokens
    return ids

  def agrees_with(self, other: "Tokenizer") -> bool:
    """Whether both give plain words the same ids, as a model needs that was trained with one."""
    ours, theirs = (
      one._tokenizer.encode(_PLAIN_TEXT, add_special_tokens=False).ids for one in (self, other)
    )
    return ours == theirs

  def decode(self, ids: Iterable[int]) -> str:
    """The (cleaned) text of one row of ids."""
    text = itertools.takewhile(lambda i: i != self.eot_id, map(int, ids))
    return self._tokenizer.decode(list(text), skip_special_tokens=True).strip()

  def for_transformers(self, end_last: bool = False) -> tuple[dict, dict]:
    """The contents of tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer.

    A text gets its start and end token there too. transformers has no ftfy: texts with broken
    encoding or HTML are cleaned less than here.

    end_last: whether the end token and the largest id change places (`swap_ids`).

    Raises:
      ValueError: with `end_last`, the ids are places in a list of scores (Unigram).
    """
    tokenizer = json.loads(self._tokenizer.to_str())
    if self.cleaning:
      tokenizer["normalizer"] = self._normalizer(tokenizer["normalizer"])
    end = self._tokenizer.id_to_token(self.eot_id)
    start = None if self.sot_id is None else self._tokenizer.id_to_token(self.sot_id)
    ids = self._tokenizer.get_vocab()
    if end_last:
      swap = swap_ids(self.eot_id, self.vocab_size)
      vocab = tokenizer["model"]["vocab"]
      if not isinstance(vocab, dict):
        raise ValueError(
          f"transformers needs another id than {self.eot_id} for the end token, and a"
          f" {tokenizer['model']['type']} vocabulary has fixed ids; use --format=open_clip."
        )
      ids = {token: swap(i) for token, i in ids.items()}
      tokenizer["model"]["vocab"] = {token: swap(i) for token, i in vocab.items()}
      added = ({**each, "id": swap(each["id"])} for each in tokenizer["added_tokens"])
      tokenizer["added_tokens"] = sorted(added, key=lambda each: each["id"])
    tokens = [token for token in (start, end) if token is not None]
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    pieces.insert(len(pieces) - 1, {"Sequence": {"id": "A", "type_id": 0}})
    tokenizer["post_processor"] = {
      "type": "TemplateProcessing",
      "single": pieces,
      "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}],
      "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in tokens},
    }
    config = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      **({} if start is None else {"bos_token": start}),
      "eos_token": end,
      "pad_token": self._pad,
      "padding_side": "right",
      "clean_up_tokenization_spaces": False,
    }
    return tokenizer, config

  def _normalizer(self, own: dict | None) -> dict:
    """The cleaning as a normalizer of tokenizer.json, before the vocabulary's own."""
    cleaning = {"lower": _CLEANING, "canonicalize": _CANONICALIZING}[self.cleaning]
    return {"type": "Sequence", "normalizers": [*cleaning, *([] if own is None else [own])]}

  def to_json(self) -> str:
    """The contents of its tokenizer.json."""
    return self._tokenizer.to_str(pretty=True)

  def save(self, path: str | pathlib.Path) -> None:
    # Not `Tokenizer.save`: on a full disk it raises a bare Exception.
    pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")

  @classmethod
  def load(cls, path: str | pathlib.Path, pool: str = "eot") -> "Tokenizer":
    """The tokenizer of a `tokenizer.json`, saved here or elsewhere, or of a SentencePiece model."""
    if str(path).endswith(SUFFIX):
      return cls(read_spiece(path), pool)
    try:
      # Not `Tokenizer.from_file`: its errors name neither the file nor the problem.
      tokenizer = tokenizers.Tokenizer.from_str(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
      raise
    except Exception as error:  # `tokenizers` raises bare Exception.
      raise ValueError(
        f"{path} is not a tokenizer.json of Hugging Face tokenizers: {error}."
      ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return cls(tokenizer, pool)


def swap_ids(eot_id: int, vocab_size: int) -> Callable[[int], int]:
  """The function of an id by which the end token and the last id change places.

  transformers' CLIPModel reads the largest id of a text if the config has eos_token_id=2.
  """
  swapped = {eot_id: vocab_size - 1, vocab_size - 1: eot_id}
  return lambda i: swapped.get(i, i)


def make_tokenizer(
  spec: str, captions: Iterable[str] | None, vocab_size: int, pool: str = "eot"
) -> Tokenizer:
  """The tokenizer that a config names.

  Args:
    spec: "bpe" trains one on `captions`; "words" has a token for each of their words; "clip" takes
      the vocabulary of the installed open_clip; anything else is the path of a `tokenizer.json`, of
      CLIP's `bpe_simple_vocab_16e6.txt.gz` or of a SentencePiece model, `spiece.model`.
    captions: the training texts; read only for "bpe" and "words".
    vocab_size: the maximum number of tokens of a trained tokenizer.
    pool: the position that the text tower reads, `TextConfig.pool`.
  """
  if spec == "bpe":
    return Tokenizer(_train(captions, vocab_size), pool)
  if spec == "words":
    return Tokenizer(_words(captions, vocab_size), pool)
  if spec == "clip":
    return Tokenizer(_clip(_installed_clip_file()), pool)
  path = local_path(spec, "tokenizer")
  if not path.is_file():
    raise ValueError(
      f'No tokenizer {spec!r}: expected "bpe" or "words" (made from the captions), "clip", or a'
      f" file: a tokenizer.json of Hugging Face tokenizers, CLIP's {_CLIP_FILE}, or a SentencePiece"
      f" model (*{SUFFIX})."
    )
  return Tokenizer(_clip(path), pool) if spec.endswith(".gz") else Tokenizer.load(path, pool)


def tokenizer_beside(folder: pathlib.Path) -> pathlib.Path | None:
  """The tokenizer in a folder of weights; None if there is none."""
  return next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def _first_id(tokenizer: tokenizers.Tokenizer, names: Sequence[str]) -> int | None:
  ids = (tokenizer.token_to_id(name) for name in names)
  return next((i for i in ids if i is not None), None)


def _clean(text: str) -> str:
  """open_clip's cleaning: fix the encoding, unescape HTML twice, merge white space, lower case.

  In Python, since the normalizers of `tokenizers` treat a few characters differently: final sigma
  in lower case, and the separators U+001C to U+001F as white space.
  """
  return " ".join(_mended(text).split()).lower()


_WITHOUT_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))


def _canonicalize(text: str) -> str:
  """open_clip's cleaning for SigLIP, after big_vision: `_clean` without ASCII's punctuation."""
  return " ".join(_mended(text).translate(_WITHOUT_PUNCTUATION).lower().split())


def _mended(text: str) -> str:
  if text.isascii() and text.isprintable() and "&" not in text:
    return text  # There is nothing to mend, and ftfy takes longer to say so than a tokenizer.
  return html.unescape(html.unescape(ftfy.fix_text(text)))


def _clip(path: pathlib.Path) -> tokenizers.Tokenizer:
  """CLIP's BPE. Its tokens: 256 bytes, the same with "</w>", the merges, the start, the end."""
  with gzip.open(path, "rt", encoding="utf-8") as file:
    lines = file.read().split("\n")[1 : 1 + _CLIP_MERGES]
  merges = [tuple(line.split()) for line in lines]
  if len(merges) < _CLIP_MERGES or any(len(pair) != 2 for pair in merges):
    raise ValueError(f"{path} is not CLIP's {_CLIP_FILE}: expected {_CLIP_MERGES} merges.")
  # Sorted by the code points that stand for bytes: first the printable bytes, then the others.
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  names = [*alphabet, *(byte + "</w>" for byte in alphabet), *("".join(pair) for pair in merges)]
  vocab = {name: i for i, name in enumerate([*names, _START, _END])}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, end_of_word_suffix="</w>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_CLIP_WORDS), behavior="removed", invert=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  # First turns code points back into bytes, then "</w>" into a space. The BPE decoder would do only
  # the latter.
  tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " ")])
  tokenizer.add_special_tokens([_START, _END])
  return tokenizer


def _installed_clip_file() -> pathlib.Path:
  package = importlib.util.find_spec("open_clip")  # An import would load torch.
  if package is None or package.origin is None:
    raise ValueError(
      'tokenizer "clip" needs the vocabulary file of open_clip, which is not installed: '
      f"`pip install open_clip_torch`, or give the path of {_CLIP_FILE}."
    )
  return pathlib.Path(package.origin).parent / _CLIP_FILE


def _words(captions: Iterable[str] | None, vocab_size: int) -> tokenizers.Tokenizer:
  """A token for each of the most frequent words of the captions; another word is "<unk>".

  Words that are equally frequent stay in the order of their first appearance.
  """
  special = ["<pad>", _START, _END, "<unk>"]
  counts = collections.Counter(word for text in captions or () for word in _clean(text).split())
  if not counts:
    raise ValueError('tokenizer "words" is made of the captions, and there are none.')
  names = [*special, *(word for word, _ in counts.most_common(vocab_size - len(special)))]
  vocab = {name: i for i, name in enumerate(names)}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=special[-1]))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(special[:-1])
  return tokenizer


def _train(captions: Iterable[str] | None, vocab_size: int) -> tokenizers.Tokenizer:
  """Trains a byte-level BPE, which can encode every text. Id 0 is padding."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  special = ["<pad>", _START, _END]
  if vocab_size < len(alphabet) + len(special):
    raise ValueError(f"{vocab_size=} cannot hold 256 bytes and {len(special)} special tokens.")
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=special,
    initial_alphabet=alphabet,
    show_progress=False,
  )
  tokenizer.train_from_iterator((_clean(text) for text in captions or ()), trainer)
  if tokenizer.get_vocab_size() == len(alphabet) + len(special):
    raise ValueError('tokenizer "bpe" is trained on the captions, and there are none.')
  return tokenizer
