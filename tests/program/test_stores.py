"""Shards in stores: their names, and their bytes whatever the store does.

The stores are real programs on the loopback (store_case.py): HTTP servers, moto for S3, an emulator
for Google's. They are reached through a proxy that fails by a script.
"""

import asyncio
import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time

import fsspec
import pytest
from shards_case import pairs, write_shard

from tests.program import store_case
from train.config import Config, ModelConfig
from train.data.sample import Wanted
from train.data.source import open_source
from train.data.stream import ahead, failures, formats, stores
from train.data.stream.order import Order, Position
from train.data.stream.streams import Reading, blocks
from train.data.stream.versions import Versions
from train.errors import RunError

BYTES = random.Random(0).randbytes(300_000)
CHUNK = 2**16
READING = Reading(Wanted(True, "", None, True), (), 2**20, ("filepath", "title"), 100, False)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
  monkeypatch.setattr(ahead, "CHUNK", CHUNK)
  monkeypatch.setattr(failures, "FIRST_DELAY", 0.01)
  monkeypatch.setattr(failures, "MAX_DELAY", 0.05)
  monkeypatch.setattr(failures, "TIMEOUT", 1.0)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "shards").mkdir()
  for i in range(3):
    (tmp_path / "shards" / f"{i}.tar").write_bytes(BYTES[i:])
  (tmp_path / "shards" / "._0.tar").touch()
  return tmp_path


@pytest.fixture(scope="module")
def moto():
  pytest.importorskip("s3fs")
  server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
  server.start()
  yield "http://{}:{}".format(*server.get_host_and_port())
  server.stop()


@pytest.fixture
def s3(moto, monkeypatch):
  """Returns a function that sends s3:// to an endpoint; there is the bucket "shards"."""
  for name, value in (
    ("AWS_ACCESS_KEY_ID", "key"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_DEFAULT_REGION", "us-east-1"),
    ("AWS_EC2_METADATA_DISABLED", "true"),
    ("AWS_MAX_ATTEMPTS", "1"),
  ):
    monkeypatch.setenv(name, value)

  def use(endpoint, **options):
    options = {"endpoint_url": endpoint, **options}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)

  use(moto)
  fs = fsspec.filesystem("s3")
  if not fs.exists("shards"):
    fs.mkdir("shards")
  for i in range(3):
    fs.pipe_file(f"shards/shards/{i}.tar", BYTES[i:])
  return use


def read(url, start=0, n=10_000):
  with stores.open_at(url, start) as file:
    parts = []
    while part := file.read(n):
      parts.append(part)
      assert file.tell() == start + sum(map(len, parts))
  return b"".join(parts)


STARTS = (0, 1, CHUNK, 3 * CHUNK - 5, len(BYTES) - 1, len(BYTES), len(BYTES) + 9)


@pytest.mark.parametrize(
  "handler", [store_case.Ranges, store_case.Packing, store_case.Whole, store_case.Unsized]
)
def test_bytes_from_any_start_are_those_of_the_file(handler, folder):
  with store_case.serving(handler, folder=folder) as server:
    for start in STARTS:
      assert read(f"{server.url}/shards/0.tar", start) == BYTES[start:]
      assert read(str(folder / "shards/0.tar"), start) == BYTES[start:]


def test_an_empty_file_has_no_bytes(folder):
  (folder / "empty").touch()
  with store_case.serving(store_case.Ranges, folder=folder) as server:
    assert read(f"{server.url}/empty") == b""


@pytest.mark.parametrize("fault", store_case.FAULTS)
def test_a_file_with_a_failure_of_each_kind_has_its_bytes(fault, folder):
  with (
    store_case.serving(store_case.Ranges, folder=folder) as server,
    store_case.failing(server.url, lambda name: [fault] * ("GET" in name)) as proxy,
  ):
    assert read(f"{proxy.url}/shards/0.tar") == BYTES
    assert proxy.injected[fault] == 5  # one for each chunk


@pytest.mark.parametrize("handler", [store_case.Ranges, store_case.Whole])
@pytest.mark.parametrize("seed", range(2))
def test_a_failing_server_changes_no_byte(handler, seed, folder):
  with (
    store_case.serving(handler, folder=folder) as server,
    store_case.failing(server.url, store_case.seeded(seed)) as proxy,
  ):
    assert read(f"{proxy.url}/shards/1.tar", 70_000) == BYTES[70_001:]
    assert sum(proxy.injected.values()) > proxy.injected[None]


