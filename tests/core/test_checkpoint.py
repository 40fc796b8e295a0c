import dataclasses
import gc
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import MICRO
from pairwise import mainly

from sbjax.models.clip import CLIP
from train.checkpoint import Checkpointer, older
from train.config import MeshConfig, OptimizerConfig
from train.errors import RunError
from train.optimizer import make_optimizer, matrix_dtype
from train.parallel.sharding import batch_sharding, make_mesh, replicated, state_shardings
from train.step import make_init
from train.task import CLIPTask

# When one of orbax's readers meets a damaged file, it does not await the others.
pytestmark = [
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
  pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


@pytest.fixture
def state():
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  kernel = jax.random.normal(jax.random.key(0), (64, 32))
  yield {
    "kernel": jax.device_put(kernel, batch_sharding(mesh)),
    "half": jax.device_put(kernel.astype(jnp.bfloat16), replicated(mesh)),
    "count": jax.device_put(jnp.int32(7), replicated(mesh)),
  }
  gc.collect()


def shapes(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def after(state, step):
  return jax.tree.map(lambda x: x + x.dtype.type(step), state)


def save(directory, state, steps, keep=3):
  checkpointer = Checkpointer(directory, keep)
  for step in steps:
    checkpointer.save(step, after(state, step), {"at": step})
  checkpointer.wait()
  checkpointer.close()


def restore(directory, state, **options):
  checkpointer = Checkpointer(directory, 3, **options)
  try:
    return checkpointer.restore(shapes(state))
  finally:
    checkpointer.close()


def files(directory, step):
  """The data files of a step's state, largest first."""
  paths = [p for p in (directory / str(step) / "state").rglob("*") if p.is_file()]
  return sorted(paths, key=lambda p: p.stat().st_size, reverse=True)


def truncate(directory, step):
  for path in files(directory, step)[:3]:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete_state(directory, step):
  for path in files(directory, step):
    path.unlink()


def flip_bits(directory, step):
  for path in files(directory, step)[:3]:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(bytes(data))


def take_the_state_before(directory, step):
  """The files of another step, undamaged: only checksums show the difference."""
  shutil.rmtree(directory / str(step) / "state")
  shutil.copytree(directory / str(step - 1) / "state", directory / str(step) / "state")


def test_a_restored_state_is_bit_equal_with_the_same_sharding(tmp_path, state):
  save(tmp_path, state, [5])
  restored = restore(tmp_path, state)
  assert (restored.step, restored.data) == (5, {"at": 5})
  for name, value in state.items():
    np.testing.assert_array_equal(restored.state[name], after(value, 5))
    assert restored.state[name].sharding == value.sharding


MESHES = {  # devices, fsdp: before and after
  "2 to 1": ((2, 1), (1, 1)),
  "data to fsdp": ((2, 1), (2, 2)),
  "1 to 8": ((1, 1), (8, 4)),
  "8 to 2": ((8, 8), (2, 2)),
}


def micro_state(devices, fsdp):
  """Parameters and optimizer state of a CLIP, random, laid out as training lays them out."""
  mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:devices])
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  task = CLIPTask(CLIP(dataclasses.replace(MICRO, embed_dim=32)))
  abstract = jax.eval_shape(make_init(task, optimizer, 0))
  shardings = state_shardings(abstract, abstract.params, mesh)
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x, s: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), s), abstract, shardings
  )


MAIN = [MESHES["data to fsdp"], MESHES["1 to 8"]]


@pytest.mark.parametrize(("before", "after"), mainly(MAIN, MESHES.values()), ids=MESHES)
def test_a_state_restored_on_another_mesh_is_bit_equal(tmp_path, before, after):
  saved, like = micro_state(*before), micro_state(*after)
  checkpointer = Checkpointer(tmp_path, 3)
  checkpointer.save(7, saved, {"batches": 7})
  checkpointer.close()
  restored = restore(tmp_path, like)
  assert (restored.step, restored.data) == (7, {"batches": 7})
  assert jax.tree.structure(restored.state) == jax.tree.structure(saved)
  split = 0
  for there, here, place in zip(*map(jax.tree.leaves, (saved, restored.state, like)), strict=True):
    np.testing.assert_array_equal(there, here)
    assert here.sharding == place.sharding
    split += here.sharding.shard_shape(here.shape) != here.shape
  assert (split > 20) == (after[1] > 1)


