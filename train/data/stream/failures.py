"""Failures of a store: which are asked again, and which the user must mend.

The clients of stores have no exception in common. An HTTP status says most, and each client keeps
it somewhere in the exception or in its causes.
"""

import asyncio
import math
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import fsspec
import fsspec.asyn

from train.errors import RunError

TRIES = 10
TIMEOUT = 60.0  # seconds for an answer
FIRST_DELAY, MAX_DELAY = 0.5, 60.0  # seconds between tries, each up to twice the one before
SILENCE = 5.0  # seconds for which a failure is not worth a line
SAID_EVERY = 60.0  # seconds: at most one line in these, whatever fails
_TRY_AGAIN = (408, 425, 429)  # of the statuses 300 to 499; these and all above are tried again
T = TypeVar("T")
_jitter = random.SystemRandom()  # No run's seed: workers that failed together come back apart.


class Unreadable(Exception):
  """A file cannot be read; says its URL, what failed, and how often it was tried."""


class NoRanges(Exception):
  """A server sends whole files only."""


def ask(url: str, question: Callable[[], Awaitable[T]]) -> T:
  """`retried`, waited for."""
  return submit(retried(url, question)).result()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
  """Begins work on fsspec's thread, which all files of a process share."""
  return asyncio.run_coroutine_threadsafe(work, fsspec.asyn.get_loop())


async def in_time(answer: Awaitable[T]) -> T:
  return await asyncio.wait_for(answer, TIMEOUT)


async def retried(url: str, question: Callable[[], Awaitable[T]]) -> T:
  """What `question` returns, asked up to TRIES times.

  Raises:
    Unreadable: the store failed each time, or said that trying again is of no use.
    RunError: the store refuses us.
    NoRanges: `question` raised it.
  """
  began = time.monotonic()
  for tried in range(1, TRIES + 1):
    try:
      return await question()
    except (NoRanges, MemoryError):
      raise
    except Exception as error:  # Each client has its own.
      failure = error
    if _is_refusal(failure):
      raise RunError(
        f"{url}: no permission ({_reason(failure)}). Set the credentials that fsspec's client of"
        " this store reads; some stores also answer so if the file is not there."
      ) from failure
    if is_absence(failure) or (
      300 <= _status(failure) < 500 and _status(failure) not in _TRY_AGAIN
    ):
      break
    if tried < TRIES:
      delay = min(MAX_DELAY, FIRST_DELAY * 2 ** (tried - 1)) * _jitter.uniform(0.5, 1)
      if time.monotonic() - began >= SILENCE:
        _lines.say(f"{_failed(url, failure, tried)}; again in {delay:.1f} s.")
      await asyncio.sleep(delay)
  raise Unreadable(_failed(url, failure, tried)) from failure


def _failed(url: str, failure: Exception, tried: int) -> str:
  return f"{url}: {_reason(failure)}, tried {'once' if tried == 1 else f'{tried} times'}"


class _Lines:
  """Lines on stderr, at most one in SAID_EVERY seconds of a process."""

  def __init__(self):
    self._last = -math.inf

  def say(self, line: str) -> None:
    """Says it, or not. Only fsspec's thread calls this."""
    if time.monotonic() - self._last >= SAID_EVERY:
      self._last = time.monotonic()
      print(line, file=sys.stderr, flush=True)


_lines = _Lines()


def is_absence(error: BaseException) -> bool:
  """Whether the store says that there is no such file."""
  # Clients raise FileNotFoundError from what they could not ask, too.
  status, first = _status(error), list(_causes(error))[-1]
  return status in (404, 410) or (not status and isinstance(first, FileNotFoundError))


def _is_refusal(error: Exception) -> bool:
  return _status(error) in (401, 403) or any(
    isinstance(cause, PermissionError)
    or re.search("Credential|Token", type(cause).__name__)  # botocore, google.auth, huggingface_hub
    or str(cause).startswith("Forbidden")  # gcsfs
    for cause in _causes(error)
  )


def _causes(error: BaseException) -> Iterator[BaseException]:
  cause: BaseException | None = error
  while cause is not None:
    yield cause
    cause = cause.__cause__


def _status(error: BaseException) -> int:
  """The HTTP status of a failure; 0 if there is none."""
  for cause in _causes(error):
    response = getattr(cause, "response", None)
    if isinstance(response, dict):  # botocore
      return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    status = getattr(cause, "status", getattr(response, "status_code", None))  # aiohttp, hf
    if type(cause).__module__.startswith("gcsfs"):  # aiohttp says code=400 of a truncated body.
      status = getattr(cause, "code", None)
    if isinstance(status, int):
      return status
  return 0


def _reason(error: Exception) -> str:
  """A line about the first cause."""
  first = list(_causes(error))[-1]
  text = " ".join(str(first).split())
  return f"{type(first).__name__}: {text}" if text else type(first).__name__