def test_what_is_dropped_may_fail_too(folder):
  faults = {"GET /shards/0.tar": ["truncated", "reset", "truncated"]}
  with (
    store_case.serving(store_case.Whole, folder=folder) as server,
    store_case.failing(server.url, lambda name: faults.get(name, ())) as proxy,
  ):
    assert read(f"{proxy.url}/shards/0.tar", len(BYTES) - 9) == BYTES[-9:]
    assert proxy.injected.total() - proxy.injected[None] == 3


@pytest.mark.parametrize("seed", range(2))
def test_a_failing_s3_changes_no_byte(seed, s3, moto):
  with store_case.failing(moto, store_case.seeded(seed, most=2)) as proxy:
    s3(proxy.url)
    assert read("s3://shards/shards/1.tar", 70_000) == BYTES[70_001:]
    assert sum(proxy.injected.values()) > proxy.injected[None]


def test_google_s_store_has_the_bytes(monkeypatch):
  pytest.importorskip("gcsfs")
  emulator = pytest.importorskip("gcp_storage_emulator.server")
  server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="shards")
  server.start()
  try:
    port = server._api._httpd.server_port
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    fsspec.filesystem("gs").pipe_file("shards/0.tar", BYTES)
    assert stores.expand("gs://shards/*.tar") == ["gs://shards/0.tar"]
    assert read("gs://shards/0.tar", 5) == BYTES[5:]
    with pytest.raises(RunError, match="gs://none is not there"):
      stores.version("gs://none/0.tar")
  finally:
    server.stop()


def test_hugging_face_s_store_has_the_bytes(folder):
  pytest.importorskip("huggingface_hub")
  script = """
import os
from train.data.stream import stores
names = stores.expand("hf://datasets/a/b/*.tar")
print(names, stores.version(names[1]) == stores.version(names[1]))
print(stores.version(names[1]))
os.utime("shards/1.tar", (0, 0))
print(stores.version(names[1]))
with open("got", "wb") as got, stores.open_at(names[1], 5) as file:
  got.write(file.read())
for name in ("b/9", "c/0"):
  try:
    stores.version(f"hf://datasets/a/{name}.tar")
  except Exception as error:
    print(type(error).__name__, error)
"""
  faults = {f"GET /datasets/a/b/resolve/main/1.tar bytes=5-{len(BYTES) - 2}": ["truncated", "500"]}
  with (
    store_case.serving(store_case.Hub, folder=folder / "shards") as server,
    store_case.failing(server.url, lambda name: faults.get(name, ())) as proxy,
  ):
    environment = {**os.environ, "HF_ENDPOINT": proxy.url, "HF_HOME": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                         cwd=folder, env=environment, timeout=100)  # fmt: skip
  assert (folder / "got").read_bytes() == BYTES[6:], run.stderr
  first, before, after, absent, missing = run.stdout.splitlines()
  assert first == f"{[f'hf://datasets/a/b/{i}.tar' for i in range(3)]} True"
  assert before.startswith("299,999 bytes (blob_id 1.tar of ")
  assert after == "299,999 bytes (blob_id 1.tar of 0)"
  assert re.fullmatch("Unreadable hf://datasets/a/b/9.tar: .*, tried once", absent)
  assert missing == "RunError hf://datasets/a/c/0.tar: hf://datasets/a/c is not there."
  assert sum(n for name, n in proxy.requests.items() if "/tree/" in name) == 1  # listings
  assert proxy.injected.total() - proxy.injected[None] == 2


def test_an_unreadable_file_says_its_url_and_tries(monkeypatch, folder):
  monkeypatch.setattr(failures, "TRIES", 3)
  with (
    store_case.serving(store_case.Ranges, folder=folder) as server,
    store_case.failing(server.url, store_case.always("503")) as proxy,
  ):
    url = f"{proxy.url}/shards/0.tar"
    with pytest.raises(stores.Unreadable, match=rf"{url}: .*503.*, tried 3 times"):
      stores.open_at(url)
    proxy.script = lambda name: ["reset"] * 9 * ("bytes=65536" in name)
    file = stores.open_at(url)
    assert file.read(CHUNK) == BYTES[:CHUNK]
    with pytest.raises(stores.Unreadable, match=rf"{url}: .*, tried 3 times"):
      file.read(1)
    with pytest.raises(ValueError, match="closed"):  # not the next chunk's bytes
      file.read(1)


