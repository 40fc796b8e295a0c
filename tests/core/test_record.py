"""Metrics on disk: a full disk is one message, and damaged lines do not cost the others."""

import json
import resource
import struct
from pathlib import Path

import pytest
from loop_case import config
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from train.errors import RunError
from train.record import Recorder, read_metrics

LINES = [json.dumps({"step": i, "loss": 1 / i}) for i in (1, 2, 3)]


@pytest.fixture
def small_files():
  """Files end at 4 KiB, as on a disk that fills."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_until_full(recorder):
  for step in range(1, 1000):
    recorder.write(step, {"loss": 1.0, "accuracy": 0.5})


@pytest.mark.parametrize("unlimited", ["metrics.jsonl", "none"])
def test_a_disk_that_fills_is_one_message(tmp_path, small_files, unlimited):
  (tmp_path / unlimited).symlink_to("/dev/null")  # So that the events fill first, or the metrics.
  recorder = Recorder(tmp_path, config(tmp_path), 0)
  message = f"Could not write to {tmp_path}: File too large. The same command continues"
  with pytest.raises(RunError, match=message):
    write_until_full(recorder)
  with pytest.raises(RunError, match=message):
    recorder.close()


def events(workdir) -> list[Event]:
  """The events of a workdir, their checksums verified."""
  found = []
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    while data:
      size = struct.unpack("<Q", data[:8])[0]
      record, end = data[12 : 12 + size], data[12 + size : 16 + size]
      assert data[8:12] == struct.pack("<I", masked_crc32c(data[:8]))
      assert end == struct.pack("<I", masked_crc32c(record))
      found.append(Event.FromString(record))
      data = data[16 + size :]
  return found


def test_tensorboard_has_each_scalar_at_once_and_forgets_steps_that_a_resume_repeats(tmp_path):
  recorder = Recorder(tmp_path, config(tmp_path), 2)
  recorder.write(3, {"loss": 0.5, "eval/recall@1": 0.25})
  version, start, scalars = events(tmp_path)
  assert version.file_version == "brain.Event:2"
  assert (start.step, start.session_log.status) == (3, start.session_log.START)
  values = {value.tag: value.simple_value for value in scalars.summary.value}
  assert (scalars.step, values) == (3, {"loss": 0.5, "eval/recall_at_1": 0.25})
  recorder.close()


DAMAGE = [b"{\xff\xfe}", b"\x00\x00\x00", b'{"step": 2, "lo', b"7", b'{"loss": 1}', b"[" * 100_000]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda line: str(line[:8]))
def test_a_damaged_line_is_dropped_and_the_others_stay(tmp_path, damage, capsys):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b"\n".join([LINES[0].encode(), damage, *(x.encode() for x in LINES[1:]), b""]))
  Recorder(tmp_path, config(tmp_path), 3).close()
  assert path.read_text().splitlines() == LINES
  assert f"{path}: 1 damaged lines are left out." in capsys.readouterr().err


def test_a_line_cut_short_by_a_kill_is_dropped_in_silence(tmp_path, capsys):
  path = tmp_path / "metrics.jsonl"
  path.write_text("\n".join(LINES)[:-3])
  Recorder(tmp_path, config(tmp_path), 3).close()
  assert [r["step"] for r in read_metrics(path)] == [1, 2]
  assert "damaged" not in capsys.readouterr().err


def test_a_resume_on_a_full_disk_keeps_the_metrics(tmp_path, monkeypatch):
  path = tmp_path / "metrics.jsonl"
  path.write_text("\n".join([*LINES, ""]))

  def full(self, *_, **__):
    self.touch()
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="No space left on device"):
      Recorder(tmp_path, config(tmp_path), 2)
  assert path.read_text().splitlines() == LINES
