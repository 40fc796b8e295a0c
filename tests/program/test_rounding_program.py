"""The program that measures a run's rounding: its numbers, its files, its stops, its messages."""

import json
import math
import shutil

import jax
import loop_case
import numpy as np
import pytest

from sbjax.convert.rounding import ALL, sum_group
from sbjax.convert.switches import Forward
from sbjax.interop.weights import save_weights
from sbjax.recipes import recipes_of
from train import inference
from train.rounding import __main__ as program
from train.rounding import measure, report

LAYERS = {
  f"{tower}/block_{i}/{kind}"
  for tower, blocks in (("image", 3), ("text", 2))
  for i in range(blocks)
  for kind in ("qkv", "out", "fc1", "fc2")
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  return loop_case.untrained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def workdir(trained, tmp_path):
  """A copy that a test may write to; the prepared data stay where they are."""
  return shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("data"))


@pytest.fixture
def devices(monkeypatch):
  """devices(n): JAX has only n of them."""
  every = jax.devices()

  def choose(count):
    monkeypatch.setattr(jax, "devices", lambda *_: every[:count])
    monkeypatch.setattr(jax, "device_count", lambda: count)

  choose(1)
  return choose


@pytest.fixture
def drawn(monkeypatch, devices):
  """Gradients are drawn by key, those of recipes .1 larger; counts how many are."""
  calls = []

  def make(task, *_, **__):
    recipe = task.model.options.recipe
    error = 0.1 if any(each.rounds for each in recipes_of(recipe)) else 0.0

    def differentiate(params, batch, key, scale):
      jax.debug.callback(lambda: calls.append(recipe))
      leaves, tree = jax.tree.flatten(params)
      keys = jax.random.split(key, len(leaves))
      noise = [jax.random.normal(k, x.shape) + 1 + error for k, x in zip(keys, leaves, strict=True)]
      return None, tree.unflatten(noise)

    return differentiate

  def forward(subject, recipe, batch):
    errors = dict.fromkeys(LAYERS, 0.01)
    logits = {layer: {"logits": 0.02} for layer in LAYERS}
    return Forward(errors, {"logits": 0.03}, logits, logits)

  monkeypatch.setattr(measure, "make_differentiate", make)
  monkeypatch.setattr(measure, "_forward", forward)
  return calls


def run(workdir, *arguments, out=None):
  out = out or workdir
  program.main([str(workdir), "--group=2", "--batches=6", f"--out={out}", *arguments])
  return read(out)


def read(folder):
  def refuse(constant):
    raise ValueError(f"{constant} is not JSON")

  return json.loads((folder / "rounding.json").read_text(), parse_constant=refuse)


def test_each_layer_of_a_run_is_measured_drawn_and_printed(workdir, devices, capsys):
  found = run(workdir, "--recipes", "switchback", "--layers=3")
  results, forward = found["results"]["switchback"], found["forward"]["switchback"]
  assert {*results} == {*LAYERS, ALL}
  assert {*forward["products"]} == {*forward["alone"]} == {*forward["without"]} == LAYERS
  for layer in results:
    value, low, high = results[layer]["error"]
    assert 0 <= low <= value <= high and 0 < value < 0.5, layer
  assert all(0 < error < 0.05 for error in forward["products"].values())
  assert all(0 < forward["outputs"][name] < 0.2 for name in ("image", "text", "logits"))
  assert (workdir / "rounding.png").read_bytes()[:4] == b"\x89PNG"
  printed = capsys.readouterr().out
  worst = sorted(LAYERS, key=lambda layer: results[layer]["critical_batch"][0] or math.inf)
  assert [printed.count(f"  {layer} ") for layer in worst] == [1] * 3 + [0] * 17


def test_gradients_on_a_mesh_are_those_of_one_device(workdir, devices, monkeypatch):
  def squares(count):
    devices(count)
    options = program.parser().parse_args([str(workdir)])
    subject = program.subject_of(options, {}, workdir)
    assert subject.run.mesh.size == count
    gradients = measure._Gradients(subject, ["switchback"])
    return sum_group(gradients.of("full"), {}, gradients.batches(1, 2)).gradient

  alone, together = squares(1), squares(4)
  assert {*alone} == LAYERS
  for layer in LAYERS:
    np.testing.assert_allclose(together[layer], alone[layer], rtol=1e-3)


def test_batches_are_those_that_training_takes_after_the_checkpoint(workdir, devices):
  subject = program.subject_of(program.parser().parse_args([str(workdir)]), {}, workdir)
  gradients, source = measure._Gradients(subject, []), subject.run.source
  iterator = source.train_iterator(subject.run.tokenizer, **subject.run.task.example_sizes)
  stream = [next(iterator)["text"] for _ in range(6)]
  for first in (0, 2):
    for i, (batch, step) in enumerate(gradients.batches(first, 2)):
      assert step == 2 + first + i  # The run has taken two steps.
      np.testing.assert_array_equal(batch["text"], stream[2 + first + i])