def test_a_failure_that_lasts_is_said_once_a_minute(monkeypatch, folder, capsys):
  monkeypatch.setattr(failures, "_lines", failures._Lines())
  monkeypatch.setattr(failures, "SILENCE", 0.1)
  with (
    store_case.serving(store_case.Ranges, folder=folder) as server,
    store_case.failing(server.url, lambda name: ["503"] * 2) as proxy,
  ):
    url = f"{proxy.url}/shards/0.tar"
    assert read(url) == BYTES
    assert capsys.readouterr().err == ""  # Each failure was short.
    proxy.script = store_case.always("503")
    monkeypatch.setattr(failures, "FIRST_DELAY", 0.05)
    for _ in range(2):
      with pytest.raises(stores.Unreadable, match="tried 10 times"):
        stores.open_at(url)
    said = capsys.readouterr().err
    assert re.fullmatch(rf"{url}: .*503.*, tried [2-9] times; again in 0\.\d s\.\n", said)
    monkeypatch.setattr(failures, "SAID_EVERY", 0.0)
    with pytest.raises(stores.Unreadable):
      stores.open_at(url)
    assert len(capsys.readouterr().err.splitlines()) > 1


def test_a_file_that_is_not_there_is_asked_for_once(folder, s3):
  with store_case.serving(store_case.Ranges, folder=folder) as server:
    for url in (f"{server.url}/9.tar", "s3://shards/9.tar", str(folder / "9.tar")):
      with pytest.raises(stores.Unreadable, match=f"{url}: .*, tried once"):
        stores.open_at(url)


def test_a_request_that_stays_wrong_is_made_once(folder):
  with (
    store_case.serving(store_case.Ranges, folder=folder) as server,
    store_case.failing(server.url, store_case.always("400")) as proxy,
    pytest.raises(stores.Unreadable, match=r"400.*, tried once"),
  ):
    stores.version(f"{proxy.url}/shards/0.tar")


def test_an_error_of_a_disk_makes_a_file_unreadable(folder):
  with pytest.raises(stores.Unreadable, match="shards: Is a directory, tried once"):
    stores.open_at(str(folder / "shards"))
  with (
    pytest.raises(stores.Unreadable, match="/proc/self/mem: Input/output error"),
    stores.open_at("/proc/self/mem") as file,
  ):
    file.read(1)


def test_a_bucket_that_is_not_there_is_said(s3):
  for ask in (stores.version, stores.open_at):
    with pytest.raises(RunError, match="s3://none is not there"):
      ask("s3://none/0.tar")
  with pytest.raises(RunError, match="s3://none is not there"):
    stores.expand("s3://none/*.tar")


def test_a_missing_permission_is_said(s3, moto, folder, monkeypatch):
  with store_case.failing(moto, store_case.always("403")) as proxy:
    s3(proxy.url)
    for url in (f"{proxy.url}/0.tar", "s3://shards/shards/0.tar"):
      with pytest.raises(RunError, match=f"{url}: no permission"):
        stores.open_at(url)
    with pytest.raises(RunError, match="no permission"):
      stores.expand("s3://shards/*.tar")
  monkeypatch.delenv("AWS_ACCESS_KEY_ID")
  monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
  s3(moto, config_kwargs={"read_timeout": 9})  # another client, which looks for credentials
  with pytest.raises(RunError, match=r"no permission \(NoCredentialsError"):
    stores.version("s3://shards/shards/0.tar")


@pytest.mark.parametrize(
  ("url", "package", "extra"),
  [
    ("s3://a/b.tar", "s3fs", "s3"),
    ("gs://a/b.tar", "gcsfs", "gs"),
    ("hf://datasets/a/b/c.tar", "huggingface_hub", "hf"),
    ("https://a/b.tar", "aiohttp", "http"),
  ],
)
def test_a_missing_extra_is_said_with_its_command(url, package, extra):
  script = f"""
import sys
sys.modules[{package!r}] = None
from train.data.stream import stores
stores.version({url!r})
"""
  run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
  assert f"needs {package}, which is not installed: pip install 'sbjax[{extra}]'." in run.stderr


def test_other_schemes_are_refused():
  for url in ("ftp://a/b.tar", "file:///a/b.tar", "S3://a/b.tar"):
    with pytest.raises(RunError, match=rf"{url}: shards are read from .* s3"):
      stores.version(url)
  with pytest.raises(RunError, match="pipe:cat"):
    stores.expand("pipe:cat a.tar")


