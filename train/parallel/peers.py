"""Ends every process of a run when one of them ends, and says which and why.

JAX notices a missing process after a minute, and then ends the others with a C++ stack trace. Here
each process has a connection to process 0. A process that ends says why; if it is killed, its
connection closes. Process 0 tells all others. They end with exit code 1 if a process gave a reason,
since the same command would meet it again, and else with 75: it may go well then.
"""

import contextlib
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn, TextIO

import jax

from train.parallel.agreement import gather
from train.parallel.ahead import is_compiling
from train.parallel.processes import listen
from train.parallel.stop import Interrupted, Stopped
from train.parallel.watchdog import EXIT_CODE, end_process, write

_GRACE = 2.0  # seconds for a process to end by itself, with its own message
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}


@contextlib.contextmanager
def linked() -> Iterator[None]:
  """Ends this process, within the block, if another process of the run ends without its work done.

  An error that leaves the block ends the others. `exit_with` then ends this one.
  """
  if not jax.distributed.is_initialized():
    yield
    return
  links = _Links()
  try:
    yield
  except BaseException as error:
    reason = f"{links.name(jax.process_index())} ended: {str(error) or type(error).__name__}"
    code = EXIT_CODE if isinstance(error, Interrupted) else 1
    links.tell("" if isinstance(error, Stopped) else reason, code)
    raise
  links.tell("")


def exit_with(code: int, together: bool = False) -> NoReturn:
  """Ends this process, which raised an error; JAX's own exit would wait for the others.

  together: all processes end now, and may wait for one another.
  """
  several = jax.distributed.is_initialized()
  if (together or code == 1) and not several and not is_compiling():
    sys.exit(code)
  sys.stdout.flush()
  sys.stderr.flush()
  # JAX ends the others when process 0 does. XLA may be at work: Python's own end could crash.
  linger = 2 * _GRACE if several and jax.process_index() == 0 else 0
  if together:
    with contextlib.suppress(RuntimeError):  # All have saved: the exit code stays.
      jax.distributed.shutdown()  # Waits for all.
    linger = 0
  end_process(linger, code)


class _Links:
  """The connections of this process: process 0 has one to each other, the others one to it."""

  def __init__(self):
    self._sockets: dict[int, socket.socket] = {}
    self._index, self._count = jax.process_index(), jax.process_count()
    server = listen(0) if self._index == 0 else None
    here = server and [socket.gethostname(), server.getsockname()[1], secrets.token_hex(8)]
    host, port, token = gather("the connections", here)[0]
    if server:
      with server, contextlib.suppress(TimeoutError):  # A process without a connection says so.
        self._receive(server, token)
      return
    try:
      near = host == socket.gethostname()
      link = socket.create_connection(("localhost" if near else host, port), timeout=10)
    except OSError as error:
      print(
        f"Process {self._index} has no connection to {host}:{port} ({error.strerror or error}): if"
        " a process dies, the others wait for it until --config.step_timeout_seconds.",
        file=sys.stderr,
      )
      return
    _send(link, [token, self._index])
    self._follow_in_thread(0, link, link.makefile())

  def tell(self, message: str, code: int = 1) -> None:
    """Says that this process ends, why, and with which exit code; "" if its work is done."""
    for link in self._sockets.values():
      _send(link, [message, code])

  def name(self, index: int) -> str:
    return f"Process {index} of {self._count}"

  def _receive(self, server: socket.socket, token: str) -> None:
    server.settimeout(15)
    while len(self._sockets) < self._count - 1:
      link, _ = server.accept()
      link.settimeout(10)
      reader = link.makefile()
      given = _line(reader)
      if isinstance(given, list) and given[0] == token:
        self._follow_in_thread(given[1], link, reader)
      else:
        link.close()  # Not one of our processes, for example a port scanner.

  def _follow_in_thread(self, index: int, link: socket.socket, reader: TextIO) -> None:
    link.settimeout(None)
    # A machine without power closes nothing: after two minutes without an answer it counts as gone.
    # A suspended process is answered for by its machine.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
      link.setsockopt(socket.IPPROTO_TCP, option, value)
    self._sockets[index] = link
    threading.Thread(target=self._follow, args=(index, reader), daemon=True).start()

  def _follow(self, index: int, reader: TextIO) -> None:
    message, code = _line(reader) or (None, EXIT_CODE)
    if message == "" or str(message).startswith(f"{self.name(self._index)} ended"):
      return  # Its work is done, or it ends because this process told it to.
    if message or index:  # Without process 0, JAX ends this process at once.
      time.sleep(_GRACE)
    message = (
      message
      or f"{self.name(index)} ended without a message: it was killed, or its machine is gone."
    )
    write(f"\n{message}\n{self.name(self._index)} ends, too.\n")
    self.tell(message, code)
    end_process(2 * _GRACE if self._index == 0 and self._count > 2 else 0, code)


def _send(link: socket.socket, message) -> None:
  with contextlib.suppress(OSError):  # The other end is gone, and its follower says so.
    link.sendall(json.dumps(message).encode() + b"\n")


def _line(reader: TextIO):
  """The next message; None if the other end is gone, or says something else."""
  try:
    return json.loads(reader.readline())
  except (OSError, ValueError):
    return None
