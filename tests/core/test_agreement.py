"""Processes that differ do not train: each of them names what differs, and where."""

import dataclasses
import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import loop_case
import pytest

from train.config import flat
from train.errors import RunError
from train.parallel import agreement, xla_flags


class Store:
  """Stands for JAX's key-value store, which the processes share."""

  def __init__(self):
    self.values, self.changed = {}, threading.Condition()

  def key_value_set(self, key, value):
    with self.changed:
      assert key not in self.values
      self.values[key] = value
      self.changed.notify_all()

  def blocking_key_value_get(self, key, milliseconds):
    with self.changed:
      if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
      return self.values[key]


class Own(threading.local):
  """What each of the threads below has for itself, as a process would."""

  def __init__(self):
    self.calls = itertools.count()

  def __next__(self):
    return next(self.calls)


@pytest.fixture
def together(monkeypatch):
  """Calls a function of the process index in `count` threads; gives results or error messages."""
  own, store = Own(), Store()
  monkeypatch.setattr(agreement, "_calls", own)
  monkeypatch.setattr(agreement.distributed.global_state, "client", store)
  monkeypatch.setattr(jax, "process_index", lambda: own.index)

  def run(function, count=3):
    monkeypatch.setattr(jax, "process_count", lambda: count)

    def one(index):
      own.index = index
      try:
        return function(index)
      except RunError as error:
        return str(error)

    with ThreadPoolExecutor(count) as pool:
      return list(pool.map(one, range(count)))

  return run


def test_a_difference_has_the_field_both_values_and_the_processes():
  descriptions = [{"config.seed": 0, "same": 1}] * 3 + [{"config.seed": 5, "same": 1}]
  assert agreement.difference(descriptions).splitlines() == [
    "The processes of a run must agree, and these do not:",
    "  config.seed: 0 in processes 0 to 2; 5 in process 3",
  ]


def test_equal_descriptions_have_no_difference():
  assert agreement.difference([{"rate": float("nan")}, {"rate": float("nan")}]) == ""


def test_what_one_process_lacks_is_a_difference():
  text = agreement.difference([{"the file train/new.py": "ab"}, {}])
  assert '  the file train/new.py: "ab" in process 0; null in process 1' in text


def test_many_differences_are_counted():
  text = agreement.difference([dict.fromkeys(range(14), 0), dict.fromkeys(range(14), 1)])
  assert len(text.splitlines()) == 12 and text.endswith("and 4 more")


def test_every_field_of_a_config_is_compared_but_those_of_a_process_s_own_disk_and_host(tmp_path):
  config = loop_case.config(tmp_path)
  compared = {name for name in agreement.described(config) if name.startswith("config.")}
  own = {"config.data.data_dir", "config.data.root", "config.data.workers", "config.data.prefetch"}
  assert compared | own == {f"config.{name}" for name in flat(config.to_dict())}
  assert not compared & own


def test_a_description_survives_json(tmp_path):
  config = dataclasses.replace(loop_case.config(tmp_path), seed=3)
  described = agreement.described(config)
  assert "jax_enable_x64" in described
  assert agreement.difference([described, json.loads(json.dumps(described))]) == ""


def test_another_version_of_a_source_file_is_a_difference(tmp_path, monkeypatch):
  source = tmp_path / "sbjax" / "deep" / "product.py"
  source.parent.mkdir(parents=True)
  monkeypatch.setattr(agreement.sbjax, "__file__", str(tmp_path / "sbjax" / "__init__.py"))
  source.write_text("a = 1")
  before = agreement.described(loop_case.config(tmp_path))
  source.write_text("a = 2")
  text = agreement.difference([before, agreement.described(loop_case.config(tmp_path))])
  assert "the file sbjax/deep/product.py" in text and len(text.splitlines()) == 2


def test_another_version_of_a_package_is_a_difference(tmp_path, monkeypatch):
  before = agreement.described(loop_case.config(tmp_path))
  assert {"the version of jax", "the version of jaxlib", "the version of grain"} <= set(before)
  monkeypatch.setattr(agreement.importlib.metadata, "version", lambda name: "0.0")
  after = agreement.described(loop_case.config(tmp_path))
  assert "the version of flax: " in agreement.difference([before, after])