def test_remote_patterns_give_what_local_ones_give(folder, s3):
  def names(place, pattern):
    return [name.removeprefix(place) for name in stores.expand(f"{place}{pattern}")]

  with store_case.serving(store_case.Ranges, folder=folder) as server:
    for pattern in ("/shards/[01].tar", "/shards/*", "/s*s/{0,2}.t*", "/shards/{0..1}.tar",
                    "/*/1.tar"):  # fmt: skip
      local = names(str(folder), pattern)
      assert local
      assert local == names(server.url, pattern) == names("s3://shards", pattern)


def test_a_failing_store_hides_no_name(folder, s3, moto):
  noticed = [fault for fault in store_case.FAULTS if fault != "short"]  # HTML has no size.
  with (
    store_case.serving(store_case.Ranges, folder=folder) as server,
    store_case.failing(server.url, store_case.seeded(0, 2, noticed)) as proxy,
    store_case.failing(moto, store_case.seeded(1, 2, noticed)) as s3_proxy,
  ):
    s3(s3_proxy.url, config_kwargs={"read_timeout": 1})
    for place in (proxy.url, "s3://shards"):
      assert stores.expand(f"{place}/sh*/*.tar") == [f"{place}/shards/{i}.tar" for i in range(3)]
    assert proxy.injected.total() > proxy.injected[None]
    assert s3_proxy.injected.total() > s3_proxy.injected[None]
    proxy.script = store_case.always("500")
    with pytest.raises(RunError, match=r"Shards cannot be listed. .*500.*, tried 10 times"):
      stores.expand(f"{proxy.url}/sh*/*.tar")


def test_names_are_listed_once_for_a_run(s3, moto, tmp_path):
  write_shard(tmp_path / "a.tar", pairs(3))
  for i in range(4):
    fsspec.filesystem("s3").put_file(tmp_path / "a.tar", f"shards/listed/{i}.tar")
  config = Config(model=ModelConfig(size="tiny"), batch_size=4)
  config.data.stream, config.data.train_shards = True, "s3://shards/listed/*.tar"
  with store_case.failing(moto, store_case.never) as proxy:
    s3(proxy.url)
    (shards, _), *_ = open_source(config).sets
    found = blocks(shards, Order(4, 1, 0, (0,)), Position(), READING, Versions())
    assert sum(len(block.examples) for block in itertools.islice(found, 8)) == 2 * 4 * 3
    assert sum(n for name, n in proxy.requests.items() if "list-type" in name) == 1


def test_braces_alone_ask_no_store():
  with store_case.failing("nowhere", store_case.never) as proxy:
    found = stores.expand(f"{proxy.url}/{{000..999}}.tar::s3://bucket/{{a,b}}.tar")
    assert len(found) == 1002
    assert found == sorted(found)
    assert not proxy.requests


def test_a_list_has_a_name_a_line(folder, s3):
  (folder / "list.txt").write_text("shards/0.tar\n\ns3://shards/{1}.tar\n/a/2.tar\n")
  expected = {"shards/0.tar", "s3://shards/{1}.tar", "/a/2.tar"}
  with store_case.serving(store_case.Ranges, folder=folder) as server:
    for place in (str(folder), server.url):
      named = {name.removeprefix(f"{place}/") for name in stores.expand(f"@{place}/list.txt")}
      assert named == expected
    assert stores.expand("@list.txt::shards/1.tar", str(folder)) == sorted(
      {f"{folder}/shards/0.tar", f"{folder}/shards/1.tar", "s3://shards/{1}.tar", "/a/2.tar"}
    )
    with pytest.raises(RunError, match=r"list of shards cannot be read.*none.txt.*tried once"):
      stores.expand(f"@{server.url}/none.txt")


def test_a_folder_of_pairs_in_a_store_is_that_of_a_disk(folder, s3):
  (folder / "pairs").mkdir()
  store = fsspec.filesystem("s3")
  for name in ("b.jpg", "b.txt", "a.png", "a.json", "a.bin", "c.txt", "._a.jpg", "deep/d.jpg"):
    (folder / "pairs" / name).parent.mkdir(exist_ok=True)
    (folder / "pairs" / name).write_bytes(name.encode())
    store.pipe_file(f"shards/pairs/{name}", name.encode())
  with store_case.serving(store_case.Ranges, folder=folder) as server:
    for start in range(4):
      expected = [*formats.samples(f"{folder}/pairs/", start, 9)]
      assert [key for _, key, _ in expected] == ["a", "b", "c"][start:]
      for place in ("s3://shards", server.url):
        assert [*formats.samples(f"{place}/pairs/", start, 9)] == expected
  with pytest.raises(stores.Unreadable, match=r"s3://shards/none/: .*, tried once"):
    stores.files_in("s3://shards/none/")
  with pytest.raises(RunError, match="s3://none is not there"):
    stores.files_in("s3://none/pairs/")


