"""Evaluates a CLIP without further training: zero-shot classification and retrieval.

Both ask one question, in `_hits`: is a match of a query among the k candidates nearest to it? In
zero-shot classification (Radford et al. 2021, https://arxiv.org/abs/2103.00020) images look for the
mean embedding of their class's prompts; in retrieval images look for their captions, and captions
for their image.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sbjax.models.clip import CLIP
from train.gather import gather_parameters
from train.images import normalize
from train.sharding import batch_sharding, parameter_specs, replicated


class Encoders(NamedTuple):
  """Jitted functions from parameters and a batch of a size that all devices share to [B, E]."""

  image: Callable  # uint8 [B, S, S, 3]
  text: Callable  # int32 [B, L]
  mesh: Mesh


@functools.cache
def make_encoders(model: CLIP, mesh: Mesh) -> Encoders:
  """Compiled once for a model and a mesh; the parameters may be split over it as they like."""

  def image(variables, image):
    return model.apply(variables, normalize(image), method="encode_image")

  def text(variables, text):
    return model.apply(variables, text, method="encode_text")

  return Encoders(_on_rows(image, model, mesh), _on_rows(text, model, mesh), mesh)


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
) -> dict[str, float]:
  """Zero-shot accuracy, given class names, and recall, given captions, over all of `batches`.

  Args:
    encoders: of the model.
    params: its parameters.
    tokenize: from N texts to int32 [N, L].
    batches: {"image": uint8 [b, S, S, 3], "captions": b lists of texts, "label": int32 [b]}, with
      b <= batch_size and -1 where there is no label. Every process sees all of them.
    batch_size: images or texts at a time, over all devices.
    class_names, templates: `zero_shot_classifier`'s.
    retrieval: whether the captions are worth looking for.
  """
  batch_size = -(-batch_size // encoders.mesh.size) * encoders.mesh.size
  sharding = batch_sharding(encoders.mesh)

  def encode(encoder, rows):
    def place(x):
      return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return _in_pieces(lambda x: encoder(params, place(x)), rows, batch_size)

  def encode_text(tokens):
    return encode(encoders.text, tokens)

  images, captions, labels = [], [], []
  for batch in batches:
    images.append(encode(encoders.image, batch["image"]))
    captions += batch["captions"]
    labels.append(batch["label"])
  if not images:
    raise ValueError("The evaluation split is empty.")
  images, labels = np.concatenate(images), np.concatenate(labels)

  metrics = {}
  if class_names:
    classifier = zero_shot_classifier(encode_text, tokenize, class_names, templates)
    scores = accuracy(images, labels, classifier)
    metrics |= {f"zero_shot_{name}": score for name, score in scores.items()}
  texts = [text for texts in captions for text in texts]
  if retrieval and texts:
    owners = np.repeat(np.arange(len(images)), [len(texts) for texts in captions])
    metrics |= recall(images, encode_text(tokenize(texts)), owners)
  return metrics


def zero_shot_classifier(
  encode_text: Callable[[np.ndarray], np.ndarray],
  tokenize: Callable[[Sequence[str]], np.ndarray],
  class_names: Sequence[str],
  templates: Sequence[str],
) -> np.ndarray:
  """Unit vectors [classes, E]: the mean direction of each class's prompts.

  A prompt is one of `templates` with the name for its "{}"; `encode_text` takes what `tokenize`
  makes of all of them, [classes * templates, L], to [classes * templates, E].
  """
  for template in templates:
    if "{}" not in template:
      raise ValueError(f'The template {template!r} has no "{{}}", where the class name goes.')
  prompts = [template.replace("{}", name) for name in class_names for template in templates]
  features = _unit(encode_text(tokenize(prompts)))
  return _unit(features.reshape(len(class_names), len(templates), -1).mean(axis=1))


def accuracy(
  image_features: np.ndarray, labels: np.ndarray, classifier: np.ndarray
) -> dict[str, float]:
  """ "top1", and "top5" of more than five classes: the share of the images whose class is so near.

  For features [N, E], labels [N] and a classifier [classes, E]. A negative label is no label; with
  no label at all there is nothing to tell.
  """
  known, classes = labels >= 0, np.arange(len(classifier))
  if not known.any():
    return {}
  ks = (1, 5) if len(classes) > 5 else (1,)
  hits = _hits(image_features[known], labels[known], classifier, classes, max(ks))
  return {f"top{k}": _share(hits, k) for k in ks}


def recall(
  image_features: np.ndarray,
  text_features: np.ndarray,
  text_image_index: np.ndarray,
  ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
  """ "image_to_text_recall@k" and "text_to_image_recall@k" for images [N, E] and texts [M, E].

  Text m belongs to image `text_image_index[m]`, and an image may have several. From image to text
  one of them among the nearest k is enough, as CLIP_benchmark counts it
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

  Near is by dot product, and of equals the first is nearer. `chunk` queries are compared with all
  candidates at a time: 100 MB for 100,000 of them.
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


def _in_pieces(encode, rows: np.ndarray, size: int) -> np.ndarray:
  """`encode` over `rows` [N, ...] in pieces of one size, so that it compiles once: [N, E]."""
  pieces = []
  for start in range(0, len(rows), size):
    piece = rows[start : start + size]
    # The last row again, for rows of zeros could change a scale that the batch shares.
    padding = ((0, size - len(piece)), *((0, 0) for _ in rows.shape[1:]))
    pieces.append(np.asarray(encode(np.pad(piece, padding, mode="edge")))[: len(piece)])
  return np.concatenate(pieces)


def _unit(x: np.ndarray) -> np.ndarray:
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
