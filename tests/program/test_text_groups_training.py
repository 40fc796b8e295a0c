"""A run trains on captions in groups of lengths: the same numbers, on any mesh, and resumed."""

import json
import signal

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import pytest
from clip_case import clip
from clip_case import compiled as jit
from pairwise import mainly
from test_step import MICRO, batch, make_state
from test_stop import at_step, measured, send, stopped

from sbjax.models.text_groups import choose_groups, token_count
from train import loop, run, task
from train.config import MeshConfig, OptimizerConfig
from train.errors import RunError
from train.optimizer import make_optimizer
from train.parallel.sharding import batch_sharding, make_mesh, replicated
from train.step import make_fits, make_train_step
from train.task import CLIPTask

LONG = {"model.context_length": 40}  # of captions of five tokens or so


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def train(monkeypatch, data_dir):
  return loop_case.trainer(monkeypatch, data_dir, measured)


def shortened(mesh, lengths):
  """A batch whose texts end at these lengths, repeated."""
  made = {name: np.array(x) for name, x in batch(mesh).items()}
  for i, row in enumerate(made["text"]):
    row[lengths[i % len(lengths)] - 1] = MICRO.text.eot_id
  return jax.device_put(made, batch_sharding(mesh))


@pytest.mark.standard_promotion  # As optax needs.
@pytest.mark.parametrize(
  ("data", "fsdp", "accumulate"), mainly([(2, 2, 2)], [(1, 1, 1), (1, 1, 4), (2, 2, 2), (1, 8, 1)])
)
def test_a_step_in_groups_equals_a_step_over_all_positions(data, fsdp, accumulate):
  mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
  plain = CLIPTask(clip(MICRO, recipe="full", dtype=jnp.float32))
  rows = 16 // (data * fsdp * accumulate)
  grouped = plain._replace(text_groups=((3, rows // 2), (8, rows - rows // 2)))
  fits = make_fits(grouped, accumulate, mesh)
  # Rows i and i + accumulate of a device are in one microbatch.
  texts = shortened(mesh, accumulate * [3] + accumulate * [8])
  assert fits(texts) and not fits(shortened(mesh, [4, 8, 8, 8]))
  optimizer, _ = make_optimizer(OptimizerConfig(learning_rate=1e-3, warmup_steps=1, eps=1e-3), 10)
  found = []
  for each in (plain, grouped):
    state, shardings = make_state(each, optimizer, mesh)
    step = jit(
      make_train_step(each, optimizer, 0, accumulate, mesh=mesh),
      in_shardings=(shardings, batch_sharding(mesh)),
      out_shardings=(shardings, replicated(mesh), replicated(mesh)),
    )
    after, metrics, finite = step(state, texts)
    assert np.asarray(finite).all()
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.params, state.params)
    found.append((metrics, jax.tree.leaves(moved)))
  (all_metrics, everything), (metrics, in_groups) = found
  for name in ("loss", "gradient_norm"):
    np.testing.assert_allclose(metrics[name], all_metrics[name], rtol=2e-6)
  for one, other in zip(in_groups, everything, strict=True):
    assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)


def counting(made):
  """Steps of additions; `made` gets the groups of each step that is taken."""

  def make(run):
    step, groups = loop_case.adding_step(run), run.task.text_groups

    def call(state, batch):
      if not isinstance(state.step, jax.core.Tracer):
        made.append(groups)
      return step(state, batch)

    return call

  return make


def test_a_run_measures_its_captions_and_says_its_groups(train, tmp_path, monkeypatch, capsys):
  made = []
  monkeypatch.setattr(loop, "jit_train_step", counting(made))
  train(tmp_path, **LONG)
  counts = json.loads((tmp_path / "caption_lengths.json").read_text())["captions"]
  assert len(counts) == 40 and sum(counts) > 100
  groups = choose_groups(counts, 8, at_most=4)
  assert made == 4 * [groups] and len(groups) > 1
  each = token_count(groups) / 8
  assert f" tokens: {each:.1f} each in place of 40\n" in capsys.readouterr().out
  assert [r["ungrouped_share"] for r in loop_case.records(tmp_path) if "loss" in r] == 4 * [0]


def test_captions_that_do_not_fit_take_the_whole_step(train, tmp_path, monkeypatch):
  made = []
  monkeypatch.setattr(loop, "jit_train_step", counting(made))

  def halves(counts, rows, **_):
    median = int(np.searchsorted(np.cumsum(counts), sum(counts) / 2)) + 1
    return (median, rows // 2), (len(counts), rows // 2)

  monkeypatch.setattr(task, "choose_groups", halves)
  fits = []

  def recording(*args):
    of_batch = make_fits(*args)
    return lambda batch: fits.append(of_batch(batch)) or fits[-1]

  monkeypatch.setattr(loop, "make_fits", recording)
  train(tmp_path / "plain", **LONG, steps=8, **{"model.text_groups": 1})
  made.clear()
  train(tmp_path / "run", **LONG, steps=8)
  assert [bool(groups) for groups in made] == [bool(each) for each in fits[:8]]
  assert 0 < sum(map(bool, fits[:8])) < 8
  records = {
    name: [r for r in loop_case.records(tmp_path / name) if "loss" in r]
    for name in ("run", "plain")
  }
  assert [r["loss"] for r in records["run"]] == [r["loss"] for r in records["plain"]]
  shares = [r["ungrouped_share"] for r in records["run"]]
  assert shares[-1] == 1 - np.mean(fits[:8])


def test_a_run_that_resumes_has_the_groups_of_its_start(train, tmp_path, monkeypatch):
  whole = train(tmp_path / "whole", **LONG)
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, lambda: send(signal.SIGTERM)))
  stopped(train, tmp_path / "run", **LONG)
  before = (tmp_path / "run" / "caption_lengths.json").read_text()
  # Other data than at the start, such as further shards, change nothing.
  monkeypatch.setattr(
    run, "caption_lengths", lambda captions, *args: ORIGINAL(iter(["a " * 30]), *args)
  )
  monkeypatch.setattr(loop, "jit_train_step", loop_case.adding_step)
  assert train(tmp_path / "run", **LONG) == whole
  assert (tmp_path / "run" / "caption_lengths.json").read_text() == before


ORIGINAL = run.caption_lengths


@pytest.mark.parametrize("text", ["", "{}", '{"captions": [1, 2]}', '{"captions": 3}'])
def test_a_damaged_file_of_lengths_is_named(train, tmp_path, monkeypatch, text):
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, lambda: send(signal.SIGTERM)))
  stopped(train, tmp_path, **LONG)
  (tmp_path / "caption_lengths.json").write_text(text)
  with pytest.raises(RunError, match=r"caption_lengths.json should hold 40 numbers.*Delete it"):
    train(tmp_path, **LONG)


def test_one_group_is_none(train, tmp_path, monkeypatch):
  made = []
  monkeypatch.setattr(loop, "jit_train_step", counting(made))
  train(tmp_path, **LONG, **{"model.text_groups": 1})
  assert made == 4 * [()] and not (tmp_path / "caption_lengths.json").exists()
