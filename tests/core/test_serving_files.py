"""Files of parameters in 8 bits, today's and those of before, and exported programs of them."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from flax_case import int8_products, normal

from sbjax import quantize_model, quantize_weights
from sbjax.interop import serving
from sbjax.interop.serving import load_serving, save_serving
from sbjax.linear.frozen import view
from sbjax.linear.weight import NoMaster, is_frozen

FOLDER = pathlib.Path(__file__).parent / "served"
_spec = importlib.util.spec_from_file_location("served_make", FOLDER / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

pytestmark = pytest.mark.standard_promotion
SUFFIXES = [
  pytest.param(".safetensors", marks=pytest.mark.interop),
  ".msgpack",
  "",
]


@pytest.fixture(scope="module")
def served():
  return make.served()


def assert_same(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_holds_the_parameters_of_any_model(served, suffix, tmp_path):
  path = tmp_path / f"served{suffix}"
  save_serving(served, path)
  assert_same(load_serving(path), served)
  assert_same(load_serving(path, like=make.parameters()), served)


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
def test_a_file_of_version_1_loads_and_computes_what_it_did(suffix):
  params = load_serving(FOLDER / f"classifier-1{suffix}", like=make.parameters())
  logits = quantize_model(make.Classifier(), make.RULES).apply({"params": params}, make.inputs())
  plain = make.Classifier().apply({"params": make.parameters()}, make.inputs())
  np.testing.assert_allclose(logits, plain, atol=0.04)
  of_then = [[-0.5500, -0.1129, 0.6510], [-0.5296, -0.4206, 1.0249]]
  np.testing.assert_allclose(logits, of_then, atol=0.01)


def test_an_nnx_module_is_filled_from_a_file(tmp_path):
  model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
  save_serving(quantize_weights(model, "switchback"), tmp_path / "served.msgpack")
  other = nnx.Linear(16, 8, rngs=nnx.Rngs(1))
  loaded = load_serving(tmp_path / "served.msgpack", like=other)
  assert is_frozen(loaded.kernel.get_value()) and not is_frozen(other.kernel.get_value())
  x = normal((4, 16))
  actual, expected = (quantize_model(m, "switchback")(x) for m in (loaded, model))
  np.testing.assert_array_equal(actual, expected)


def test_a_file_of_a_newer_version_is_refused_by_both_numbers(served, tmp_path, monkeypatch):
  path = tmp_path / "served.msgpack"
  monkeypatch.setattr(serving, "VERSION", 7)
  save_serving(served, path)
  monkeypatch.undo()
  with pytest.raises(
    ValueError, match="has version 7 of the format, and this sbjax reads versions"
  ):
    load_serving(path)


def test_a_file_of_before_versions_holds_kernels_of_two_axes(tmp_path):
  (path := tmp_path / "served.msgpack").write_bytes(
    serialization.msgpack_serialize(
      {
        "arrays": {
          "fc/kernel/values": np.ones((4, 8), np.int8),
          "fc/kernel/scale": np.ones((1, 1), np.float32),
        },
        "words": {"specs": json.dumps({"fc/kernel": ["int8", "tensorwise", 0]})},
      }
    )
  )
  assert load_serving(path)["fc"]["kernel"].values.shape == (4, 8)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda p: p.pop("head"),
      "is of another model: it has head/(kernel|bias), which the model lac",
    ),
    (lambda p: p.update(more=jnp.ones(3)), "is of another model: it has no more"),
    (
      lambda p: p["patches"].update(kernel=jnp.ones((4, 4, 3, 8))),
      r"its patches/kernel is \(2, 2, 3, 8\), the model's \(4, 4, 3, 8\)",
    ),
  ],
)
def test_a_file_of_another_model_names_a_difference(change, message):
  model = make.parameters()
  change(model)
  with pytest.raises(ValueError, match=message):
    load_serving(FOLDER / "classifier-1.msgpack", like=model)


def test_a_file_of_others_or_a_part_of_one_is_named(served, tmp_path):
  path = tmp_path / "served.msgpack"
  path.write_bytes(serialization.msgpack_serialize({"a": np.ones(3)}))
  with pytest.raises(ValueError, match="was not written by save_serving"):
    load_serving(path)
  written = serialization.msgpack_restore((FOLDER / "classifier-1.msgpack").read_bytes())
  del written["arrays"]["patches/kernel/scale"]
  path.write_bytes(serialization.msgpack_serialize(written))
  with pytest.raises(ValueError, match="is not whole: it lacks patches/kernel/scale"):
    load_serving(path)


def test_flax_restores_8_bits_of_the_same_axes_only(served):
  kernel = served["attention"]["out"]["kernel"]
  written = serialization.to_bytes(kernel)
  assert_same(serialization.from_bytes(kernel, written), kernel)
  other = kernel._replace(master=dataclasses.replace(kernel.master, contracted=(0,), batch=(1,)))
  with pytest.raises(ValueError, match=r"The file's weight in 8 bits is NoMaster\(shape=\(2, 4, 8"):
    serialization.from_bytes(other, written)
  state = serialization.to_state_dict(kernel) | {"master": {}}  # As of before.
  assert serialization.from_state_dict(kernel, state).master == kernel.master
  assert NoMaster((16, 32)).contracted == (0,)


# ---- Exported programs


def classifier(params, image):
  return quantize_model(make.Classifier(), make.RULES).apply({"params": params}, image)


SERVE = """
import sys, jax, numpy as np
exported = jax.export.deserialize(bytearray(open("classifier.jax", "rb").read()))
for batch in (1, 5):
  image = np.load("image.npy")[:1].repeat(batch, 0)
  assert np.allclose(exported.call(image), np.load("logits.npy")[:1], atol=1e-5)
assert "flax" not in sys.modules and "sbjax" not in sys.modules
"""


@pytest.mark.program
def test_an_exported_model_is_served_with_any_batch_size_without_flax(served, tmp_path):
  pytest.importorskip("flatbuffers")
  (batch,) = jax.export.symbolic_shape("batch")
  image = jax.ShapeDtypeStruct((batch, 4, 4, 3), jnp.float32)
  exported = jax.export.export(jax.jit(lambda image: classifier(served, image)))(image)
  (tmp_path / "classifier.jax").write_bytes(exported.serialize(vjp_order=0))
  np.save(tmp_path / "image.npy", make.inputs())
  np.save(tmp_path / "logits.npy", classifier(served, make.inputs()))
  run = subprocess.run([sys.executable, "-c", SERVE], cwd=tmp_path, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr


def test_8_bits_are_arguments_of_an_exported_model(served):
  pytest.importorskip("flatbuffers")
  (batch,) = jax.export.symbolic_shape("batch")
  image = jax.ShapeDtypeStruct((batch, 4, 4, 3), jnp.float32)
  exported = jax.export.export(jax.jit(classifier))(served, image)
  again = jax.export.deserialize(exported.serialize(vjp_order=0))
  assert sum(a.dtype == jnp.int8 for a in again.in_avals) == 4
  np.testing.assert_allclose(
    again.call(served, make.inputs()), classifier(served, make.inputs()), atol=1e-5
  )
  assert int8_products(classifier, served, make.inputs()) == 4


def test_the_files_of_this_folder_are_small_and_their_weights_have_three_and_four_axes(served):
  assert all(path.stat().st_size < 5000 for path in FOLDER.glob("classifier-*"))
  assert view(served["patches"]["kernel"]).shape == (2, 2, 3, 8)
  assert view(served["attention"]["out"]["kernel"]).shape == (2, 4, 8)
