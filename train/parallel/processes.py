"""Joins several processes into one program: finds this process's index and its GPUs.

On a cluster that JAX knows (Slurm, Open MPI, Kubernetes, a TPU), JAX finds the index of a process
and the address of process 0. Elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID set them. The processes then meet at that address before they start JAX, to report
errors: if a process is missing, two disagree or the port is taken, JAX ends each of them with a C++
stack trace or a segmentation fault (jaxlib 0.10 to 0.12) that names neither process nor port.

If several processes run on a machine, each takes one GPU, in order of their indices. A single
process takes all GPUs of its machine. docs/clusters.md has the commands.
"""

import collections
import contextlib
import errno
import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils

from train.errors import RunError
from train.parallel.agreement import difference

PATIENCE = 300.0  # seconds for all processes to come; JAX's own
_MINUTE = 60.0
# Seconds for which a run may be suspended: JAX's heartbeat counts them, and aborts all after 100 by
# default. train.parallel.peers notices a dead process at once.
SUSPENDED = 24 * 3600
_TELLING = 30.0  # seconds for which process 0 tells the others that its port is taken
_ASKING = 2.0  # seconds between two of their questions
_BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class Process(NamedTuple):
  """One of `count` processes, as it describes itself to process 0."""

  index: int
  count: int
  host: str
  visible: list[str]  # the machine's names of the GPUs that CUDA shows this process, in its order
  chosen: list[int] | None  # JAX_LOCAL_DEVICE_IDS: indices into `visible`
  described: dict | None = None  # train.parallel.agreement.described


def join(described: dict) -> None:
  """Starts JAX in this process as one of several, as the environment says.

  described: what must be the same in all of them; see train.parallel.agreement.

  Raises:
    RunError: the environment is wrong, a process is missing, or two of them disagree.
  """
  # JAX's notifier would take SIGTERM, and nobody asks it: the run would train to its end.
  jax.config.update("jax_enable_preemption_service", False)
  # If a process fails, the others wait for it for one minute instead of JAX's five.
  given = {"shutdown_timeout_seconds": 60, "heartbeat_timeout_seconds": SUSPENDED}
  try:
    jax.distributed.initialize(**given, **_from_environment(os.environ, described))
    _check_devices(jax.devices())
  except (ValueError, RuntimeError) as error:
    raise RunError(
      f"--distributed: {error} Outside of a cluster that JAX knows, set JAX_COORDINATOR_ADDRESS"
      " (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0)."
    ) from error


def largest_of_all(*values: float) -> list[float]:
  """The maximum of each value over processes, in float32 where there are several.

  All of them must call this at the same point.
  """
  if jax.process_count() == 1:
    return list(values)
  return multihost_utils.process_allgather(np.array(values, np.float32)).max(axis=0).tolist()


def _from_environment(environment: Mapping[str, str], described: dict) -> dict:
  """Arguments of jax.distributed.initialize that JAX would not find, or would get wrong."""
  given = {}
  if "JAX_NUM_PROCESSES" in environment:
    given["num_processes"] = _number(environment, "JAX_NUM_PROCESSES", at_least=1)
  if "JAX_PROCESS_ID" in environment:
    given["process_id"] = _number(environment, "JAX_PROCESS_ID", at_least=0)
  count, index = given.get("num_processes"), given.get("process_id")
  if count is not None and index is not None and index >= count:
    raise RunError(
      f"JAX_PROCESS_ID={index} must be 0 to {count - 1}, since JAX_NUM_PROCESSES={count}."
    )
  visible, chosen = _visible_gpus(environment), _chosen(environment)
  if all(name in environment for name in _BY_HAND):
    me = Process(index, count, socket.gethostname(), visible, chosen, described)
    address = environment["JAX_COORDINATOR_ADDRESS"]
    # These three variables override Slurm's, which are set too in a shell that Slurm started.
    return given | {
      "cluster_detection_method": "deactivate",
      "local_device_ids": meet(address, me, PATIENCE),
    }
  if "SLURM_LOCALID" in environment and chosen is None:
    given["local_device_ids"] = slurm_gpus(environment, visible)
  address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
    environment.get("JAX_COORDINATOR_ADDRESS"), count, index, None, None, int(PATIENCE)
  )
  if None not in (address, count, index):  # Else JAX says what is missing.
    # The cluster gives each its GPUs, perhaps all under the same name.
    meet(address, Process(index, count, socket.gethostname(), [], None, described), PATIENCE)
  return given


def _number(environment: Mapping[str, str], name: str, at_least: int) -> int:
  text = environment[name]
  if not text.isdecimal() or int(text) < at_least:
    raise RunError(f"{name}={text!r} must be a whole number of at least {at_least}.")
  return int(text)


def _chosen(environment: Mapping[str, str]) -> list[int] | None:
  text = environment.get("JAX_LOCAL_DEVICE_IDS", "")
  if not text:
    return None
  if not re.fullmatch(r"\d+(,\d+)*", text):
    raise RunError(f"JAX_LOCAL_DEVICE_IDS={text!r} must be numbers of GPUs, such as 0 or 0,1.")
  return [int(number) for number in text.split(",")]