@pytest.mark.parametrize(
  ("states", "ema"),
  mainly(
    [("coat", 0.0), ("float32", 0.9)],
    [
      *((s, 0.0) for s in ("coat", "fp8_lm", "bfloat16", "collage_light", "collage_plus")),
      *(("float32", 0.9), ("collage_plus", 0.9)),
    ],
  ),
)
def test_training_goes_on_from_any_state_with_the_same_bits(tmp_path, states, ema):
  mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1, states=states, ema=ema), 10)
  task = CLIPTask(CLIP(MICRO), matrix_dtype=matrix_dtype(states))
  abstract = jax.eval_shape(make_init(task, optimizer, 0))
  shardings = state_shardings(abstract, abstract.params, mesh)
  rng = np.random.default_rng(0)

  def draw():
    return jax.tree.map(
      lambda x, s: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), s),
      abstract.params,
      shardings.params,
    )

  params, gradients = draw(), [draw() for _ in range(4)]
  with jax.numpy_dtype_promotion("standard"):
    init = jax.jit(optimizer.init, out_shardings=shardings.opt_state)
    update = jax.jit(optimizer.update, out_shardings=(shardings.params, shardings.opt_state))
    state = init(params)
    for step, g in enumerate(gradients):
      if step == 2:
        checkpointer = Checkpointer(tmp_path, 3)
        checkpointer.save(step, state, {})
        checkpointer.close()
      updates, state = update(g, state, params)
    again = restore(tmp_path, state).state
    for g in gradients[2:]:
      updates_again, again = update(g, again, params)
  narrow = sum(x.dtype.itemsize < 4 for x in jax.tree.leaves(again))
  assert narrow == 0 if states == "float32" else narrow >= 8
  for a, b in zip(*map(jax.tree.leaves, ((updates, state), (updates_again, again))), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.sharding == b.sharding and a.dtype == b.dtype


def test_an_empty_directory_restores_nothing(tmp_path, state):
  assert restore(tmp_path, state) is None


@pytest.mark.parametrize(
  "name", ["run[1]", "a*", "a?", "a**b", "[", "{a,b}", "a\nb", "\u732b", "%41"]
)
def test_a_folder_s_name_is_no_pattern(tmp_path, state, name):
  (tmp_path / "a1").mkdir()
  save(tmp_path / name, state, [1, 2])
  restored = restore(tmp_path / name, state)
  np.testing.assert_array_equal(restored.state["kernel"], after(state, 2)["kernel"])
  assert not list((tmp_path / "a1").iterdir())


def test_the_newest_steps_are_kept(tmp_path, state):
  save(tmp_path, state, [1, 2, 3, 4], keep=2)
  assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["3", "4"]


def steps_that_stay(directory, state, scores, **options):
  """The steps on disk after steps 1 to len(scores), each evaluated after its save."""
  checkpointer = Checkpointer(directory, **options)
  for step, score in enumerate(scores, start=1):
    checkpointer.save(step, after(state, step), {})
    checkpointer.wait()
    checkpointer.scored(step, {"top1": score, "loss": 10 - score, "other": step})
  checkpointer.close()
  return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


@pytest.mark.parametrize(
  ("options", "stay"),
  [
    ({"best": "top1", "keep": 2}, [2, 5, 6]),
    ({"best": "loss", "keep": 1}, [2, 6]),
    ({"best": "missing", "keep": 1}, [6]),
    ({"keep_every": 3, "keep": 1}, [3, 6]),
    ({"keep_every": 4, "best": "top1", "keep": 1}, [2, 4, 6]),
  ],
)
def test_the_best_and_every_nth_stay_beside_the_newest(tmp_path, state, options, stay):
  scores = [0.5, 0.7, 0.6, 0.1, 0.2, 0.3]
  assert steps_that_stay(tmp_path, {"count": state["count"]}, scores, **options) == stay
  assert restore(tmp_path, {"count": state["count"]}).step == 6


def test_a_better_score_frees_the_checkpoint_that_was_the_best(tmp_path, state):
  scores = [0.7, 0.1, 0.8, 0.1, 0.8, 0.1, 0.1]
  small = {"count": state["count"]}
  assert steps_that_stay(tmp_path, small, scores, best="top1") == [5, 7]


@pytest.mark.parametrize("damage", [truncate, delete_state, flip_bits, take_the_state_before])
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path, state, damage, capfd):
  save(tmp_path, state, [1, 2])
  damage(tmp_path, 2)
  restored = restore(tmp_path, state)
  assert (restored.step, restored.data) == (1, {"at": 1})
  said = capfd.readouterr().err
  assert "step 2" in said
  assert "Falling back to the checkpoint of step 1" in said
  save(tmp_path, state, [2])  # Step 2 can be written again.
  assert restore(tmp_path, state).step == 2


def test_a_second_damage_of_the_same_step_falls_back_too(tmp_path, state):
  save(tmp_path, state, [1])
  for _ in range(3):
    save(tmp_path, state, [2])
    truncate(tmp_path, 2)
    assert restore(tmp_path, state).step == 1
  assert {p.name for p in tmp_path.glob("damaged*")} == {"damaged-2", "damaged-2-2", "damaged-2-3"}


def test_a_reader_falls_back_but_changes_nothing(tmp_path, state, capfd):
  save(tmp_path, state, [1, 2])
  truncate(tmp_path, 2)
  before = sorted(tmp_path.rglob("*"))
  assert restore(tmp_path, state, read_only=True).step == 1
  assert sorted(tmp_path.rglob("*")) == before
  assert "step 2 cannot be read" in capfd.readouterr().err


