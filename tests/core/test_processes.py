"""Processes that meet by environment variables: each takes its GPUs; errors are one message."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from train.errors import RunError
from train.parallel import processes
from train.parallel.processes import Process, assign_gpus, listen, meet, slurm_gpus


def process(index, count=2, host="a", visible=(), chosen=None, **described):
  return Process(index, count, host, list(visible), chosen, described)


@pytest.fixture
def address():
  try:
    with socket.socket() as server:
      server.bind(("localhost", 0))
      return f"localhost:{server.getsockname()[1]}"
  except OSError as error:
    pytest.skip(f"no port can be opened here: {error}")


def all_meet(address, group, patience=5.0):
  """For each process its GPUs or its error message."""

  def one(process):
    try:
      return meet(address, process, patience)
    except RunError as error:
      return str(error)

  with ThreadPoolExecutor(len(group)) as pool:
    return list(pool.map(one, group))


def test_processes_on_one_machine_take_one_gpu_each(address):
  group = [process(i, 3, visible="012") for i in (2, 0, 1)]
  assert all_meet(address, group) == [[2], [0], [1]]


def test_the_only_process_on_a_machine_takes_all_its_gpus():
  group = [process(0, host="a", visible="01"), process(1, host="b", visible="01")]
  assert assign_gpus(group) == {0: None, 1: None}


def test_four_processes_fill_two_machines_of_two_gpus():
  group = [process(i, 4, host="ab"[i // 2], visible="01") for i in range(4)]
  assert assign_gpus(group) == {0: [0], 1: [1], 2: [0], 3: [1]}


def test_a_process_takes_its_chosen_gpu():
  group = [process(0, visible="01", chosen=[1]), process(1, visible="01", chosen=[0])]
  assert assign_gpus(group) == {0: [1], 1: [0]}
  # CUDA_VISIBLE_DEVICES leaves one to each, and each counts from 0.
  assert assign_gpus([process(0, visible="3"), process(1, visible="5")]) == {0: None, 1: None}


def test_without_gpus_none_is_assigned():
  assert assign_gpus([process(0), process(1)]) == {0: None, 1: None}


@pytest.mark.parametrize(
  ("group", "message"),
  [
    ([process(i, 3, visible="01") for i in range(3)], "Process 2 would take GPU 2 .* has 2 for"),
    ([process(i, visible="0") for i in range(2)], "Processes 0 and 1 would both take GPU 0 of a"),
    ([process(0, visible="01", chosen=[0]), process(1, visible="01", chosen=[0, 1])], "both take"),
    ([process(0, visible="01", chosen=[5]), process(1, visible="01")], "would take GPU 5"),
  ],
)
def test_a_missing_or_shared_gpu_is_named(group, message):
  with pytest.raises(RunError, match=message):
    assign_gpus(group)


@pytest.mark.parametrize(
  ("group", "message"),
  [
    ([process(0, 2), process(2, 3)], "Process 0 has JAX_NUM_PROCESSES=2, process 2 on a has 3"),
    ([process(0, 3), process(1, 3), process(1, 3)], "JAX_PROCESS_ID=1 came twice, from a and a"),
    ([process(i, visible="0") for i in range(2)], "both take GPU 0"),
    ([process(i, 3, seed=i // 2) for i in range(3)], "seed: 0 in processes 0 to 1; 1 in process 2"),
  ],
)
def test_processes_that_disagree_all_get_the_reason(address, group, message):
  told = all_meet(address, group)
  assert all(message in text for text in told), told


def test_a_missing_process_is_named_to_all_others(address):
  told = all_meet(address, [process(0, 4), process(2, 4)], patience=0.5)
  for text in told:
    assert "Of 4 processes 2 came in time" in text
    assert "index 1, 3 (JAX_PROCESS_ID, SLURM_PROCID) did not" in text


def test_an_unreachable_coordinator_is_named(address):
  (told,) = all_meet(address, [process(1)], patience=0.5)
  assert f"nobody answers at {address}, the address of process 0 (JAX_COORDINATOR_ADDRESS)" in told
  assert "refused" in told


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_named_before_jax_takes_it(address, host):
  port = int(address.rpartition(":")[2])
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    other = socket.create_server((host, port), family=family, reuse_port=True)
  except OSError as error:
    pytest.skip(f"no such address here: {error}")
  with other, pytest.raises(RunError, match=f"port {port}, .* in use.* JAX_COORDINATOR_PORT"):
    meet(address, process(0, 1), 0.5)


@pytest.mark.parametrize("silent", [False, True])
def test_all_hear_in_seconds_that_the_port_is_taken(address, silent, monkeypatch):
  """By a program that refuses their connections, or takes them and says nothing."""
  monkeypatch.setattr(processes, "_ASKING", 0.2)
  with socket.socket() as other:
    other.bind(("localhost", int(address.rpartition(":")[2])))
    if silent:
      other.listen()
    began = time.monotonic()
    told = all_meet(address, [process(i, 3) for i in (1, 2, 0)], patience=30)
  assert time.monotonic() - began < 20
  assert len(set(told)) == 1 and "Process 0 cannot listen at port" in told[0]


def test_waiting_for_a_process_is_said_each_minute(address, monkeypatch, capfd):
  monkeypatch.setattr(processes, "_MINUTE", 0.1)
  all_meet(address, [process(0, 3), process(2, 3)], patience=0.5)
  assert "Process 0 of 3 waits for 1, for " in capfd.readouterr().err
  all_meet(address, [process(1)], patience=0.8)
  assert f"Process 1 tries to reach {address}" in capfd.readouterr().err


def test_foreign_connections_to_the_port_are_ignored(address):
  host, _, port = address.rpartition(":")

  def stranger():
    for _ in range(100):
      try:
        with socket.create_connection((host, int(port)), timeout=1) as connection:
          return connection.sendall(b"GET / HTTP/1.1\n")
      except OSError:
        continue

  with ThreadPoolExecutor(2) as pool:
    first = pool.submit(meet, address, process(0, visible="01"), 5.0)
    pool.submit(stranger).result()
    assert pool.submit(meet, address, process(1, visible="01"), 5.0).result() == [1]
    assert first.result() == [0]


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a whole number of at least 1"),
    ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' must be a whole number of at least 0"),
    (
      {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
      "JAX_PROCESS_ID=2 must be 0 to 1, since JAX_NUM_PROCESSES=2",
    ),
    ({"JAX_LOCAL_DEVICE_IDS": "gpu0"}, "JAX_LOCAL_DEVICE_IDS='gpu0' must be numbers"),
    (
      {
        "JAX_COORDINATOR_ADDRESS": "node1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0",
      },
      "JAX_COORDINATOR_ADDRESS='node1' must be host:port",
    ),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_a_wrong_variable_is_named(environment, message):
  with pytest.raises(RunError, match=re.escape(message)):
    processes._from_environment(environment, {})


def slurm(task, tasks_per_node, on_node):
  return {
    "SLURM_LOCALID": str(task),
    "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
    "SLURM_GPUS_ON_NODE": str(on_node),
  }


@pytest.mark.parametrize(
  ("environment", "visible", "taken"),
  [
    (slurm(1, "2(x2)", 2), "01", [1]),  # --gpus-per-node=2: a task sees both.
    (slurm(1, "2(x2)", 2), "0", [0]),  # --gpus-per-task=1: a task sees its own.
    (slurm(0, "1(x2)", 4), "0123", [0, 1, 2, 3]),  # One task a node.
    (slurm(1, "2", 0), "", None),  # CPUs.
  ],
)
def test_a_slurm_task_takes_its_gpu(environment, visible, taken):
  assert slurm_gpus(environment, list(visible)) == taken


@pytest.mark.parametrize(("task", "visible", "on_node"), [(2, "01", 2), (1, "0", 1)])
def test_a_slurm_task_without_a_gpu_is_an_error(task, visible, on_node):
  with pytest.raises(RunError, match=f"Task {task} .* has no GPU: Slurm gave {len(visible)}"):
    slurm_gpus(slurm(task, "3", on_node), list(visible))


def test_slurm_s_processes_meet_at_the_port_that_jax_will_take(monkeypatch):
  job = 4703
  environment = slurm(0, "2", 0) | {
    "SLURM_JOB_ID": str(job),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "0",
  }
  monkeypatch.setattr(processes, "PATIENCE", 0.5)
  monkeypatch.setattr(processes, "_TELLING", 0.1)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(RunError, match=r"1 came in time to port 62047 .* index 1 "):
    processes._from_environment(environment, {})
  with listen(61440 + job % 4096), pytest.raises(RunError, match=r"port 62047, .* in use"):
    processes._from_environment(environment, {})
  monkeypatch.setenv("JAX_COORDINATOR_PORT", "62048")
  with pytest.raises(RunError, match="to port 62048 of"):
    processes._from_environment(environment, {})


def test_jax_variables_override_slurm_s(address):
  environment = slurm(0, "1", 1) | {
    "JAX_COORDINATOR_ADDRESS": address,
    "JAX_NUM_PROCESSES": "1",
    "JAX_PROCESS_ID": "0",
  }
  given = processes._from_environment(environment, {})
  assert given["cluster_detection_method"] == "deactivate"
  assert given["local_device_ids"] is None


def test_processes_with_unequal_devices_are_named():
  devices = [SimpleNamespace(process_index=i) for i in (0, 0, 1)]
  with pytest.raises(RunError, match="process 0 has 2, process 1 has 1"):
    processes._check_devices(devices)
  processes._check_devices(devices[1:])


def test_a_process_survives_a_json_round_trip():
  me = process(1, visible="01", chosen=[1])
  assert Process(**json.loads(json.dumps(me._asdict()))) == me
