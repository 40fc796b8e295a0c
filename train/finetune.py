"""Fine-tuning, `config.init`: where parameters begin, which are frozen, how fast others learn.

With `config.lora` all of them are frozen, kernels in 8 bits, and adapters on kernels learn.

Patterns are regular expressions for the whole path of a parameter, such as "image/.*" or
"text/blocks/fc1/kernel". A pattern that matches no parameter is an error.
"""

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from sbjax.interop.config_files import HF_FILE, OPEN_CLIP_FILE, config_of, read_config
from sbjax.interop.files import WEIGHT_FILES, file_suffix, is_weights
from sbjax.interop.serving import serving_params
from sbjax.interop.weights import check_architecture, load_weights
from sbjax.linear.lora import init_lora
from sbjax.models.sizes import CLIPConfig
from sbjax.models.transformer import BlockOptions, is_block_kernel
from sbjax.recipes import recipes_of
from train.config import Config, LoraConfig, OptimizerConfig
from train.data.preprocessing import is_squashed, statistics_of
from train.data.tokenizer import Tokenizer, tokenizer_beside
from train.parallel.sharding import path_name
from train.paths import local_path


class Rate(NamedTuple):
  """The factor on the learning rate of parameters whose path a pattern matches."""

  pattern: re.Pattern
  factor: float


def freezes(patterns: Sequence[str], name: str) -> bool:
  """Whether the parameter of that path is frozen."""
  return any(compiled("freeze", pattern).fullmatch(name) for pattern in patterns)


def frozen(patterns: Sequence[str], params):
  """A tree like `params`: True for frozen parameters."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: freezes(patterns, path_name(path)), params
  )


def stop_gradients(patterns: Sequence[str], params):
  """`params` without a gradient to the frozen ones, so that none is computed."""
  if not patterns:
    return params
  stop = jax.lax.stop_gradient
  return jax.tree.map(lambda x, still: stop(x) if still else x, params, frozen(patterns, params))


def adapters(params: dict, config: LoraConfig, key: jax.Array) -> dict:
  """The adapters of a run at step 0, for kernels of blocks.

  Raises:
    ValueError: a target matches none, or the rank does not fit one.
  """
  kernels = {path: w for path, w in flatten_dict(params).items() if is_block_kernel(path)}
  try:
    return init_lora(key, unflatten_dict(kernels), config.rank, tuple(config.targets))
  except ValueError as error:
    raise ValueError(f"lora.{error}") from error


def frozen_base(params: dict, options: BlockOptions) -> dict:
  """The parameters beside adapters: kernels in 8 bits, or in the compute dtype without a recipe."""
  if any(recipe.fwd is not None for recipe in recipes_of(options.recipe)):
    params = serving_params(params, options.recipe, backend=options.backend)
  base = flatten_dict(params)
  kernels = {path: w for path, w in base.items() if is_block_kernel(path)}
  cast = {path: w.astype(options.dtype) for path, w in kernels.items() if hasattr(w, "astype")}
  return unflatten_dict(base | cast)


def parse_rates(texts: Sequence[str]) -> tuple[Rate, ...]:
  """The rates of texts such as "image/.*=0.1".

  Raises:
    ValueError: a text is none, or its factor is not finite and 0 or more.
  """
  rates = []
  for text in texts:
    pattern, _, factor = text.rpartition("=")
    try:
      value = float(factor)
    except ValueError:
      value = -1.0
    if not pattern or not 0 <= value < float("inf"):
      raise ValueError(
        f"optimizer.learning_rate_scale={text!r} must be a pattern and a factor of 0 or more, such"
        " as 'image/.*=0.1'."
      )
    rates.append(Rate(compiled("optimizer.learning_rate_scale", pattern), value))
  return tuple(rates)


def scale_by_path(rates: Sequence[Rate]) -> optax.GradientTransformation:
  """Multiplies each update, its weight decay too, by the factor of the first rate that matches."""

  return scale_each(
    lambda name, _: next((rate.factor for rate in rates if rate.pattern.fullmatch(name)), 1.0)
  )


def scale_each(factor: Callable[[str, tuple[int, ...]], float]) -> optax.GradientTransformation:
  """Multiplies each update by the factor of its parameter's path and shape."""

  def scale(updates, _=None):
    return jax.tree_util.tree_map_with_path(
      lambda path, u: u * factor(path_name(path), u.shape), updates
    )

  return optax.stateless(scale)


def check_patterns(config: Config, names: Iterable[str]) -> None:
  """Raises a ValueError for a pattern of the config that matches none of the parameters `names`."""
  names, defaults = list(names), OptimizerConfig()
  fields = {
    "freeze": [compiled("freeze", pattern) for pattern in config.freeze],
    "optimizer.learning_rate_scale": [
      rate.pattern for rate in parse_rates(config.optimizer.learning_rate_scale)
    ],
    "optimizer.float32_moments": [
      compiled("optimizer.float32_moments", pattern) for pattern in config.optimizer.float32_moments
    ],
  }
  if config.lora.rank and config.optimizer.float32_moments == defaults.float32_moments:
    del fields["optimizer.float32_moments"]  # Embeddings have no moments.
  for field, patterns in fields.items():
    for pattern in patterns:
      if not any(pattern.fullmatch(name) for name in names):
        raise matches_nothing(field, pattern, names)
  if all(freezes(config.freeze, name) for name in names):
    raise ValueError(f"freeze={config.freeze} leaves no parameter to train.")