def test_a_pattern_without_a_match_is_said(folder, s3):
  with store_case.serving(store_case.Ranges, folder=folder) as server:
    for pattern in (f"{folder}/*.zip", f"{folder}/{{0..9}}.zip", "s3://shards/*.zip",
                    f"{server.url}/shards/*.zip", f"{server.url}/none/*.tar"):  # fmt: skip
      with pytest.raises(RunError, match="No shard matches") as error:
        stores.expand(f"{folder}/shards/0.tar::{pattern}")
      assert repr(pattern) in str(error.value)


def test_a_version_changes_with_the_file(folder, s3):
  """An HTTP server's size alone: mirrors behind one name have tags of their own."""

  def versions():
    return [stores.version(u) for u in (f"{server.url}/0", str(folder / "0"), "s3://shards/0")]

  def write(content, seconds):
    (folder / "0").write_bytes(content)
    os.utime(folder / "0", (seconds, seconds))
    fsspec.filesystem("s3", skip_instance_cache=True).pipe_file("shards/0", content)
    return versions()

  with store_case.serving(store_case.Ranges, folder=folder) as server:
    first = write(b"abc", 1000)
    assert versions() == first
    stores.expand("s3://shards/*")  # A listing is not what a later version is read from.
    second, third = write(b"abd", 1001), write(b"abcd", 1001.5)
  assert [str(version) for version in first[:2]] == [
    "3 bytes",
    "3 bytes (changed 1970-01-01 00:16:40 UTC)",
  ]
  assert first[2].tag.startswith('ETag "')
  differs = [[a.differs(b) for a, b in zip(x, first, strict=True)] for x in (second, third)]
  assert differs == [[False, True, True], [True, True, True]]
  assert second[1].tag == third[1].tag  # whole seconds


def test_a_shard_of_s3_that_is_written_anew_is_seen_in_the_next_pass(s3, tmp_path):
  found = blocks(("s3://shards/a.tar",), Order(1, 1, 0, (0,)), Position(), READING, Versions())
  for first in (0, 0, 50):
    write_shard(tmp_path / "a.tar", pairs(3, first))
    fsspec.filesystem("s3").put_file(tmp_path / "a.tar", "shards/a.tar")
    if first:
      with pytest.raises(RunError, match=r'it has ([\d,]+ bytes) \(ETag ".*"\) now, and had \1 '):
        next(found)
    else:
      assert len(next(found).examples) == 3


def test_only_the_next_chunks_are_asked_for(folder):
  with (
    store_case.serving(store_case.Ranges, folder=folder) as server,
    store_case.failing(server.url, store_case.never) as proxy,
    stores.open_at(f"{proxy.url}/shards/0.tar") as file,
  ):
    file.read(1)
    wait_for(lambda: sum("bytes" in name for name in proxy.requests) == 1 + ahead.AHEAD)
    time.sleep(0.2)
    assert sum("bytes" in name for name in proxy.requests) == 1 + ahead.AHEAD


@pytest.mark.parametrize("handler", [store_case.Ranges, store_case.Whole])
def test_nothing_goes_on_after_close(handler, folder, monkeypatch):
  monkeypatch.setattr(failures, "TIMEOUT", 60.0)

  def tasks():
    return asyncio.all_tasks(fsspec.asyn.get_loop())

  def descriptors():
    return len(os.listdir("/proc/self/fd"))

  faults = ["stall"] * 99
  with (
    store_case.serving(handler, folder=folder) as server,
    store_case.failing(server.url, lambda name: faults * ("bytes=131072" in name)) as proxy,
  ):
    stores.version(f"{proxy.url}/shards/0.tar")
    before = threading.active_count(), descriptors()
    for _ in range(8):
      start = time.monotonic()
      with stores.open_at(f"{proxy.url}/shards/0.tar") as file:
        file.read(CHUNK + 1)
      assert time.monotonic() - start < 30  # The stalled chunk is not waited for.
      wait_for(lambda: not tasks())
    # The client keeps connections that are whole. Each has a thread of the proxy, and two ends.
    idle = 1 + ahead.AHEAD
    wait_for(lambda: descriptors() <= before[1] + 2 * idle)
    wait_for(lambda: threading.active_count() <= before[0] + idle)


def wait_for(condition):
  for _ in range(200):
    if condition():
      return
    time.sleep(0.05)
  raise AssertionError("not within 10 s")
