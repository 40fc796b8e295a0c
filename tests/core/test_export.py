"""open_clip and transformers load what a run exports: the same features, the same token ids."""

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import pytest
from open_clip_case import import_open_clip

from train import export, loop
from train.errors import RunError
from train.inference import load
from train.run import Run
from train.step import tensor_names
from train.task import make_task

TEXTS = ["a Red  circle", "two blue rings, and a green star!", ""]


def moving_step(run):
  """Adds noise to the parameters."""
  finite = jnp.ones(len(tensor_names(run.abstract_state.params, run.task)), bool)

  def step(state, batch):
    leaves, structure = jax.tree.flatten(state.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    moved = [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, moved)
    return state._replace(step=state.step + 1, params=params), {"loss": finite.sum()}, finite

  return step


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  init = Run.new_state
  with pytest.MonkeyPatch.context() as patch:
    loop_case.replace_model(patch.setattr, moving_step)
    patch.setattr(Run, "new_state", init)
    loop.train(loop_case.config(folder / "data", steps=1, **{"model.backend": "xla"}), folder)
  return folder


def images(run):
  size = run.task.model.config.vision.image_size
  return np.random.default_rng(0).standard_normal((2, size, size, 3), np.float32)


def expected(run):
  """Token ids, and features of length 1."""
  ids = run.tokenizer(TEXTS, run.task.model.config.text.context_length)
  model = run.task.model.clone(options=run.task.model.options.__class__(dtype=jnp.float32))
  out = model.apply({"params": run.params}, images(run)[:1].repeat(len(TEXTS), 0), ids)
  return ids, out


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.interop
def test_open_clip_loads_an_export(workdir):
  open_clip = import_open_clip()
  import torch

  run = load(workdir)
  folder = export.export(workdir, "open_clip")
  model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
  ids, want = expected(run)
  tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)
  np.testing.assert_array_equal(tokens.numpy(), ids)
  picture = torch.from_numpy(images(run)[:1].transpose(0, 3, 1, 2).copy())
  with torch.no_grad():
    image, text, scale = model.eval()(picture, tokens)[:3]
  np.testing.assert_allclose(image.numpy(), want["image_features"][:1], atol=1e-5)
  np.testing.assert_allclose(text.numpy(), want["text_features"], atol=1e-5)
  np.testing.assert_allclose(scale.numpy(), want["logit_scale"], rtol=1e-6)
  assert transform.transforms[-1].mean == pytest.approx([0.48145466, 0.4578275, 0.40821073])


@pytest.mark.interop
def test_transformers_loads_an_export(workdir, tmp_path):
  import_open_clip()
  transformers = pytest.importorskip("transformers")
  import torch

  run = load(workdir)
  folder = export.export(workdir, "hf", tmp_path / "hf")
  model = transformers.CLIPModel.from_pretrained(folder).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  ids, want = expected(run)
  tokens = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt").input_ids
  last = run.tokenizer.vocab_size - 1
  np.testing.assert_array_equal(tokens == last, ids == run.tokenizer.eot_id)
  keep = tokens.numpy() != last
  np.testing.assert_array_equal(tokens.numpy()[keep], ids[keep])
  picture = torch.from_numpy(images(run)[:1].transpose(0, 3, 1, 2).copy())
  with torch.no_grad():
    out = model(input_ids=tokens, pixel_values=picture)
  np.testing.assert_allclose(out.image_embeds.numpy(), want["image_features"][:1], atol=1e-5)
  np.testing.assert_allclose(out.text_embeds.numpy(), want["text_features"], atol=1e-5)
  processor = transformers.CLIPImageProcessor.from_pretrained(folder)
  assert processor.crop_size["height"] == run.task.model.config.vision.image_size


@pytest.mark.program
@pytest.mark.parametrize(
  ("layer_scale", "loss", "scan"), [(True, "softmax", False), (False, "siglip", True)]
)
@pytest.mark.slow
def test_open_clip_s_config_has_the_parts_of_the_state_dict(workdir, layer_scale, loss, scan):
  run = load(workdir)
  options = {"model.zero_init_layer_scale": layer_scale, "model.scan": scan, "loss": loss}
  task = make_task(loop_case.config(workdir / "data", **options)).with_tokenizer(run.tokenizer)
  params = jax.jit(task.init)(jax.random.key(0, impl="unsafe_rbg"))
  files = export._open_clip(run._replace(task=task, params=params))
  model, state = files["open_clip_config.json"]["model_cfg"], files["open_clip_model.safetensors"]
  scaled = {tower for tower in ("vision_cfg", "text_cfg") if "ls_init_value" in model[tower]}
  assert scaled == ({"vision_cfg", "text_cfg"} if layer_scale else set())
  assert any(name.endswith("ls_1.gamma") for name in state) == layer_scale
  assert ("init_logit_bias" in model) == ("logit_bias" in state) == (loss == "siglip")


def refuse(*_, **__):
  raise ValueError("refused")


@pytest.mark.program
@pytest.mark.parametrize("broken", ["state_dict", "write_file"])
@pytest.mark.slow
def test_a_failed_export_changes_no_file(workdir, tmp_path, monkeypatch, broken):
  (tmp_path / "config.json").write_text("of a good export")
  monkeypatch.setattr(export, "write_file", lambda state, path: path.touch())
  monkeypatch.setattr(export, broken, refuse)
  with pytest.raises(ValueError, match="refused"):
    export.export(workdir, "hf", tmp_path)
  assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
    "config.json": "of a good export"
  }


@pytest.mark.program
@pytest.mark.slow
def test_an_export_without_a_run_or_its_tokenizer_says_what_is_missing(workdir, tmp_path, capsys):
  with pytest.raises(RunError, match=r"holds no run: it needs config.json and checkpoints"):
    export.export(tmp_path, "hf")
  with pytest.raises(ValueError, match=r"--format='onnx' must be one of open_clip, hf"):
    export.export(workdir, "onnx")
  kept = workdir / "tokenizer.json"
  text = kept.read_bytes()
  kept.unlink()
  try:
    with pytest.raises(SystemExit) as error:
      export.main([f"--workdir={workdir}", "--format=hf"])
    assert "tokenizer.json is missing: it should hold the tokenizer of the run" in str(error.value)
  finally:
    kept.write_bytes(text)
