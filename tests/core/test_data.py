"""The stream of batches: its contents, how it resumes, and its errors."""

import contextlib
import dataclasses
import io
import itertools
import json
import threading
import types

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from train.config import Config, DataConfig, MeshConfig, ModelConfig
from train.data import prepared
from train.data.prefetch import prefetch_to_device
from train.data.prepared import Prepared
from train.data.source import open_source
from train.data.tokenizer import make_tokenizer
from train.parallel.sharding import batch_sharding, make_mesh

SIZE, LENGTH = 24, 16


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return str(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data_dir):
  """80 batches of 24 are 8 epochs of the 240 examples of shapes/tiny."""
  data_config = DataConfig(name="shapes/tiny", data_dir=data_dir, label_key="label", prefetch=2)
  return Config(model=ModelConfig(size="test"), data=data_config, batch_size=24, seed=3)


@pytest.fixture
def source(config):
  return open_source(config)


@pytest.fixture(scope="module")
def tokenizer():
  return make_tokenizer("bpe", ["a red circle", "there is an image of a large blue star"], 300)


@pytest.fixture
def stream(config, source, tokenizer):
  """stream(**kwargs) makes a train iterator, closed at the end of the test."""
  made = []

  def make(image_size=SIZE, **kwargs):
    sizes = {"image_size": image_size, "context_length": LENGTH}
    made.append(source.train_iterator(tokenizer, **sizes, **kwargs))
    return made[-1]

  yield make
  for iterator in made:
    iterator.close()


def take(iterator, count):
  return list(itertools.islice(iterator, count))


def assert_equal(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert a.keys() == b.keys()
    for name in a:
      np.testing.assert_array_equal(a[name], b[name])


@dataclasses.dataclass
class Keys:
  """A fake data set of `count` distinct examples: every pixel of image i is i."""

  count: int
  data_dir = "nowhere"

  @property
  def info(self):
    splits = {"train": types.SimpleNamespace(num_examples=self.count)}
    return types.SimpleNamespace(splits=splits, full_name="keys/1.0.0", features={}, metadata=None)

  def records(self):
    stored = tfds.features.FeaturesDict(
      {"image": tfds.features.Image(), "captions": tfds.features.Sequence(tfds.features.Text())}
    )
    return [
      stored.serialize_example({"image": self.image(i), "captions": [f"{i}", f"other {i}"]})
      for i in range(self.count)
    ]

  def image(self, i):
    return _png(np.full((4, 4, 3), i, np.uint8))


def _png(array):
  file = io.BytesIO()
  Image.fromarray(array).save(file, "png")
  return file.getvalue()


@pytest.fixture(autouse=True)
def records_of_keys(monkeypatch):
  read = prepared.Records

  def records(builder, split):
    return builder.records() if isinstance(builder, Keys) else read(builder, split)

  monkeypatch.setattr(prepared, "Records", records)


@pytest.fixture
def keys(config, tokenizer):
  """keys(steps, **kwargs): for each step the indices of the batch, out of 48 examples."""
  config.data.label_key = ""

  def make(steps, builder=None, **kwargs):
    iterator = Prepared(config, builder or Keys(48)).train_iterator(
      tokenizer, image_size=4, context_length=LENGTH, **kwargs
    )
    batches = [batch["image"][:, 0, 0, 0].tolist() for batch in take(iterator, steps)]
    iterator.close()
    return batches

  return make


def test_batches_are_images_and_token_ids(stream, tokenizer):
  batch = next(stream())
  assert batch["image"].dtype == np.uint8
  assert batch["image"].shape == (24, SIZE, SIZE, 3)
  assert batch["text"].dtype == np.int32
  assert batch["text"].shape == (24, LENGTH)
  assert (batch["text"][:, 0] == tokenizer.sot_id).all()


def test_an_epoch_is_a_permutation_and_epochs_differ(keys):
  steps = keys(4)  # two epochs of two batches
  epochs = [steps[0] + steps[1], steps[2] + steps[3]]
  for epoch in epochs:
    assert sorted(epoch) == list(range(48))
    assert epoch != sorted(epoch)
  assert epochs[0] != epochs[1]


def test_the_seed_decides_the_order(keys, config):
  first = keys(2)
  assert keys(2) == first
  config.seed += 1
  assert keys(2) != first


def test_examples_of_a_batch_are_distinct(keys, config):
  config.batch_size = 20  # 8 of the 48 are left out of each epoch.
  for batch in keys(6):
    assert len(set(batch)) == 20


def test_process_batches_concatenate_to_the_whole_batch(keys):
  whole = keys(6)
  parts = [keys(6, process_index=i, process_count=3) for i in range(3)]
  for batch, *shares in zip(whole, *parts, strict=True):
    assert all(len(share) == 8 for share in shares)
    assert list(itertools.chain(*shares)) == batch


def test_a_process_s_rows_equal_those_of_the_one_process_batch(stream):
  whole = take(stream(), 3)
  part = take(stream(process_index=1, process_count=2), 3)
  assert_equal([{name: values[12:] for name, values in batch.items()} for batch in whole], part)


def test_captions_and_crops_vary_between_epochs(stream, config):
  config.batch_size = 240
  first, second = take(stream(), 2)
  assert not np.array_equal(np.unique(first["text"], axis=0), np.unique(second["text"], axis=0))
  images = [set(map(bytes, batch["image"])) for batch in (first, second)]
  assert len(images[0] & images[1]) < 24  # Crops of 90 to 100 % rarely coincide.


def test_each_caption_of_an_image_is_drawn(config, tokenizer):
  config.data.label_key, config.batch_size = "", 8
  iterator = Prepared(config, Keys(8)).train_iterator(
    tokenizer, image_size=4, context_length=LENGTH
  )
  rows = [batch["text"] for batch in take(iterator, 20)]
  iterator.close()
  assert len(np.unique(np.concatenate(rows), axis=0)) == 16  # two captions of eight images


@pytest.mark.parametrize("at", [0, 1, 11])
def test_resuming_gives_bit_equal_batches(stream, at):
  whole = take(stream(), 14)
  iterator = stream()
  take(iterator, at)
  state = json.loads(json.dumps(iterator.get_state()))
  take(iterator, 2)  # Batches after the checkpoint are repeated.
  resumed = stream()
  resumed.set_state(state)
  assert_equal(take(resumed, 14 - at), whole[at:])
  iterator.set_state(state)
  assert_equal(take(iterator, 14 - at), whole[at:])


def test_a_stage_of_other_images_goes_on_with_any_number_of_processes(stream):
  whole, small = take(stream(), 14), stream(image_size=16, process_count=2)
  texts = [batch["text"] for batch in take(small, 11)]  # 10 batches are an epoch.
  np.testing.assert_array_equal(texts, [batch["text"][:12] for batch in whole[:11]])
  resumed = stream()
  resumed.set_state(json.loads(json.dumps(small.get_state())))
  assert_equal(take(resumed, 3), whole[11:])


@pytest.mark.program
def test_worker_processes_change_neither_batches_nor_state(stream, config):
  whole = take(stream(), 9)
  config.data.workers = 2
  iterator = stream()
  assert_equal(take(iterator, 5), whole[:5])
  state = iterator.get_state()
  iterator.close()
  config.data.workers = 0
  resumed = stream()
  resumed.set_state(state)
  assert_equal(take(resumed, 4), whole[5:])


class Photos(Keys):
  """A fake data set of noisy JPEGs, large enough to crop."""

  def image(self, i):
    file = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 256, (40 + i, 60, 3), np.uint8)
    Image.fromarray(pixels).save(file, "jpeg")
    return file.getvalue()


