"""Training on drawn scenes: a run learns, and resumes with the same data on any mesh."""

import json
import shutil

import jax
import loop_case
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_case import bitwise

from configs import scenes_s8, scenes_tiny
from train import loop
from train.evaluate import evaluate_checkpoint
from train.run import make_run

pytestmark = pytest.mark.standard_promotion  # As optax needs.

SCENES = {
  "data.name": "scenes/small",
  "data.tokenizer": "words",
  "data.eval_split": "scenes[:8]",
  "model.context_length": 32,
}


def final_state(workdir):
  with ocp.StandardCheckpointer() as checkpointer:
    return jax.tree.leaves(checkpointer.restore(workdir / "checkpoints" / "4" / "state"))


@pytest.mark.slow
def test_a_resumed_run_trains_on_the_same_batches_on_another_mesh(monkeypatch, tmp_path):
  loop_case.replace_model(monkeypatch.setattr)
  monkeypatch.setattr(jax, "jit", bitwise)  # Meshes are to draw the same bits.
  devices = jax.devices()

  def train(workdir, count):
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:count])
    loop.train(loop_case.config(tmp_path / "data", **SCENES), workdir)
    return [record["loss"] for record in loop_case.records(workdir) if "loss" in record]

  whole = train(tmp_path / "whole", 1)
  assert len({*whole}) == 4  # The loss is the sum of a batch's pixels and ids.
  shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
  shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
  (tmp_path / "resumed" / "result.json").unlink()
  assert train(tmp_path / "resumed", 8) == whole
  for a, b in zip(*map(final_state, (tmp_path / "whole", tmp_path / "resumed")), strict=True):
    np.testing.assert_array_equal(a, b)
  assert not (tmp_path / "data").exists()


@pytest.fixture
def optimised():
  """XLA optimises programs that run for long."""
  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, False)
  yield
  jax.config.update(name, before)


@pytest.mark.usefixtures("optimised")
@pytest.mark.slow
def test_a_tiny_run_learns_and_is_scored_on_each_split(tmp_path):
  config = scenes_tiny.get_config()
  config.model.recipe, config.model.scan = "full", True
  config.mesh.data = 1
  config.steps, config.optimizer.warmup_steps = 150, 30
  config.data.eval_split = "scenes[:200],classes[:200],heldout[:50]"
  config.data.templates = ("a {}",)
  with pytest.MonkeyPatch.context() as patch:
    devices = jax.devices()[:1]
    patch.setattr(jax, "devices", lambda *_: devices)
    loop.train(config, tmp_path)
    scores = json.loads((tmp_path / "result.json").read_text())["eval"]
    again = evaluate_checkpoint(config, tmp_path)
  assert again == pytest.approx(scores)
  assert {name.partition("/")[0] for name in scores} == {"scenes", "classes", "heldout"}
  assert not any(name.startswith("scenes/zero_shot") for name in scores)
  assert not any("recall" in name for name in scores if not name.startswith("scenes/"))
  # Chance is 10 of 200 and 5 of 320.
  assert scores["scenes/image_to_text_recall@10"] > 3 * 10 / 200
  assert scores["classes/zero_shot_top5"] > 2 * 5 / 320
  assert (tmp_path / "report.png").is_file()


def test_the_large_config_makes_a_run(tmp_path):
  run = make_run(scenes_s8.get_config(), tmp_path)
  vision, text = run.task.model.config.vision, run.task.model.config.text
  assert (vision.image_size, vision.patch_size, vision.width) == (64, 8, 384)
  assert (text.vocab_size, text.eot_id, text.context_length) == (run.tokenizer.vocab_size, 2, 32)