def _visible_gpus(environment: Mapping[str, str]) -> list[str]:
  """Names of the NVIDIA GPUs that CUDA would show this process, in its order; [] if none."""
  platforms = environment.get("JAX_PLATFORMS", "")
  if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
    return []
  there = sorted(
    (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int
  )
  chosen = environment.get("CUDA_VISIBLE_DEVICES")
  return there if chosen is None or not there else [name for name in chosen.split(",") if name]


def slurm_gpus(environment: Mapping[str, str], visible: list[str]) -> list[int] | None:
  """The indices into `visible` of the GPUs that a Slurm task takes; None leaves the choice to JAX.

  JAX takes GPU SLURM_LOCALID. That GPU does not exist if Slurm shows each task only its own GPU
  (--gpus-per-task). If a node has one task, it is only one of the task's GPUs.
  """
  if not visible:
    return None
  task = int(environment["SLURM_LOCALID"])
  if re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
    return list(range(len(visible)))
  if len(visible) == 1 and environment.get("SLURM_GPUS_ON_NODE", "") != "1":
    return [0]
  if task >= len(visible):
    raise RunError(
      f"Task {task} (from 0) of {socket.gethostname()} has no GPU: Slurm gave"
      f" {len(visible)} to its tasks there. Ask for as many GPUs as tasks a node"
      " (--ntasks-per-node, --gpus-per-node)."
    )
  return [task]


def assign_gpus(processes: Iterable[Process]) -> dict[int, list[int] | None]:
  """The GPUs of each process: {process index: indices into `visible`, or None for all of them}.

  Raises:
    RunError: a machine has more processes than GPUs, or two processes would take the same GPU.
  """
  by_host = collections.defaultdict(list)
  for process in sorted(processes):
    by_host[process.host].append(process)
  assigned, owners = {}, {}
  for host, group in by_host.items():
    for rank, process in enumerate(group):
      visible, places = process.visible, process.chosen
      if places is None and len(group) > 1 and len(visible) > 1:
        places = [rank]
      if visible and places and max(places) >= len(visible):
        raise RunError(
          f"Process {process.index} would take GPU {max(places)} (from 0) of {host}, which has"
          f" {len(visible)} for its {len(group)} processes: start at most one process a GPU there,"
          " or say which it takes by JAX_LOCAL_DEVICE_IDS."
        )
      assigned[process.index] = places
      for name in visible if places is None else (visible[i] for i in places if visible):
        owner = owners.setdefault((host, name), process.index)
        if owner != process.index:
          raise RunError(
            f"Processes {owner} and {process.index} would both take GPU {name} of {host}: give"
            " each its own by JAX_LOCAL_DEVICE_IDS or CUDA_VISIBLE_DEVICES, or set neither, and"
            " each takes one."
          )
  return assigned


def meet(address: str, me: Process, patience: float) -> list[int] | None:
  """Waits until all processes have met at `address` (host:port); returns this process's GPUs.

  Raises:
    RunError: a process did not come within `patience` seconds, or they disagree.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal():
    raise RunError(
      f"JAX_COORDINATOR_ADDRESS={address!r} must be host:port, the machine of process 0 and a free"
      " port there."
    )
  deadline = time.monotonic() + patience
  if me.index == 0:
    return _receive(int(port), me, deadline)
  return _attend((host.strip("[]"), int(port)), me, deadline)


def _receive(port: int, me: Process, deadline: float) -> list[int] | None:
  """Process 0's part: waits for the others, then sends each its GPUs or the error."""
  present = {0: me}
  with contextlib.ExitStack() as closing:
    try:
      server = closing.enter_context(listen(port))
    except OSError as error:
      message = (
        f"Process 0 cannot listen at port {port}, where the processes meet:"
        f" {os.strerror(error.errno)}. Take another port: in JAX_COORDINATOR_ADDRESS, or for Slurm,"
        " Open MPI and Kubernetes in JAX_COORDINATOR_PORT, the same for all processes."
      )
      _tell_by_udp(port, message, me.count)
      raise RunError(message) from error
    guests = []
    try:
      while len(present) < me.count:
        guest, process = _next_guest(server, deadline, present)
        guests.append((closing.enter_context(guest), process))
        _check_newcomer(process, present)
        present[process.index] = process
      if differs := difference([present[i].described or {} for i in range(me.count)]):
        raise RunError(differs)
      assigned = assign_gpus(present.values())
    except RunError as error:
      for guest, _ in guests:
        _send(guest, {"error": str(error)})
      raise
    for guest, process in guests:
      _send(guest, {"gpus": assigned[process.index]})
  return assigned[0]


def _tell_by_udp(port: int, message: str, count: int) -> None:
  """Answers `_asked_by_udp` until all others have asked, or for a while.

  UDP has ports of its own, so the one of this number is free.
  """
  both = socket.has_dualstack_ipv6()
  asked, deadline = set(), time.monotonic() + _TELLING
  with (
    contextlib.suppress(OSError),
    socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_DGRAM) as server,
  ):
    if both:
      server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("", port))
    while len(asked) < count - 1 and (left := deadline - time.monotonic()) > 0:
      server.settimeout(left)
      index, sender = server.recvfrom(16)
      server.sendto(json.dumps({"error": message}).encode(), sender)
      asked.add(index)