def test_a_reader_takes_a_newer_checkpoint_when_training_deletes_the_one_it_reads(
  tmp_path, state, monkeypatch, capfd
):
  save(tmp_path, state, [1, 2])
  whole = Checkpointer._restore

  def restore_late(self, step, like):
    if step == 2:
      save(tmp_path, state, [3, 4], keep=2)
    return whole(self, step, like)

  monkeypatch.setattr(Checkpointer, "_restore", restore_late)
  assert restore(tmp_path, state, read_only=True).step == 4
  assert capfd.readouterr().err == ""


def test_a_save_makes_a_deleted_folder_again(tmp_path, state):
  directory = tmp_path / "checkpoints"
  checkpointer = Checkpointer(directory, 2)
  for step in (1, 2, 3, 4):
    checkpointer.save(step, after(state, step), {"at": step})
    checkpointer.wait()
    if step == 2:
      shutil.rmtree(directory)
      assert checkpointer.describe_newest_on_disk() == "none"
  checkpointer.close()
  assert sorted(path.name for path in directory.iterdir()) == ["3", "4"]
  assert restore(directory, state).step == 4


def test_checkpoints_of_another_model_raise_an_error_and_are_not_deleted(tmp_path, state):
  save(tmp_path, state, [1])
  with pytest.raises(RunError, match="written with another model"):
    restore(tmp_path, {**state, "kernel": state["kernel"].T})
  assert restore(tmp_path, state).step == 1


def test_one_step_of_several_is_restored_or_missed_by_name(tmp_path, state):
  save(tmp_path, state, [1, 2, 3])
  checkpointer = Checkpointer(tmp_path, read_only=True)
  assert checkpointer.restore(shapes(state), 2).data == {"at": 2}
  with pytest.raises(RunError, match="has no checkpoint of step 4: it has 1, 2, 3"):
    checkpointer.restore(shapes(state), 4)
  truncate(tmp_path, 2)
  with pytest.raises(RunError, match="can be restored: step 2: "):
    checkpointer.restore(shapes(state), 2)
  checkpointer.close()


def assert_writing_fails(directory, state, message):
  checkpointer = Checkpointer(directory, 3)
  with pytest.raises(RunError, match=message) as raised:
    checkpointer.save(2, after(state, 2), {"at": 2})
    checkpointer.wait()
  assert f"The last good one is step 1 in {directory}" in str(raised.value)
  checkpointer.close()


def assert_nothing_is_lost(directory, state):
  assert [p.name for p in directory.iterdir() if p.name[0].isdigit()] == ["1"]
  assert restore(directory, state).step == 1
  save(directory, state, [2])
  restored = restore(directory, state)
  np.testing.assert_array_equal(restored.state["kernel"], after(state, 2)["kernel"])


def test_a_full_disk_is_reported_before_the_write_and_loses_nothing(tmp_path, state, monkeypatch):
  save(tmp_path, state, [1])
  usage = shutil.disk_usage(tmp_path)
  with monkeypatch.context() as full:
    full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert_writing_fails(tmp_path, state, "No space left on device: the checkpoint of step 2")
  assert_nothing_is_lost(tmp_path, state)


def test_what_a_failed_write_still_makes_is_removed_too(tmp_path, monkeypatch):
  unfinished, remove, calls = tmp_path / "2.orbax-checkpoint-tmp", shutil.rmtree, []
  unfinished.mkdir()

  def removing(path, **options):
    calls.append(path)
    if len(calls) > 2:  # A file that comes meanwhile keeps its folder.
      remove(path, **options)

  monkeypatch.setattr(shutil, "rmtree", removing)
  Checkpointer(tmp_path).close()
  assert not unfinished.exists() and len(calls) == 3


def test_a_failed_write_is_reported_and_loses_nothing(tmp_path, state):
  save(tmp_path, state, [1])
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
  try:
    assert_writing_fails(tmp_path, state, "Could not write a checkpoint .* File too large")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert_nothing_is_lost(tmp_path, state)


@pytest.mark.parametrize("freeze", [pytest.param((), marks=pytest.mark.slow), ("image/.*",)])
def test_a_checkpoint_with_an_rms_for_each_parameter_is_restored(tmp_path, freeze):
  """Earlier versions had the RMS in a tree like the parameters."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  task = CLIPTask(CLIP(MICRO))
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10, freeze)
  state = jax.jit(make_init(task, optimizer, 0))()
  like = shapes(jax.tree.map(jax.device_put, state, state_shardings(state, state.params, mesh)))
  before = jax.tree.map(
    lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), older(like)
  )
  assert jax.tree.structure(before) != jax.tree.structure(state)
  save(tmp_path, before, [1])
  restored = Checkpointer(tmp_path, 3).restore(like).state
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.full(y.shape, 2)), restored, like)
  assert [x.sharding for x in jax.tree.leaves(restored)] == [
    x.sharding for x in jax.tree.leaves(like)
  ]
