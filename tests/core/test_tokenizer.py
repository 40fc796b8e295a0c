"""The tokenizers: their row layout, and ids equal to open_clip's for CLIP's vocabulary."""

import html
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tarfile
import unicodedata

import numpy as np
import pytest
import tokenizers
from open_clip_case import import_open_clip

from train.data.tokenizer import Tokenizer, make_tokenizer

CAPTIONS = [
  "A red circle on a dark background .",
  "a blue square to the left of a green star",
  "Two dogs run; one is brown, the other isn't.",
  "there is a small yellow ring in the middle",
] * 5

# Hard cases for tokenizers: cleaning, contractions, digits, marks, scripts, joined emoji.
NASTY = [
  "",
  "   ",
  "It's DON'T we've I'LL they'd 'm rock'n'roll",
  "'\u017f it'\u017f",  # IGNORECASE takes the long s for an s.
  "ΣΑΣ ὈΔΥΣΣΕΎΣ Σ",
  "İstanbul Straße ẞ ŉ",
  "a &amp;amp; b &lt;3 &quot;quoted&#39; &nbsp; &hearts;",
  "<b>&amp;lt; two times&amp;amp;amp; three",  # ftfy leaves entities beside tags to html.unescape
  "12345 3½ 1,000.50 ٣ Ⅷ ²",
  "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
  "âœ” donâ€™t schÃ¶n",  # mojibake, which ftfy mends
  "“curly” ‘quotes’ … – — ﬁne",  # noqa: RUF001
  "tabs\tand\nlines\r\n\u00a0\u2003\u3000spaces",
  "\u001c \u0085 zero\u200bwidth\u200d",
  "dog\u0345 !\u0345!",  # dropped in open_clip: neither letter nor sign under IGNORECASE
  "e\u0301 n\u0303 Å ﷺ ｆｕｌｌ　ｗｉｄｔｈ",  # noqa: RUF001
  "日本語のキャプション 中文 한국어 ไทย हिन्दी العربية",
  "<end_of_text> in the text <start_of_text>",
  "___ --- *** #hash @user http://x.y/z?q=1&r=2",
  "x" * 400,
  "word " * 100,
]
# open_clip 3.3.0's ids of some of the above, without start and end.
GOLDEN = {
  2: [585, 568, 847, 713, 649, 1200, 328, 1342, 889, 1896, 880, 2172, 262, 333, 262, 3341],
  6: [320, 261, 321, 283, 274, 257, 27706, 262, 3405],
  9: [26304, 26304, 48938, 4244, 964, 355, 21531, 43722, 1752],
  11: [257, 20795, 257, 262, 5808, 262, 959, 1224, 2005, 3797],
}


@pytest.fixture(scope="module")
def bpe():
  return make_tokenizer("bpe", CAPTIONS, 300)


def test_rows_are_a_start_token_text_an_end_token_and_zeros(bpe):
  ids = bpe(["a red circle", "a"], 12)
  assert ids.dtype == np.int32
  assert ids.shape == (2, 12)
  for row in ids:
    end = list(row).index(bpe.eot_id)
    assert row[0] == bpe.sot_id
    assert not np.isin(row[1:end], [0, bpe.sot_id, bpe.eot_id]).any()
    assert (row[end + 1 :] == 0).all()


def test_end_token_survives_truncation(bpe):
  long, short = " ".join(CAPTIONS), bpe([" ".join(CAPTIONS)], 9)[0]
  assert short[-1] == bpe.eot_id
  assert (short == bpe.eot_id).sum() == 1
  np.testing.assert_array_equal(short[:-1], bpe([long], 400)[0][:8])


@pytest.mark.parametrize("text", ["a red circle", "never seen: ☃ über 42", "it isn't Brown"])
def test_bpe_decodes_to_the_text_in_lower_case(bpe, text):
  assert bpe.decode(bpe([text], 64)[0]) == text.lower()


def test_bpe_cleans_as_clip_does(bpe):
  np.testing.assert_array_equal(
    bpe(["  A &amp;amp; RED\n\tcircle "], 20), bpe(["a & red circle"], 20)
  )


def test_bpe_is_the_same_in_every_process(bpe, tmp_path):
  bpe.save(tmp_path / "here.json")
  code = (
    "import json, sys; from train.data.tokenizer import make_tokenizer; "
    "make_tokenizer('bpe', iter(json.loads(sys.argv[1])), 300).save(sys.argv[2])"
  )
  subprocess.run(
    [sys.executable, "-c", code, json.dumps(CAPTIONS), str(tmp_path / "there.json")],
    check=True,
    cwd=pathlib.Path(__file__).parents[2],
    env=os.environ | {"PYTHONHASHSEED": "7"},
  )
  assert (tmp_path / "here.json").read_text() == (tmp_path / "there.json").read_text()


def test_a_saved_tokenizer_gives_the_same_ids(bpe, tmp_path):
  bpe.save(tmp_path / "tokenizer.json")
  for loaded in (
    Tokenizer.load(tmp_path / "tokenizer.json"),
    make_tokenizer(str(tmp_path / "tokenizer.json"), None, 0),
  ):
    assert (loaded.vocab_size, loaded.eot_id, loaded.sot_id) == (300, bpe.eot_id, bpe.sot_id)
    np.testing.assert_array_equal(loaded(NASTY, 32), bpe(NASTY, 32))


def test_a_full_disk_is_an_os_error(bpe):
  with pytest.raises(OSError, match="No space left on device"):
    bpe.save("/dev/full")