def test_other_flags_of_xla_are_a_difference_but_not_where_it_dumps(tmp_path, monkeypatch):
  def described(flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    return agreement.described(loop_case.config(tmp_path))

  first = described("--xla_fast=true --xla_dump_to=/tmp/0")
  assert agreement.difference([first, described("--xla_dump_to=/tmp/1 --xla_fast=true")]) == ""
  assert "XLA_FLAGS" in agreement.difference([first, described("--xla_fast=false")])


def test_another_chip_to_compute_as_is_a_difference(tmp_path, monkeypatch):
  before = agreement.described(loop_case.config(tmp_path))
  monkeypatch.setenv("SBJAX_ASSUME_CAPABILITY", "80")
  after = agreement.described(loop_case.config(tmp_path))
  assert "SBJAX_ASSUME_CAPABILITY: " in agreement.difference([before, after])


@pytest.mark.parametrize(
  ("libtpu", "platforms", "is_set"),
  [(False, "", True), (True, "", False), (True, "tpu,cpu", False), (True, "cuda", True)],
)
def test_flags_of_gpus_are_not_set_for_a_tpu(monkeypatch, libtpu, platforms, is_set):
  find_spec = xla_flags.importlib.util.find_spec
  monkeypatch.setattr(
    xla_flags.importlib.util,
    "find_spec",
    lambda name: libtpu or None if name == "libtpu" else find_spec(name),
  )
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
  xla_flags.set_flags()
  assert ("--xla_gpu_enable_triton_gemm=false" in os.environ["XLA_FLAGS"]) == is_set
  assert os.environ["XLA_FLAGS"].startswith("--xla_mine=1")


def test_all_processes_gather_all_values_in_order(together):
  def twice(index):
    return agreement.gather("a", index), agreement.gather("b", {"at": index})

  expected = ([0, 1, 2], [{"at": 0}, {"at": 1}, {"at": 2}])
  assert together(twice) == [expected] * 3


def test_different_facts_end_all_processes_with_the_same_message(together):
  told = together(lambda i: agreement.check("data", lambda: {"examples": [100, 90][i > 1]}))
  assert told[0].endswith("  examples: 100 in processes 0 to 1; 90 in process 2")
  assert told == [told[0]] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_wait_says_each_minute_for_whom_and_ends(together, monkeypatch, capfd, late):
  for name, seconds in {"_MINUTE": 0.1, "_TICK": 0.05, "PATIENCE": 0.35}.items():
    monkeypatch.setattr(agreement, name, seconds)
  told = together(lambda i: i == late or agreement.gather("the data set", i))
  assert f"waited 0 hours for the data set of process {late}, and ends" in told[late == 0]
  said = capfd.readouterr().err.splitlines()
  assert 3 <= len(said) <= 7  # By one process for all.
  assert said[0].startswith(f"Waiting for the data set of process {late} for ")


def test_one_shared_folder_is_accepted_and_left_empty(together, tmp_path):
  assert together(lambda i: agreement.check_folder(tmp_path, "--workdir")) == [None] * 3
  assert not any(tmp_path.iterdir())


def test_a_folder_that_is_not_shared_is_named_by_all(together, tmp_path, monkeypatch):
  monkeypatch.setattr(agreement, "_LATE", 0.2)
  for name in "ab":
    (tmp_path / name).mkdir()
  told = together(lambda i: agreement.check_folder(tmp_path / "aab"[i], "--workdir"))
  for i, text in enumerate(told):
    assert f"--workdir={tmp_path / 'aab'[i]} must be one folder" in text
    assert "process 0 does not see the file of process 2 there" in text
  assert not [*tmp_path.glob("?/*")]


def test_a_process_that_cannot_write_to_the_folder_is_named_by_all(together, tmp_path):
  (tmp_path / "a").mkdir()
  folders = [tmp_path / "a", tmp_path / "gone", tmp_path / "a"]
  told = together(lambda i: agreement.check_folder(folders[i], "--workdir"))
  assert all("in process 1: No such file or directory" in text for text in told)
  assert not any((tmp_path / "a").iterdir())
