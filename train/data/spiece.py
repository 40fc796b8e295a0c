"""Reads SigLIP's spiece.model, of SentencePiece, as a tokenizer of Hugging Face `tokenizers`."""

import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

SUFFIX = ".model"
_UNIGRAM, _CONTROL = 1, 3  # TrainerSpec.model_type, SentencePiece.type


def read_spiece(path: str | pathlib.Path) -> tokenizers.Tokenizer:
  """The tokenizer of a Unigram model, with its normalizer and its special tokens.

  Raises:
    ValueError: the file is none, or its model is another, such as BPE.
    ImportError: sentencepiece or protobuf is not installed.
  """
  try:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2
  except ImportError as error:
    raise ImportError(
      f"{path} is a SentencePiece model, which needs the packages sentencepiece and protobuf (the"
      " extra `interop`); or give a tokenizer.json."
    ) from error
  proto = sentencepiece_model_pb2.ModelProto()
  try:
    proto.ParseFromString(pathlib.Path(path).read_bytes())
  except DecodeError:
    proto.Clear()
  if not proto.pieces:
    raise ValueError(f"{path} is not a SentencePiece model.")
  trainer, spec = proto.trainer_spec, proto.normalizer_spec
  if trainer.model_type != _UNIGRAM:
    raise ValueError(
      f"{path} is a SentencePiece model, and not Unigram, as SigLIP's is: give the tokenizer.json"
      " that is beside it."
    )
  pieces = [(piece.piece, piece.score) for piece in proto.pieces]
  tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, trainer.unk_id, trainer.byte_fallback))
  charsmap = spec.precompiled_charsmap
  spaces = [("^ +| +$", ""), (" {2,}", " ")] if spec.remove_extra_whitespaces else []
  tokenizer.normalizer = normalizers.Sequence(
    [
      *([normalizers.Precompiled(charsmap)] if charsmap else []),
      *(normalizers.Replace(tokenizers.Regex(old), new) for old, new in spaces),
    ]
  )
  prefix = "always" if spec.add_dummy_prefix else "never"
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
  tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
  tokenizer.add_special_tokens([p.piece for p in proto.pieces if p.type == _CONTROL])
  return tokenizer
