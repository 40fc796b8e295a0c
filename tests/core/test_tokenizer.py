"""The tokenizers: the layout of their rows, and their files."""

import html
import json
import os
import pathlib
import subprocess
import sys

import ftfy
import numpy as np
import pytest
import tokenizers
from tokenizer_case import NASTY

from train.data.tokenizer import Tokenizer, _mended, make_tokenizer

CAPTIONS = [
  "A red circle on a dark background .",
  "a blue square to the left of a green star",
  "Two dogs run; one is brown, the other isn't.",
  "there is a small yellow ring in the middle",
] * 5


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


def test_texts_that_are_not_mended_need_no_mending():
  drawn = np.random.default_rng(0)
  characters = [chr(i) for i in range(128)]
  texts = ["".join(drawn.choice(characters, drawn.integers(1, 12))) for _ in range(4000)]
  for text in [*characters, *texts, *NASTY, "a &amp; b", "&lt", "\x1b[1mbold", "a\r\nb"]:
    assert _mended(text) == html.unescape(html.unescape(ftfy.fix_text(text))), repr(text)


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


# With the tokens of T5 and of Gemma, which has a tag "</s>", too.
SIGLIP = {
  "t5": ["<pad>", "</s>", "<unk>", "a", "red", "dog"],
  "gemma": ["<pad>", "<eos>", "<bos>", "</s>", "a", "red", "dog", "<unk>"],
}


def siglip(kind, pool="last"):
  words = {word: i for i, word in enumerate(SIGLIP[kind])}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return Tokenizer(tokenizer, pool)


@pytest.mark.parametrize(
  ("kind", "rows"),
  [("t5", [[3, 4, 5, 1, 1], [1] * 5]), ("gemma", [[4, 5, 6, 1, 0], [1, 0, 0, 0, 0]])],
)
def test_siglip_s_rows_end_and_are_padded_as_its_weights_know_them(kind, rows):
  tokenizer = siglip(kind)
  np.testing.assert_array_equal(tokenizer(["A  &lt;red_Dog!?", ""], 5), rows)
  np.testing.assert_array_equal(tokenizer(["a red dog"], 3), [[*rows[0][:2], 1]])


@pytest.mark.parametrize("kind", SIGLIP)
def test_a_tower_that_reads_the_end_token_has_the_same_rows_as_ever(kind):
  tokenizer, red, unknown = siglip(kind, "eot"), *map(SIGLIP[kind].index, ("red", "<unk>"))
  end = tokenizer.eot_id
  start = [] if kind == "t5" else [2]
  rows = [[*start, red, unknown, end, 0, 0, 0][:6]]
  np.testing.assert_array_equal(tokenizer(["red A"], 6), rows)


def test_own_vocabularies_do_not_depend_on_what_reads_a_row(bpe):
  last = make_tokenizer("bpe", CAPTIONS, 300, "last")
  np.testing.assert_array_equal(last(NASTY, 12), bpe(NASTY, 12))


def test_an_exported_siglip_tokenizer_cleans_ends_and_pads(tmp_path):
  exported, config = siglip("t5").for_transformers()
  loaded = tokenizers.Tokenizer.from_str(json.dumps(exported))
  assert loaded.encode(" A  red_Dog!\t ").ids == [3, 4, 5, 1]
  assert (config["pad_token"], config["eos_token"]) == ("</s>", "</s>")
  assert "bos_token" not in config


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
