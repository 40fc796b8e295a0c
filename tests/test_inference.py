"""A run's checkpoint embeds one's own pictures and texts as the run's evaluation does."""

import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import pytest
from PIL import Image

from train import inference, loop
from train.errors import RunError
from train.images import normalize
from train.run import Run, make_run
from train.step import tensor_names

ROOT = Path(__file__).parents[1]
TEXTS = ["a red circle", "a blue ring", "a green star"]


def standing_step(run):
  """Counts a step and leaves the parameters as they are."""
  finite = jnp.ones(len(tensor_names(run.abstract_state.params, run.task)), bool)
  return lambda state, batch: (state._replace(step=state.step + 1), {"loss": finite.sum()}, finite)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run of two steps, on two devices, with the parameters of its start."""
  folder = tmp_path_factory.mktemp("run")
  init = Run.new_state
  with pytest.MonkeyPatch.context() as patch:
    loop_case.replace_model(patch.setattr, standing_step)
    patch.setattr(Run, "new_state", init)
    devices = jax.devices()[:2]
    patch.setattr(jax, "devices", lambda *_: devices)
    options = {"steps": 2, "mesh.fsdp": 2, "model.backend": "xla"}
    loop.train(loop_case.config(folder / "data", **options), folder)
  return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
  folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
  pixels = random.integers(0, 255, (5, 32, 32, 3)).astype(np.uint8)
  for i, image in enumerate(pixels):
    Image.fromarray(image).save(folder / f"{i}.png")
  return pixels, sorted(map(str, folder.glob("*.png")))


def test_embeddings_are_those_of_the_run_s_model(workdir, pictures):
  model = inference.load(workdir, batch_size=4)
  assert model.step == 2
  config = loop_case.config(workdir / "data", steps=2)
  run = make_run(config, workdir)
  params = run.checkpointer.restore(run.abstract_state).state.params
  pixels, paths = pictures
  apply = run.task.model.apply
  images = apply({"params": params}, normalize(pixels), method="encode_image")
  tokens = run.tokenizer(TEXTS, config.model.context_length)
  texts = apply({"params": params}, tokens, method="encode_text")
  for ours, expected in [(model.embed_images(paths), images), (model.embed_texts(TEXTS), texts)]:
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, rtol=1e-5)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)


def test_the_example_prints_the_cosines_of_each_picture(workdir, pictures, monkeypatch, capsys):
  _, paths = pictures
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setattr(sys, "argv", ["embed.py", str(workdir), *paths[:2], "--", *TEXTS])
  runpy.run_path(str(ROOT / "examples" / "embed.py"), run_name="__main__")
  lines = capsys.readouterr().out.splitlines()
  assert [line for line in lines if line in paths] == paths[:2]
  cosines = [float(line.split()[0]) for line in lines if line.startswith("  ")]
  assert len(cosines) == 6 and all(-1 <= cosine <= 1 for cosine in cosines)
  assert cosines[:3] == sorted(cosines[:3], reverse=True)


def test_a_folder_without_a_run_is_named(tmp_path):
  with pytest.raises(RunError, match=f"{tmp_path} holds no run"):
    inference.load(tmp_path)


def test_another_tokenizer_json_than_the_run_s_is_refused(workdir):
  path = workdir / "tokenizer.json"
  whole = path.read_text()
  path.write_text(whole + "\n")
  try:
    with pytest.raises(RunError, match=r"tokenizer.json is not the one that this run trained with"):
      inference.load(workdir)
  finally:
    path.write_text(whole)
