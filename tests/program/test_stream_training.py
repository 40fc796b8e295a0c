"""A run that streams its shards: it resumes to the bit, on any mesh, from a disk and from S3."""

import json
import math
import random
import time

import pytest
from loop_case import records, trainer
from processes_case import start_two
from shards_case import numbered, write_shard

pytestmark = pytest.mark.standard_promotion  # As optax needs.

SHARDS = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
  folder = tmp_path_factory.mktemp("shards")
  for shard in range(SHARDS):
    numbers = range(20 * shard, 21 * shard + 14)
    write_shard(folder / f"{shard:03}.tar", numbered(numbers, bad=(9,)))
  return folder


def options(pattern, **more):
  fields = {
    "stream": True,
    "train_shards": str(pattern),
    "eval_split": "",
    "label_key": "",
    "streams": 4,
    "block": 5,
  }
  return {f"data.{name}": value for name, value in (fields | more).items()}


def losses(workdir):
  path = workdir / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  found = [json.loads(line) for line in lines if line.endswith("}")]  # One may be half written.
  return {record["step"]: record["loss"] for record in found if "loss" in record}


def test_a_stream_resumes_on_another_mesh(monkeypatch, tmp_path, shards):
  train = trainer(monkeypatch, tmp_path)
  streamed = options(shards / "*.tar")
  train(tmp_path / "whole", steps=30, **streamed)
  train(tmp_path / "parts", devices=8, steps=7, **streamed)
  train(tmp_path / "parts", devices=2, steps=30, **streamed)
  assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
  assert len({*losses(tmp_path / "whole").values()}) > 20
  listed = (tmp_path / "whole" / "skipped.jsonl").read_text().splitlines()
  assert len(listed) >= 1 and all(json.loads(line)["key"] == "000009" for line in listed)
  shares = [r["left_out_share"] for r in records(tmp_path / "whole") if "left_out_share" in r]
  assert 0 < shares[-1] <= len(listed) / (30 * 8)  # The list is ahead of the steps.


@pytest.fixture(scope="module")
def s3(shards):
  """The URL of the shards in moto's S3, with the environment of a client in place."""
  server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
  s3fs = pytest.importorskip("s3fs")
  server.start()
  host, port = server.get_host_and_port()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
      patch.setenv(name, "testing")
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    store.mkdir("shards")
    store.put([str(path) for path in sorted(shards.glob("*.tar"))], "shards/")
    yield "s3://shards/{000..005}.tar"
  server.stop()


def start(workdir, tmp_path, pattern):
  flags = {
    "config": "configs/quickstart.py",
    "workdir": workdir,
    "config.batch_size": 8,
    "config.steps": 60,
    "config.log_every": 1,
    "config.eval_every": 0,
    "config.checkpoint_every": 5,
    "config.optimizer.warmup_steps": 5,
    "config.model.image_size": 32,
    "config.model.context_length": 16,
    **{f"config.{name}": value for name, value in options(pattern).items()},
  }
  arguments = [f"--{name}={value}" for name, value in flags.items()]
  return start_two(str(tmp_path / "compiled"), "-m", "train.main", *arguments, "--distributed")


def checksums(workdir):
  path = workdir / "checkpoints" / "60" / "record" / "metadata"
  return json.loads(path.read_text())["checksums"]


@pytest.mark.slow
def test_a_run_from_s3_that_is_killed_ten_times_has_the_bits_of_another(tmp_path, s3):
  for process in start(tmp_path / "whole", tmp_path, s3):
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
  chance, killed = random.Random(0), tmp_path / "killed"
  for kill in range(11):
    processes = start(killed, tmp_path, s3)
    # At most 5 steps on, of 60, and the last start is left alone.
    target = max(losses(killed), default=0) + chance.randint(1, 5) if kill < 10 else math.inf
    while max(losses(killed), default=0) < target and processes[0].poll() is None:
      time.sleep(0.05)
    if kill < 10:
      chance.choice(processes).kill()
    for process in processes:
      _, err = process.communicate(timeout=600)
      assert process.returncode == 0 or kill < 10, err
  assert losses(killed) == losses(tmp_path / "whole")
  assert checksums(killed) == checksums(tmp_path / "whole")