@pytest.mark.slow
def test_crops_of_photos_depend_only_on_seed_and_step(config, tokenizer):
  config.data.label_key, config.data.crop_scale, config.data.flip = "", (0.4, 1.0), True

  def batches(steps, workers=0, prefetch=2, **kwargs):
    config.data.workers, config.data.prefetch = workers, prefetch
    with contextlib.closing(
      Prepared(config, Photos(48)).train_iterator(
        tokenizer, image_size=10, context_length=8, **kwargs
      )
    ) as iterator:
      return take(iterator, steps)

  whole = batches(5)
  assert len(np.unique(np.concatenate([batch["image"] for batch in whole]), axis=0)) > 100
  assert_equal(batches(5, workers=1), whole)
  assert_equal(batches(5, prefetch=8), whole)  # Threads, each with a resizer
  part = batches(5, process_index=1, process_count=2)
  assert_equal(part, [{name: values[12:] for name, values in batch.items()} for batch in whole])
  config.seed += 1
  assert not np.array_equal(batches(1)[0]["image"], whole[0]["image"])


@pytest.mark.program
def test_an_error_in_a_worker_says_which_example(config, tokenizer):
  config.data.label_key, config.data.workers = "", 1
  iterator = Prepared(config, Broken(24)).train_iterator(
    tokenizer, image_size=4, context_length=LENGTH
  )
  with pytest.raises(ValueError, match=r"image of shapes/tiny train\[7\] cannot be decoded"):
    next(iterator)
  iterator.close()


class Broken(Keys):
  def image(self, i):
    return b"no image" if i == 7 else super().image(i)


def test_the_position_is_saved_with_grains_orbax_handler(stream, tmp_path):
  iterator = stream()
  take(iterator, 3)
  handler = grain.checkpoint.CheckpointHandler()
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(tmp_path / "data", args=grain.checkpoint.CheckpointSave(iterator))
    resumed = stream()
    checkpointer.restore(tmp_path / "data", args=grain.checkpoint.CheckpointRestore(resumed))
  assert_equal([next(resumed)], [next(iterator)])