def test_a_foreign_file_keeps_its_own_cleaning_and_special_tokens(tmp_path):
  words = {"<|endoftext|>": 0, "Red": 1, "red": 2, "[UNK]": 3}
  foreign = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
  foreign.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  foreign.enable_truncation(2)
  foreign.save(str(tmp_path / "foreign.json"))
  loaded = make_tokenizer(str(tmp_path / "foreign.json"), None, 0)
  assert (loaded.sot_id, loaded.eot_id, loaded.vocab_size) == (None, 0, 4)
  np.testing.assert_array_equal(loaded(["Red red blue"], 6), [[1, 2, 3, 0, 0, 0]])


def test_a_unigram_vocabulary_is_exported_where_its_ids_stay():
  scores = [("<unk>", 0.0), ("a", -1.0), ("</s>", 0.0), ("<s>", 0.0), ("b", -1.0)]
  unigram = Tokenizer(tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0, False)))
  exported, _ = unigram.for_transformers()
  loaded = tokenizers.Tokenizer.from_str(json.dumps(exported))
  assert loaded.encode("ab").ids == [3, 1, 4, 2]
  with pytest.raises(ValueError, match=r"Unigram vocabulary has fixed ids; use --format=open_clip"):
    unigram.for_transformers(end_last=True)


def test_exported_ids_of_the_end_and_the_last_token_change_places(bpe):
  exported, _ = bpe.for_transformers(end_last=True)
  loaded = tokenizers.Tokenizer.from_str(json.dumps(exported))
  swap = {bpe.eot_id: 299, 299: bpe.eot_id}
  assert loaded.get_vocab() == {t: swap.get(i, i) for t, i in bpe._tokenizer.get_vocab().items()}
  assert loaded.encode("a red circle").ids[-1] == 299


@pytest.mark.parametrize(
  ("spec", "captions", "size", "message"),
  [
    ("gpt", None, 0, "No tokenizer 'gpt'.* a tokenizer.json of Hugging Face"),
    ("bpe", CAPTIONS, 100, "vocab_size=100 cannot hold 256 bytes"),
    ("bpe", [], 300, "there are none"),
    (__file__, None, 0, "is not a tokenizer.json"),
  ],
)
def test_wrong_arguments_are_named(spec, captions, size, message):
  with pytest.raises(ValueError, match=message):
    make_tokenizer(spec, captions, size)


def test_no_room_for_text_is_an_error(bpe):
  with pytest.raises(ValueError, match="context_length=2"):
    bpe(["a"], 2)


def test_a_file_without_end_token_is_an_error(tmp_path):
  bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
  bare.save(str(tmp_path / "bare.json"))
  with pytest.raises(ValueError, match="no end token"):
    Tokenizer.load(tmp_path / "bare.json")


@pytest.fixture(scope="module")
def clip():
  if importlib.util.find_spec("open_clip") is None:
    pytest.skip("needs the `interop` extra: CLIP's vocabulary is open_clip's")
  return make_tokenizer("clip", None, 0)


@pytest.fixture(scope="module")
def open_clip_ids():
  reference = import_open_clip().get_tokenizer("ViT-B-32")
  return lambda texts, context_length: reference(texts, context_length).numpy()


@pytest.mark.interop
@pytest.mark.parametrize("context_length", [77, 16, 4])
def test_clip_gives_the_ids_of_open_clip(clip, open_clip_ids, context_length):
  assert (clip.vocab_size, clip.sot_id, clip.eot_id) == (49408, 49406, 49407)
  np.testing.assert_array_equal(clip(NASTY, context_length), open_clip_ids(NASTY, context_length))


@pytest.mark.interop
@pytest.mark.parametrize("i", GOLDEN)
def test_clip_gives_golden_ids(clip, i):
  row = clip([NASTY[i]], 77)[0]
  assert [int(token) for token in row if token][1:-1] == GOLDEN[i]


@pytest.mark.interop
def test_clip_decodes_to_words(clip):
  assert clip.decode(clip(["A photo of  two Dogs, 12 ☃"], 20)[0]) == "a photo of two dogs , 1 2 ☃"


@pytest.mark.interop
def test_clip_by_path_gives_the_same_ids(clip):
  installed = pathlib.Path(importlib.util.find_spec("open_clip").origin).parent
  by_path = make_tokenizer(str(installed / "bpe_simple_vocab_16e6.txt.gz"), None, 0)
  np.testing.assert_array_equal(by_path(NASTY, 77), clip(NASTY, 77))


@pytest.mark.interop
def test_clip_ids_survive_the_file(clip, tmp_path):
  clip.save(tmp_path / "tokenizer.json")
  np.testing.assert_array_equal(
    Tokenizer.load(tmp_path / "tokenizer.json")(NASTY, 77), clip(NASTY, 77)
  )


@pytest.mark.interop
def test_clip_gives_the_ids_of_open_clip_on_random_text(clip, open_clip_ids):
  random_ = random.Random(0)
  blocks = ((0x20, 0x7F), (0, 0x250), (0x250, 0x3000), (0x3000, 0xD000), (0x1F300, 0x1FA00))
  letters = [chr(c) for c in range(0x1FA00) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
  common = [[c for c in letters if low <= ord(c) < high] for low, high in blocks]

  def text():
    return "".join(random_.choice(random_.choice(common)) for _ in range(random_.randint(1, 40)))

  texts = [text() for _ in range(3000)]
  np.testing.assert_array_equal(clip(texts, 77), open_clip_ids(texts, 77))


@pytest.mark.interop
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
