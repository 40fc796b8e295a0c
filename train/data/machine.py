"""What the machine gives this process: cores and open files; and the errors that are its own."""

import contextlib
import errno
import os
import resource
import signal

_MOST_OPEN_FILES = 2**16  # More only makes programs slow that close all that they might have open.

# Errors that say nothing about the data: another try, place or limit may succeed.
_OF_THE_SYSTEM = (
  *(errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EIO, errno.EROFS, errno.ENOMEM),
  *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN),
  *(errno.EBUSY, errno.ENXIO, errno.ENODEV, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED),
  *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EREMOTEIO),
  *(errno.ENOLCK, errno.EINTR, errno.ECONNABORTED, errno.ESHUTDOWN, errno.EPROTO),
)


def cores() -> int:
  """The cores that this process may use, which a job's may be fewer than the machine's."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def open_files() -> int:
  """Raises the limit on open files as far as this process may; returns it."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
  if soft == resource.RLIM_INFINITY:
    return _MOST_OPEN_FILES
  if soft < most:
    with contextlib.suppress(OSError, ValueError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
      return most
  return soft


def system_error(error: BaseException) -> str | None:
  """An error of the system in its own words, such as "Too many open files"; None for another.

  Libraries written in C++ put the words into errors of their own.
  """
  seen: BaseException | None = error
  while seen is not None:
    if isinstance(seen, MemoryError):
      return os.strerror(errno.ENOMEM)
    if isinstance(seen, OSError) and seen.errno in _OF_THE_SYSTEM:
      return os.strerror(seen.errno)
    seen = seen.__cause__ or seen.__context__
  text = str(error).lower()
  return next((os.strerror(e) for e in _OF_THE_SYSTEM if os.strerror(e).lower() in text), None)


def describe_exit(code: int) -> str:
  """How a process ended whose exit code is not 0, and the usual cause."""
  if code >= 0:
    return f"ended with exit code {code}"
  try:
    name = signal.Signals(-code).name
  except ValueError:
    name = f"signal {-code}"
  causes = {
    signal.SIGKILL: "mostly the system, for lack of memory (the machine's or the job's)",
    signal.SIGBUS: "a full disk or /dev/shm (in Docker --shm-size), or a file cut while it is read",
  }
  cause = f": {causes[-code]}" if -code in causes else ""
  return f"was killed by {name}{cause}"