@pytest.mark.parametrize("size", [0, 1, 4])
def test_prefetching_returns_the_state_after_each_batch(stream, size):
  whole = take(stream(), 6)
  ahead = prefetch_to_device(stream(), jax.device_put, size)
  given = take(ahead, 4)
  ahead.close()
  assert_equal([batch for batch, _ in given], whole[:4])
  for i, (_, state) in enumerate(given):
    resumed = stream()
    resumed.set_state(state)
    assert_equal([next(resumed)], [whole[i + 1]])


def test_prefetching_splits_the_batch_over_the_devices(stream, source):
  mesh = make_mesh(MeshConfig())
  sharding = batch_sharding(mesh)
  ahead = prefetch_to_device(stream(), source.to_devices(mesh), 2)
  batch, _ = next(ahead)
  ahead.close()
  assert batch["image"].sharding == sharding
  assert batch["image"].addressable_shards[0].data.shape == (3, SIZE, SIZE, 3)
  assert_equal([batch], [next(stream())])


def test_prefetching_passes_errors_on_and_ends_its_thread(stream):
  def fail(batch):
    raise RuntimeError("no room on the device")

  with pytest.raises(RuntimeError, match="no room on the device"):
    next(prefetch_to_device(stream(), fail, 2))
  ahead = prefetch_to_device(stream(), lambda batch: batch, 2)
  next(ahead)
  ahead.close()
  assert not [t for t in threading.enumerate() if t.name.startswith("grain-thread-prefetch")]


def test_evaluation_reads_the_split_once_in_order(config, source):
  batches = list(source.eval_batches("test", image_size=SIZE, batch_size=40))
  assert [len(batch["image"]) for batch in batches] == [40, 40, 16]
  skip = {"image": tfds.decode.SkipDecoding()}
  records = source.builder.as_data_source("test", decoders=skip)
  labels = np.concatenate([batch["label"] for batch in batches])
  assert labels.dtype == np.int32
  np.testing.assert_array_equal(labels, [record["label"] for record in records])
  captions = [texts for batch in batches for texts in batch["captions"]]
  assert captions == [[text.decode() for text in record["captions"]] for record in records]
  assert batches[0]["image"].shape == (40, SIZE, SIZE, 3)
  image = Image.open(io.BytesIO(records[41]["image"])).resize((SIZE, SIZE), Image.BICUBIC)
  np.testing.assert_array_equal(batches[1]["image"][1], np.asarray(image))


def test_a_slice_of_a_split_can_be_named(config, source):
  batches = source.eval_batches("test[:10%]", image_size=SIZE, batch_size=40)
  assert sum(len(batch["label"]) for batch in batches) == 10


def test_without_a_label_key_labels_are_unknown(config, source):
  config.data.label_key = ""
  assert source.class_names is None
  batch = next(source.eval_batches("test", image_size=SIZE, batch_size=4))
  assert (batch["label"] == -1).all()


def test_captions_are_made_from_labels_without_a_text_key(config, source, tokenizer):
  config.data.text_key, config.data.templates = "", ("a {}.", "one {}")
  assert source.class_names[0] == "red circle"
  assert list(source.captions())[:3] == [
    "a red circle.",
    "one red circle",
    "a red square.",
  ]
  config.data.train_split = "test"
  batch = next(source.eval_batches("test", image_size=SIZE, batch_size=4))
  names = source.class_names
  assert batch["captions"] == [[f"a {names[i]}.", f"one {names[i]}"] for i in batch["label"]]
  row = next(source.train_iterator(tokenizer, image_size=SIZE, context_length=LENGTH))["text"][0]
  assert tokenizer.decode(row).split()[0] in ("a", "one")


def test_captions_may_be_a_nested_feature(config, tokenizer):
  class Nested(Keys):
    def records(self):
      caption = {"text": tfds.features.Text(), "id": tfds.features.Scalar(np.int64)}
      stored = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(), "captions": tfds.features.Sequence(caption)}
      )
      texts = [{"text": "first", "id": 1}, {"text": "second", "id": 2}]
      return [stored.serialize_example({"image": self.image(0), "captions": texts})]

  config.data.label_key, config.data.text_key = "", "captions/text"
  assert list(Prepared(config, Nested(1)).captions()) == ["first", "second"]


def test_captions_are_all_captions_of_the_train_split(config, source):
  assert len(list(source.captions())) == 240 * 5


def test_a_batch_larger_than_the_data_is_an_error(stream, config):
  config.batch_size = 241
  with pytest.raises(ValueError, match="batch_size=241 is more than the 240 examples"):
    stream()


def test_a_batch_that_process_count_does_not_divide_is_an_error(stream):
  with pytest.raises(ValueError, match="batch_size=24 is not a multiple of process_count=5"):
    stream(process_count=5)


def test_a_missing_split_is_named(config, source, stream):
  config.data.train_split = "training"
  with pytest.raises(ValueError, match=r"no split 'training': it has .*train"):
    stream()
  with pytest.raises(ValueError, match="no split 'dev': it has"):
    next(source.eval_batches("dev", image_size=SIZE, batch_size=4))