def test_the_names_of_layers_do_not_depend_on_the_layout(trained, devices):
  params = inference.load(trained).params
  stacked, unrolled = (measure._kernels(p) for p in (params, measure.unstack_blocks(params)))
  assert {*stacked} == {*unrolled} == LAYERS
  for layer in LAYERS:
    np.testing.assert_array_equal(stacked[layer], unrolled[layer])


def test_a_stopped_measurement_continues_to_the_same_numbers(workdir, tmp_path, drawn, monkeypatch):
  whole = run(workdir, out=tmp_path / "whole")
  jax.effects_barrier()
  assert len(drawn) == 2 * 6
  write = measure._write

  def killed(path, measured):
    write(path, measured)
    if len(measured.groups) == 2:
      raise KeyboardInterrupt

  monkeypatch.setattr(measure, "_write", killed)
  with pytest.raises(SystemExit):
    run(workdir)
  monkeypatch.setattr(measure, "_write", write)
  drawn.clear()
  assert run(workdir) == whole
  jax.effects_barrier()
  assert len(drawn) == 2 * 2
  drawn.clear()
  assert run(workdir) == whole and not drawn


def test_recipes_and_batches_add_to_what_is_there(workdir, drawn):
  before = run(workdir)
  found = run(workdir, "--recipes", "switchback_q", "switchback")
  assert found["results"]["switchback"] == before["results"]["switchback"]
  drawn.clear()
  found = run(workdir, "--recipes", "switchback", "--batches=8")
  jax.effects_barrier()
  assert len(drawn) == 2 * 2  # Only those of the fourth group.
  assert [{*group["errors"]} for group in found["groups"]][2:] == [
    {"switchback", "switchback_q"}, {"switchback"}
  ]  # fmt: skip


def test_another_measurement_in_the_folder_starts_anew_and_says_so(workdir, drawn, capsys):
  run(workdir)
  found = run(workdir, "--batch_size=16")
  said = capsys.readouterr().err
  assert "was of another measurement (batch_size 8): it is measured anew" in said
  assert found["about"]["batch_size"] == 16 and len(found["groups"]) == 3


def test_a_critical_batch_that_is_not_measurable_is_at_least_its_bound():
  rounding = report.Rounding(
    *[report.Estimate(0.1, 0, 0.2)] * 2, report.Estimate(math.inf, 12345, math.inf)
  )
  assert report._cells(rounding)[0] == "at least 12,000 pairs"


def test_weights_are_measured_on_the_data_of_a_config(trained, tmp_path, drawn):
  pytest.importorskip("safetensors", reason="the extra `interop` is not installed")
  model = inference.load(trained)
  weights, config = tmp_path / "weights.safetensors", tmp_path / "config.py"
  save_weights(model.params, weights, model.task.model.config)
  config.write_text(
    "from configs import quickstart\n"
    "def get_config():\n"
    "  config = quickstart.get_config()\n"
    f"  config.data.name, config.data.data_dir = 'shapes/tiny', {str(trained / 'data')!r}\n"
    "  config.batch_size, config.model.image_size, config.model.context_length = 8, 32, 16\n"
    "  return config\n"
  )
  out = tmp_path / "out"
  found = run(weights, f"--config={config}", out=out)
  assert found["about"]["step"] is None and {*found["results"]["switchback"]} == {*LAYERS, ALL}


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--recipes", "full"], "'full' rounds nothing, so there is nothing to measure"),
    (["--recipes", "*=full"], "'*=full' rounds nothing"),
    (["--recipes", "int9"], "Unknown recipe 'int9'"),
    (["--recipes", "*/nothing=full, *=switchback"], "'*/nothing' fits no linear layer"),
    (["--batches=4"], "--batches=4 in groups of --group=2 are too few for an interval"),
    (["--group=1"], "too few for an interval: it needs 3 groups of 2 or more"),
    (["--config=configs/quickstart.py"], "has its own config"),
    (["--batch_size=1000000"], "more than the"),
    (["--config.data.data_dir=/dev/null/none"], "/dev/null"),
    (["--config.stesp=1"], "Did you mean steps?"),
  ],
  ids=str,
)
def test_bad_input_is_one_message(workdir, drawn, capsys, arguments, message):
  with pytest.raises(SystemExit) as raised:
    program.main([str(workdir), "--group=2", "--batches=6", *arguments])
  said = f"{raised.value.code}{capsys.readouterr().err}"
  assert message in said and "Traceback" not in said


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("none", None, "holds no run: it needs config.json and a checkpoint, or be weights"),
    ("w.safetensors", "", "needs --config=FILE, with its model and data"),
  ],
)
def test_what_is_no_run_and_no_weights_is_one_message(tmp_path, capsys, name, text, message):
  path = tmp_path / name
  if text is not None:
    path.write_text(text)
  with pytest.raises(SystemExit):
    program.main([str(path)])
  assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '{"about": 1}'])
def test_a_damaged_file_is_named(workdir, drawn, capsys, text):
  (workdir / "rounding.json").write_text(text)
  with pytest.raises(SystemExit):
    program.main([str(workdir), "--group=2", "--batches=6"])
  assert "rounding.json is damaged: delete it" in capsys.readouterr().err
