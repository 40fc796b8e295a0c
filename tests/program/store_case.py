"""Stores on the loopback: HTTP servers with and without ranges, and a proxy that fails."""

import collections
import contextlib
import gzip
import http.client
import http.server
import json
import os
import random
import re
import select
import socket
import struct
import threading
import urllib.parse
from collections.abc import Iterator, Sequence

FAULTS = ("429", "500", "503", "reset", "stall", "truncated", "short")


@contextlib.contextmanager
def serving(handler: type, **attributes) -> Iterator["Server"]:
  server = Server(("127.0.0.1", 0), handler)
  vars(server).update(attributes)
  thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
  thread.start()
  try:
    yield server
  finally:
    server.stopping.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Server(http.server.ThreadingHTTPServer):
  def __init__(self, *args):
    super().__init__(*args)
    self.stopping = threading.Event()
    self.requests: collections.Counter[str] = collections.Counter()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_port}"

  def handle_error(self, request, client_address):
    pass  # A client that goes away is what the tests are about.


class Whole(http.server.SimpleHTTPRequestHandler):
  """Sends the files of `server.folder`, and ignores ranges."""

  protocol_version = "HTTP/1.1"

  def __init__(self, request, client_address, server):
    super().__init__(request, client_address, server, directory=str(server.folder))

  def log_message(self, *args):
    pass


class Ranges(Whole):
  """Sends ranges of files, too, and says their ETag."""

  def do_GET(self):
    path = self.translate_path(self.path)
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
    if not asked or not os.path.isfile(path):
      return super().do_GET()
    with open(path, "rb") as file:
      content = file.read()
    start, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
    self.send_response(206)
    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
    self.send_header("Content-Length", str(end - start))
    self.end_headers()
    self.wfile.write(content[start:end])

  def end_headers(self):
    path = self.translate_path(self.path)
    if os.path.isfile(path):
      self.send_header("ETag", f'"{os.stat(path).st_mtime_ns}"')
    super().end_headers()


class Packing(Ranges):
  """Packs files for clients that take gzip; a range is one of the packed bytes then."""

  def do_GET(self):
    if "gzip" not in self.headers.get("Accept-Encoding", ""):
      return super().do_GET()
    with open(self.translate_path(self.path), "rb") as file:
      packed = gzip.compress(file.read(), 1)
    start, end = map(int, re.findall(r"\d+", self.headers["Range"]))
    self.send_response(206)
    self.send_header("Content-Encoding", "gzip")
    self.send_header("Content-Range", f"bytes {start}-{end}/{len(packed)}")
    self.send_header("Content-Length", str(len(packed[start : end + 1])))
    self.end_headers()
    self.wfile.write(packed[start : end + 1])


class Unsized(Whole):
  """Sends files in HTTP's chunks, without their size."""

  def do_HEAD(self):
    self.send_response(200)
    self.send_header("Transfer-Encoding", "chunked")
    self.end_headers()

  def do_GET(self):
    self.do_HEAD()
    with open(self.translate_path(self.path), "rb") as file:
      while part := file.read(50_000):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
    self.wfile.write(b"0\r\n\r\n")


class Hub(Ranges):
  """The files of `server.folder` as Hugging Face's data set a/b, by what is asked of its API."""

  def do_GET(self):
    api, name, path = "/api/datasets/a/b", "/datasets/a/b/resolve/main", self.path.partition("?")[0]
    files = sorted(os.scandir(self.server.folder), key=lambda file: file.name)
    if path.startswith(f"{name}/"):
      self.path = path.removeprefix(name)
      super().do_GET()
    elif path in (api, f"{api}/revision/main"):
      self._answer(200, {"id": "a/b", "sha": "0" * 40, "siblings": []})
    elif path.rstrip("/") == f"{api}/tree/main":
      self._answer(200, [self._described(file.path) for file in files])
    else:
      self._answer(404, {"error": "Repository not found"})

  def do_POST(self):
    asked = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
    found = [os.path.join(self.server.folder, path) for path in asked["paths"]]
    self._answer(200, [self._described(path) for path in found if os.path.exists(path)])

  def _described(self, path):
    name, status = os.path.basename(path), os.stat(path)
    blob = f"{name} of {status.st_mtime_ns}"
    return {"type": "file", "path": name, "oid": blob, "size": status.st_size}

  def _answer(self, status, content):
    body = json.dumps(content).encode()
    self.send_response(status)
    self.send_header("X-Error-Code", "RepoNotFound" if status == 404 else "")
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)


class Proxy(http.server.BaseHTTPRequestHandler):
  """Passes requests to `server.upstream` ("host:port"), or fails as `server.script` says.

  A script maps a request's name ("GET /path bytes=0-9") to its faults: the n-th such request fails
  by the n-th.
  """

  protocol_version = "HTTP/1.1"

  def log_message(self, *args):
    pass

  def do_GET(self):
    name = f"{self.command} {self.path} {self.headers.get('Range', '')}".strip()
    faults = self.server.script(name)
    number = self.server.requests[name]
    self.server.requests[name] += 1
    fault = faults[number] if number < len(faults) else None
    self.server.injected[fault] += 1
    if fault == "stall":
      while not self.server.stopping.is_set():
        if select.select([self.connection], [], [], 0.05)[0]:
          break  # The client is gone.
      self.close_connection = True
    elif fault == "reset":
      linger = struct.pack("ii", 1, 0)
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
      os.close(self.connection.detach())
      self.close_connection = True
    elif fault and fault.isdigit():
      self._send(int(fault), {}, b"not now")
    else:
      status, headers, body = self._passed()
      self._send(status, headers, body, fault)

  do_HEAD = do_PUT = do_POST = do_GET

  def _passed(self) -> tuple[int, dict[str, str], bytes]:
    upstream = http.client.HTTPConnection(self.server.upstream)
    content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    upstream.request(self.command, self.path, content, dict(self.headers))
    answer = upstream.getresponse()
    body = answer.read()
    upstream.close()
    dropped = ("transfer-encoding", "connection", "date", "server")
    headers = {key: value for key, value in answer.getheaders() if key.lower() not in dropped}
    return answer.status, headers, body

  def _send(self, status, headers, body, fault=None):
    if fault == "short":  # as if the file ended there
      body = body[: len(body) // 2]
    if self.command != "HEAD":
      headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
      headers["Content-Length"] = str(len(body))
    self.send_response_only(status)
    for key, value in headers.items():
      self.send_header(key, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body[: len(body) // 2] if fault == "truncated" else body)
    self.close_connection = fault in ("truncated", "short")


def seeded(seed: int, most: int = 3, faults: Sequence[str] = FAULTS):
  """A script in which each request fails up to `most` times."""

  def script(name: str) -> list[str]:
    draw = random.Random(f"{seed} {name}")
    return draw.choices(faults, k=draw.randint(0, most))

  return script


def always(fault: str):
  return lambda name: [fault] * 1000


def never(name: str) -> list[str]:
  return []


def failing(upstream: str, script):
  """A proxy of `upstream`, which counts requests by name, and faults in `injected`."""
  upstream = upstream.removeprefix("http://")
  return serving(Proxy, upstream=upstream, script=script, injected=collections.Counter())
