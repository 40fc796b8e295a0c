"""CLIP's vocabulary gives the ids of open_clip."""

import html
import importlib.util
import json
import os
import pathlib
import random
import tarfile
import unicodedata

import numpy as np
import pytest
from open_clip_case import import_open_clip
from tokenizer_case import NASTY

from train.data.tokenizer import Tokenizer, make_tokenizer

# open_clip 3.3.0's ids of some of the above, without start and end.
GOLDEN = {
  2: [585, 568, 847, 713, 649, 1200, 328, 1342, 889, 1896, 880, 2172, 262, 333, 262, 3341],
  6: [320, 261, 321, 283, 274, 257, 27706, 262, 3405],
  9: [26304, 26304, 48938, 4244, 964, 355, 21531, 43722, 1752],
  11: [257, 20795, 257, 262, 5808, 262, 959, 1224, 2005, 3797],
}


@pytest.fixture(scope="module")
def clip():
  if importlib.util.find_spec("open_clip") is None:
    pytest.skip("needs the `interop` extra: CLIP's vocabulary is open_clip's")
  return make_tokenizer("clip", None, 0)


@pytest.fixture(scope="module")
def open_clip_ids():
  reference = import_open_clip().get_tokenizer("ViT-B-32")
  return lambda texts, context_length: reference(texts, context_length).numpy()


@pytest.mark.parametrize("context_length", [77, 16, 4])
def test_clip_gives_the_ids_of_open_clip(clip, open_clip_ids, context_length):
  assert (clip.vocab_size, clip.sot_id, clip.eot_id) == (49408, 49406, 49407)
  np.testing.assert_array_equal(clip(NASTY, context_length), open_clip_ids(NASTY, context_length))


@pytest.mark.parametrize("i", GOLDEN)
def test_clip_gives_golden_ids(clip, i):
  row = clip([NASTY[i]], 77)[0]
  assert [int(token) for token in row if token][1:-1] == GOLDEN[i]


def test_clip_decodes_to_words(clip):
  assert clip.decode(clip(["A photo of  two Dogs, 12 ☃"], 20)[0]) == "a photo of two dogs , 1 2 ☃"


def test_clip_by_path_gives_the_same_ids(clip):
  installed = pathlib.Path(importlib.util.find_spec("open_clip").origin).parent
  by_path = make_tokenizer(str(installed / "bpe_simple_vocab_16e6.txt.gz"), None, 0)
  np.testing.assert_array_equal(by_path(NASTY, 77), clip(NASTY, 77))


def test_clip_ids_survive_the_file(clip, tmp_path):
  clip.save(tmp_path / "tokenizer.json")
  np.testing.assert_array_equal(
    Tokenizer.load(tmp_path / "tokenizer.json")(NASTY, 77), clip(NASTY, 77)
  )


def test_clip_gives_the_ids_of_open_clip_on_random_text(clip, open_clip_ids):
  random_ = random.Random(0)
  blocks = ((0x20, 0x7F), (0, 0x250), (0x250, 0x3000), (0x3000, 0xD000), (0x1F300, 0x1FA00))
  letters = [chr(c) for c in range(0x1FA00) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
  common = [[c for c in letters if low <= ord(c) < high] for low, high in blocks]

  def text():
    return "".join(random_.choice(random_.choice(common)) for _ in range(random_.randint(1, 40)))

  texts = [text() for _ in range(3000)]
  np.testing.assert_array_equal(clip(texts, 77), open_clip_ids(texts, 77))


def test_clip_gives_the_ids_of_open_clip_on_real_captions(clip, open_clip_ids):
  folder = pathlib.Path(os.environ.get("SBJAX_FLICKR8K", "../shared/data/flickr8k"))
  if not folder.is_dir():
    pytest.skip("needs the Flickr8k shards (SBJAX_FLICKR8K)")
  texts = []
  with tarfile.open(folder / "flickr8k-test-000000.tar.gz") as tar:
    for member in tar:
      if member.name.endswith(".json"):
        texts += json.load(tar.extractfile(member))["captions"]
  texts += [html.escape(text.upper()) for text in texts[::10]]
  np.testing.assert_array_equal(clip(texts, 77), open_clip_ids(texts, 77))
