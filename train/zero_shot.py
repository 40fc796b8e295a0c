"""Evaluates a CLIP without further training: zero-shot classification and retrieval.

Both ask whether a match of a query is among its k nearest candidates. In zero-shot
classification (Radford et al. 2021, https://arxiv.org/abs/2103.00020) the queries are images and
the candidates are the mean embeddings of each class's prompts. In retrieval the queries are images
and the candidates captions, and the reverse. A run calls this as it trains (`Run.evaluate`), and so
does the program train/evaluate.py afterwards.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sbjax.models.clip import CLIP
from sbjax.models.sizes import TextConfig
from sbjax.models.text_groups import text_ends
from train.data.preprocessing import normalize
from train.errors import RunError
from train.parallel.gather import gather_parameters
from train.parallel.sharding import batch_sharding, parameter_specs, replicated

_CUTS = 16  # positions
_AT_ONCE = 4096  # images whose logits are in memory


class Encoders(NamedTuple):
  """Jitted functions (parameters, batch) -> [B, E]; B is a multiple of the number of devices."""

  image: Callable  # uint8 [B, S, S, 3]
  text: Callable  # int32 [B, L]
  mesh: Mesh
  cut: Callable[[np.ndarray], np.ndarray]  # Texts without columns that change no features.


@functools.cache
def make_encoders(model: CLIP, mesh: Mesh) -> Encoders:
  """The encoders of a model, cached for each mesh; parameters may have any sharding over it."""

  def image(variables, image):
    return model.apply(variables, normalize(image), method="encode_image")

  def text(variables, text):
    return model.apply(variables, text, method="encode_text")

  cut = functools.partial(_cut, config=model.config.text)
  return Encoders(_on_rows(image, model, mesh), _on_rows(text, model, mesh), mesh, cut)


def _cut(texts: np.ndarray, config: TextConfig) -> np.ndarray:
  """Texts [N, L] up to the last end token; a few lengths only, since each is compiled for."""
  if not config.ignores_padding or not len(texts):
    return texts
  last = int(np.max(np.asarray(text_ends(texts, config.eot_id))))
  return texts[:, : -(-(last + 1) // _CUTS) * _CUTS]


def _on_rows(encode: Callable, model: CLIP, mesh: Mesh) -> Callable:
  """`encode`, jitted: each device of the mesh encodes its rows."""
  rows = batch_sharding(mesh)

  def run(params, x):
    if mesh.size == 1:
      return encode({"params": params}, x)
    shards = parameter_specs(params, mesh)
    return jax.shard_map(
      lambda params, x: encode(gather_parameters(params, model.options, mesh), x),
      mesh=mesh,
      in_specs=(shards, rows.spec),
      out_specs=rows.spec,
      check_vma=False,  # As in train/step.py.
    )(params, x)

  return jax.jit(run, in_shardings=(None, rows), out_shardings=replicated(mesh))


def evaluate(
  encoders: Encoders,
  params,
  tokenize: Callable[[Sequence[str]], np.ndarray],
  batches: Iterable[dict],
  *,
  batch_size: int,
  class_names: Sequence[str] = (),
  templates: Sequence[str] = (),
  retrieval: bool = True,
  logit_scale: float = 1.0,
) -> dict[str, float]:
  """Zero-shot accuracy and loss if there are class names, and recall if there are captions.

  Args:
    encoders: of the model.
    params: its parameters.
    tokenize: turns N texts into int32 [N, L].
    batches: {"image": uint8 [b, S, S, 3], "captions": b lists of texts, "label": int32 [b]}, with
      b <= batch_size and -1 where there is no label. Every process gets all batches.
    batch_size: images or texts at a time, over all devices.
    class_names, templates: as in `zero_shot_classifier`.
    retrieval: whether to compute recall.
    logit_scale: the model's factor on dot products, for the loss.
  """
  encode = functools.partial(encode_rows, params, encoders.mesh, batch_size)

  def encode_text(texts):
    return encode(encoders.text, encoders.cut(texts))

  images, captions, labels = [], [], []
  for batch in batches:
    images.append(encode(encoders.image, batch["image"]))
    captions += batch["captions"]
    labels.append(batch["label"])
  if not images:
    raise ValueError("The evaluation split is empty.")
  images, labels = np.concatenate(images), np.concatenate(labels)
  check_finite("image", images, range(len(images)))

  metrics = {}
  if class_names and np.any(labels >= 0):
    classifier = zero_shot_classifier(encode_text, tokenize, class_names, templates)
    scores = accuracy(images, labels, classifier, logit_scale)
    metrics |= {f"zero_shot_{name}": score for name, score in scores.items()}
  texts = [text for texts in captions for text in texts]
  if retrieval and texts:
    described = np.array([len(texts) > 0 for texts in captions])
    owners = np.repeat(np.arange(described.sum()), [len(texts) for texts in captions if texts])
    features = encode_text(tokenize(texts))
    check_finite("text", features, texts)
    metrics |= recall(images[described], features, owners)
  return metrics


def check_finite(tower: str, features: np.ndarray, names: Sequence) -> None:
  """Raises a RunError that names the first of the rows [N, E] that are not finite or all zero.

  The latter come of features whose squares overflow before they are scaled to length 1.
  """
  bad = np.flatnonzero(~(np.isfinite(features).all(axis=1) & features.any(axis=1)))
  if bad.size:
    raise RunError(
      f"The {tower} tower gives {len(bad):,} of {len(features):,} {tower}s features that are not"
      f" finite or all zero, the first of them {names[bad[0]]!r}. The weights are damaged, or the"
      " dtype is too small for them: compute in float32."
    )


class Sample(NamedTuple):
  image: np.ndarray  # uint8 [S, S, 3]
  captions: Sequence[str]  # its own
  nearest: Sequence[str]  # of the captions of its batch, the nearest first


def nearest_captions(
  encoders: Encoders,
  params,
  tokenize: Callable[[Sequence[str]], np.ndarray],
  batch: dict,
  *,
  batch_size: int,
  images: int = 8,
  captions: int = 3,
) -> list[Sample]:
  """Some images of a batch, with the nearest among the first captions of all its images.

  The arguments are as in `evaluate`. Only images with captions are taken; there may be none.
  """
  encode = functools.partial(encode_rows, params, encoders.mesh, batch_size)
  texts = list(dict.fromkeys(own[0] for own in batch["captions"] if own))
  if not texts:
    return []
  described = np.array([i for i, own in enumerate(batch["captions"]) if own])
  rows = described[np.unique(np.linspace(0, len(described) - 1, images).round().astype(int))]
  # Whole batches, whose shape is compiled already.
  image_features = unit(encode(encoders.image, batch["image"]))[rows]
  text_features = unit(encode(encoders.text, encoders.cut(tokenize(texts))))
  nearest = np.argsort(-image_features @ text_features.T, axis=1)[:, :captions]
  return [
    Sample(batch["image"][row], batch["captions"][row], [texts[i] for i in order])
    for row, order in zip(rows, nearest, strict=True)
  ]


def zero_shot_classifier(
  encode_text: Callable[[np.ndarray], np.ndarray],
  tokenize: Callable[[Sequence[str]], np.ndarray],
  class_names: Sequence[str],
  templates: Sequence[str],
) -> np.ndarray:
  """Unit vectors [classes, E]: the mean direction of each class's prompts.

  A prompt is one of `templates` with a class name in place of "{}". `encode_text` maps the token
  ids of all prompts, [classes * templates, L], to features [classes * templates, E].
  """
  for template in templates:
    if "{}" not in template:
      raise ValueError(f'The template {template!r} has no "{{}}", where the class name goes.')
  prompts = [template.replace("{}", name) for name in class_names for template in templates]
  features = unit(encode_text(tokenize(prompts)))
  check_finite("text", features, prompts)
  return unit(features.reshape(len(class_names), len(templates), -1).mean(axis=1))


def accuracy(
  image_features: np.ndarray,
  labels: np.ndarray,
  classifier: np.ndarray,
  logit_scale: float | None = None,
) -> dict[str, float]:
  """ "top1" and "top5": how often the class is among the k nearest (`label_ranks`).

  For features [N, E], labels [N] and a classifier [classes, E]. Images with a negative label do not
  count. With the model's logit scale also "loss", the mean cross-entropy, which is less noisy.
  Returns {} if there is no label at all.
  """
  known = labels >= 0
  if not known.any():
    return {}
  images, labels = image_features[known], labels[known]
  ranks, losses = [], []
  for i in range(0, len(images), _AT_ONCE):
    logits, own = images[i : i + _AT_ONCE] @ classifier.T, labels[i : i + _AT_ONCE]
    ranks.append(label_ranks(logits, own))
    if logit_scale is not None:
      losses.append(_cross_entropy(logits * np.float32(logit_scale), own))
  shares = top_k_accuracy(np.concatenate(ranks), len(classifier))
  scores = {f"top{k}": share for k, share in shares.items()}
  return scores | ({"loss": float(np.mean(np.concatenate(losses)))} if losses else {})


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
  own, largest = np.take_along_axis(logits, labels[:, None], axis=1), logits.max(1, keepdims=True)
  return (np.log(np.exp(logits - largest).sum(1, keepdims=True)) + largest - own)[:, 0]


def label_ranks(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
  """For logits [N, classes] and labels [N]: how many logits are larger than the label's, [N].

  Of equal logits the first is the larger, so equal features have the accuracy of chance.
  """
  own, classes = np.take_along_axis(logits, labels[:, None], axis=1), np.arange(logits.shape[1])
  # An example whose logits are NaN is wrong: all of them count as larger.
  larger = ~(logits <= own) | ((logits == own) & (classes[None] < labels[:, None]))
  return larger.sum(axis=1)


def top_k_accuracy(ranks: np.ndarray, classes: int) -> dict[int, float]:
  """For k = 1, and 5 from five classes on: how often the rank of a label is below k."""
  return {k: float(np.mean(ranks < k)) for k in (1, 5) if k <= classes}


def recall(
  image_features: np.ndarray,
  text_features: np.ndarray,
  text_image_index: np.ndarray,
  ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
  """ "image_to_text_recall@k" and "text_to_image_recall@k" for images [N, E] and texts [M, E].

  Text m belongs to image `text_image_index[m]`; an image may have several texts. Image-to-text
  recall counts an image if one of its texts is among the k nearest, as CLIP_benchmark does
  (https://github.com/LAION-AI/CLIP_benchmark).
  """
  images = np.arange(len(image_features))
  to_text = _hits(image_features, images, text_features, text_image_index, max(ks))
  to_image = _hits(text_features, text_image_index, image_features, images, max(ks))
  return {
    **{f"image_to_text_recall@{k}": _share(to_text, k) for k in ks},
    **{f"text_to_image_recall@{k}": _share(to_image, k) for k in ks},
  }


def _share(hits, k):
  return float(np.mean(hits[:, :k].any(axis=1)))


def _hits(queries, query_owners, candidates, candidate_owners, k, chunk=256) -> np.ndarray:
  """Bools [queries, k]: whether the k-th nearest candidate has the query's owner.

  The nearest candidate has the largest dot product; of equal ones the first is nearer. `chunk`
  queries at a time are compared with all candidates: 100 MB for 100,000 candidates.
  """
  arrays = (queries, query_owners, candidates, candidate_owners)
  return np.asarray(_jitted_hits(*arrays, min(k, len(candidates)), chunk))


@functools.partial(jax.jit, static_argnums=(4, 5))
def _jitted_hits(queries, query_owners, candidates, candidate_owners, k, chunk):
  def hits(query_and_owner):
    query, owner = query_and_owner
    _, nearest = jax.lax.top_k(jnp.dot(candidates, query, precision="highest"), k)
    return candidate_owners[nearest] == owner

  return jax.lax.map(hits, (queries, query_owners), batch_size=chunk)


def encode_rows(params, mesh: Mesh, batch_size: int, encoder: Callable, rows) -> np.ndarray:
  """Features [N, E] of one of the Encoders, in batches of one shape."""
  batch_size = -(-batch_size // mesh.size) * mesh.size
  sharding = batch_sharding(mesh)

  def place(x):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return _in_pieces(lambda x: encoder(params, place(x)), rows, batch_size)


def _in_pieces(encode, rows: np.ndarray, size: int) -> np.ndarray:
  """`encode(rows)` [N, E], computed in pieces of equal size, so that it compiles once."""
  pieces = []
  for start in range(0, len(rows), size):
    piece = rows[start : start + size]
    # Repeats the last row, since rows of zeros could change a scale that the batch shares.
    padding = ((0, size - len(piece)), *((0, 0) for _ in rows.shape[1:]))
    pieces.append(np.asarray(encode(np.pad(piece, padding, mode="edge")))[: len(piece)])
  return np.concatenate(pieces)


def unit(x: np.ndarray) -> np.ndarray:
  """Rows [N, E] scaled to length 1."""
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