def _asked_by_udp(address: tuple[str, int], me: Process) -> dict | None:
  """The answer of a process 0 that cannot have its port; None: it does not say so."""
  with contextlib.suppress(OSError):
    for family, kind, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_DGRAM):
      with contextlib.suppress(OSError, ValueError), socket.socket(family, kind) as guest:
        guest.settimeout(1)
        guest.connect(where)
        guest.send(str(me.index).encode())
        return json.loads(guest.recv(4096))
  return None


def listen(port: int) -> socket.socket:
  """A server at a port of this machine; 0: any free port."""
  if socket.has_dualstack_ipv6():
    try:
      return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError as error:  # A machine may have IPv6 switched off.
      if error.errno == errno.EADDRINUSE:
        raise
  return socket.create_server(("", port))


def _next_guest(server: socket.socket, deadline: float, present: dict[int, Process]):
  count = present[0].count
  start = said = time.monotonic()
  while (left := deadline - time.monotonic()) > 0:
    server.settimeout(min(left, _MINUTE))
    with contextlib.suppress(TimeoutError):
      guest, _ = server.accept()
      guest.settimeout(10)
      try:
        return guest, Process(**json.loads(guest.makefile().readline()))
      except (OSError, ValueError, TypeError):
        guest.close()  # Not one of our processes, for example a port scanner.
    if (now := time.monotonic()) - said >= _MINUTE:
      _say(f"Process 0 of {count} waits for {_missing(present)}, for {now - start:.0f} s now.")
      said = now
  raise RunError(
    f"Of {count} processes {len(present)} came in time to port {server.getsockname()[1]} of"
    f" {present[0].host}. Those with index {_missing(present)} (JAX_PROCESS_ID, SLURM_PROCID) did"
    " not. Start all of them, with the same address, and open that port between the machines."
  )


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _missing(present: dict[int, Process]) -> str:
  return ", ".join(str(i) for i in range(present[0].count) if i not in present)


def _check_newcomer(process: Process, present: dict[int, Process]) -> None:
  count = present[0].count
  if process.count != count:
    raise RunError(
      f"Process 0 has JAX_NUM_PROCESSES={count}, process {process.index} on {process.host} has"
      f" {process.count}: it must be the same for all."
    )
  if process.index in present:
    raise RunError(
      f"JAX_PROCESS_ID={process.index} came twice, from {present[process.index].host} and"
      f" {process.host}: it must be another for each, from 0 to {count - 1}."
    )


def _attend(address: tuple[str, int], me: Process, deadline: float) -> list[int] | None:
  """The other processes' part: describes this process to process 0 and waits for the answer."""
  where = f"{address[0]}:{address[1]}, the address of process 0 (JAX_COORDINATOR_ADDRESS)"
  reason = "no time left"
  start = said = time.monotonic()
  while (left := deadline - time.monotonic()) > 0:
    if (now := time.monotonic()) - said >= _MINUTE:
      _say(f"Process {me.index} tries to reach {where}, for {now - start:.0f} s now: {reason}.")
      said = now
    try:
      with socket.create_connection(address, timeout=min(left, 10)) as host:
        _send(host, me._asdict())
        # Process 0 times out first, so that it can say why.
        answer = _answer(host, address, me, deadline + 10)
      break
    except ValueError as error:
      raise RunError(
        f"Process {me.index}: process 0 ended, or something else answers at {where}."
      ) from error
    except OSError as error:
      reason = error.strerror or str(error)
      if answer := _asked_by_udp(address, me):
        break
      time.sleep(min(0.3, left))
  else:
    raise RunError(
      f"Process {me.index}: nobody answers at {where}: {reason}. Is process 0 started there, and"
      " is that port open between the machines?"
    )
  if "error" in answer:
    raise RunError(answer["error"])
  return answer["gpus"]


def _answer(host: socket.socket, address: tuple[str, int], me: Process, deadline: float) -> dict:
  """What process 0 answers, at its port or, if something else is there, by UDP."""
  while not select.select([host], [], [], _ASKING)[0]:
    if answer := _asked_by_udp(address, me):
      return answer
    if time.monotonic() > deadline:
      raise TimeoutError("timed out")
  host.settimeout(10)
  return json.loads(host.makefile().readline())


def _send(connection: socket.socket, message: dict) -> None:
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The other end reports it.
    connection.sendall(json.dumps(message).encode() + b"\n")


def _check_devices(devices: Iterable[jax.Device]) -> None:
  """Raises unless all processes have equally many devices: each reads an equal share of a batch."""
  counts = collections.Counter(device.process_index for device in devices)
  if len(set(counts.values())) > 1:
    listed = ", ".join(f"process {index} has {count}" for index, count in sorted(counts.items()))
    raise RunError(
      f"All processes must have the same number of devices: {listed}. JAX_LOCAL_DEVICE_IDS or"
      " CUDA_VISIBLE_DEVICES say which a process takes."
    )