def matches_nothing(field: str, pattern: re.Pattern, names: Sequence[str]) -> ValueError:
  """The error of a field with a pattern that matches none of the parameters `names`."""
  plain = re.sub(r"[^\w/]", "", pattern.pattern)
  near = difflib.get_close_matches(plain, names, n=4, cutoff=0.3) or names[:4]
  return ValueError(
    f"{field}: the pattern {pattern.pattern!r} matches no parameter. A pattern is for the whole"
    f" path, as 'image/.*' is. Paths near it: {', '.join(near)}."
  )


def check_init(config: Config, model: CLIPConfig) -> None:
  """Raises a ValueError if `config.init` is no checkpoint, or is one of another architecture.

  So do `freeze` without `init`, and a config file beside it by which images are prepared otherwise
  than here (train/data/preprocessing.py).

  Sizes of images and texts may differ: position embeddings are resized. The vocabulary is checked
  with the tokenizer (`initial_params`).
  """
  if not config.init:
    if config.freeze:
      raise ValueError(f"freeze={config.freeze} would freeze random parameters: set init.")
    return
  path = local_path(config.init, "init")
  if path.is_dir() and not any((path / name).is_file() for name in WEIGHT_FILES):
    raise ValueError(f"init={config.init!r} has no weights: expected {', '.join(WEIGHT_FILES)}.")
  if not path.exists():
    raise ValueError(
      f"init={config.init!r} does not exist: expected a state dict (.safetensors, .pt, .bin) or a"
      f" folder with one of {', '.join(WEIGHT_FILES)} and {OPEN_CLIP_FILE} or {HF_FILE}."
    )
  if not path.is_dir() and not is_weights(path):
    try:
      file_suffix(path)
    except ValueError as error:
      raise ValueError(f"init: {error}") from None
  theirs = _source(config)
  size = None if theirs is None else theirs.vision.image_size
  if is_squashed(f"init={config.init!r}", path, size, statistics_of(model)):
    print(
      f"init={config.init!r}: its images were squashed to squares. This run crops them, in training"
      " and in evaluation.",
      file=sys.stderr,
    )
  if theirs is None:
    return
  try:
    check_architecture(model, theirs, f"init={config.init!r}")
  except ValueError as error:
    raise ValueError(
      f"{error} The config is that of model.size={config.model.size!r}, which takes"
      " open_clip's names and the folder of init, too."
    ) from None


def initial_params(config: Config, model: CLIPConfig, like: dict) -> dict:
  """The parameters of `config.init` in float32, laid out as the run's, which are `like`.

  A logit_bias that the checkpoint lacks stays that of `like`; one that the run lacks is dropped.

  Raises:
    ValueError: the checkpoint does not fit the model, or the run's tokenizer is not its own.
  """
  theirs = _source(config)
  text = model.text
  if theirs is not None and theirs.text.vocab_size != text.vocab_size:
    raise ValueError(_other_tokenizer(config, theirs.text.vocab_size, text.vocab_size, "tokens"))
  ends = theirs is not None and theirs.text.pool == "eot"  # Else they are read elsewhere.
  if ends and theirs.text.end_id != text.end_id:
    raise ValueError(_other_tokenizer(config, theirs.text.end_id, text.end_id, "as its end token"))
  scan = "blocks" in like["image"]
  try:
    params = load_weights(config.init, model, scan=scan, resize=True)
  except ValueError as error:
    raise ValueError(f"init={config.init!r}: {error}") from error
  if "logit_bias" not in like:
    params.pop("logit_bias", None)
  elif "logit_bias" not in params:
    params["logit_bias"] = like["logit_bias"]
  if jax.tree.structure(params) != jax.tree.structure(like):
    ours, theirs = ({path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(t)}
                    for t in (like, params))  # fmt: skip
    raise ValueError(
      f"init={config.init!r} lacks {', '.join(sorted(ours - theirs)[:4]) or 'nothing'} and has"
      f" {', '.join(sorted(theirs - ours)[:4]) or 'nothing'} besides: set"
      " model.zero_init_layer_scale and model.qk_norm as it was trained."
    )
  return params


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
  """Raises a ValueError if the folder of `init` has a tokenizer that gives texts other ids."""
  file = tokenizer_beside(local_path(config.init, "init"))
  if file is not None and not tokenizer.agrees_with(Tokenizer.load(file)):
    raise ValueError(
      f"data.tokenizer={config.data.tokenizer!r} gives words other ids than the tokenizer that"
      f" init was trained with: set data.tokenizer={str(file)!r}."
    )


def _other_tokenizer(config: Config, theirs: int, ours: int, what: str) -> str:
  return (
    f"data.tokenizer={config.data.tokenizer!r} has {ours} {what}, and init={config.init!r} has"
    f" {theirs}: give its own tokenizer.json or spiece.model ('clip' is that of open_clip and"
    " OpenAI)."
  )


def _source(config: Config) -> CLIPConfig | None:
  """The architecture that `init` names; None where neither init_model nor a config does."""
  if config.init_model:
    try:
      return read_config(config.init_model)
    except ValueError as error:
      raise ValueError(f"init_model={config.init_model!r}: {error}") from error
  return config_of(config.init)


def compiled(field: str, pattern: str) -> re.Pattern:
  """The pattern of a field; a ValueError that names both if it is no regular expression."""
  try:
    return re.compile(pattern)
  except re.error as error:
    raise ValueError(f"{field}={pattern!r} is no regular expression: {error}.") from None
