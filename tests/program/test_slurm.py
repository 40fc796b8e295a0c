"""The batch file of docs/clusters.md on a real Slurm of two nodes, which the test starts here.

Slurm's events (a time limit, a preemption, scancel, a requeue, ...) lose no step: the run saves,
and goes on with the bits of a run that nothing disturbed. PATIENCE_SECONDS is for busy machines;
SUSPEND_SECONDS=600 suspends a job for longer.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import QUICK

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DAEMONS = ("slurmctld", "slurmd", "sbatch")
NODES = ("127.0.0.1", "127.0.0.2")  # These resolve everywhere.
PATIENCE = float(os.environ.get("PATIENCE_SECONDS", "600"))  # A busy machine is slow.
SMALL = {
  "data.name": "shapes/tiny", "data.workers": 0, "model.recipe": "full", "model.image_size": 32,
  "model.context_length": 16, "model.scan": True, "batch_size": 32, "steps": 100_000,
  "optimizer.warmup_steps": 2, "log_every": 1, "eval_every": 0, "checkpoint_every": 0,
}  # fmt: skip
TIMINGS = {"step_seconds", "data_wait_seconds", "images_per_second", "peak_gigabytes"}

CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=3600
FirstJobId={first}
NodeName={nodes[0]} Port={ports[1]} CPUs=2
NodeName={nodes[1]} Port={ports[2]} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=90
PartitionName=abrupt Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=2
"""


def free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as closing:
    servers = [closing.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
    return [server.getsockname()[1] for server in servers]


class Slurm:
  """A controller and two nodes in `folder`."""

  def __init__(self, folder: Path):
    self.folder = folder
    (folder / "state").mkdir()
    self.conf = folder / "slurm.conf"
    self.conf.write_text(
      CONF.format(
        host=socket.gethostname(),
        ports=free_ports(3),
        user=os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip(),
        nodes=NODES,
        folder=folder,
        first=16 * os.getpid(),  # Runs of two clusters on a machine meet at ports of their own.
      )
    )
    self.env = {
      **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
      "SLURM_CONF": str(self.conf),
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "PYTHONPATH": str(ROOT),
    }
    self.daemons = [self._start("slurmctld", "-D")]
    self.daemons += [self._start("slurmd", "-D", "-N", node) for node in NODES]

  def _start(self, *command: str) -> subprocess.Popen:
    with (self.folder / "daemons.log").open("a") as log:
      return subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

  def end(self) -> None:
    user = f"--user={os.getuid()}"
    for options in (("--full",), ("--full", "--signal=KILL")):
      self("scancel", *options, user, check=False)
      time.sleep(2)
    end = time.monotonic() + 60
    while self("squeue", "--noheader", check=False).strip() and time.monotonic() < end:
      time.sleep(0.5)
    for daemon in reversed(self.daemons):
      daemon.terminate()
    for daemon in self.daemons:
      daemon.wait(timeout=30)

  def __call__(self, *command: str, check: bool = True) -> str:
    done = subprocess.run(
      command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert not check or done.returncode == 0, done
    return done.stdout

  def nodes_are_idle(self) -> bool:
    return (
      self("sinfo", "--noheader", "--partition=low", "--format=%D %t", check=False) == "2 idle\n"
    )

  def job(self, number: str) -> dict[str, str]:
    fields = self("scontrol", "--oneliner", "show", "job", number).split()
    return dict(field.split("=", 1) for field in fields if "=" in field)


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
    time.sleep(0.3)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
  if missing := [name for name in DAEMONS if shutil.which(name) is None]:
    pytest.skip(f"no {', '.join(missing)} here: they come with Debian's slurm-wlm")
  folder = tmp_path_factory.mktemp("slurm")
  made = Slurm(folder)
  try:
    end = time.monotonic() + 60
    while not made.nodes_are_idle():
      if time.monotonic() > end:
        log = (folder / "daemons.log").read_text().strip().splitlines()
        pytest.skip(f"Slurm does not start here: {log[-1] if log else 'no word'}")
      time.sleep(0.5)
    yield made
  finally:
    made.end()


def batch_file(workdir: Path) -> str:
  """The file of docs/clusters.md, without GPUs, for a small run."""
  page = (ROOT / "docs" / "clusters.md").read_text()
  (text,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.S)
  text, gpus = re.subn(r"#SBATCH --gpus-per-node.*\n", "", text)
  text, python = re.subn(r"\.venv/bin/python", sys.executable, text)
  flags = [f"--config.{name}={value}" for name, value in SMALL.items()]
  flags += [f"--config.data.data_dir={workdir.parent / 'data'}", f"--workdir={workdir}"]
  mine = " ".join(["--config=configs/quickstart.py", *flags])
  text, run = re.subn(r"--config=.*?--workdir=\S+", mine, text, flags=re.S)
  assert gpus == python == run == 1
  return text


class Job:
  """A run that was submitted by the page's file."""

  def __init__(self, slurm: Slurm, workdir: Path, *options: str):
    self.slurm, self.workdir, self.log = slurm, workdir, workdir.with_suffix(".log")
    script = workdir.with_suffix(".sh")
    script.write_text(batch_file(workdir))
    small = ("--ntasks-per-node=1", "--cpus-per-task=1", f"--output={self.log}")
    self.number = slurm("sbatch", "--parsable", *small, *options, str(script)).strip()

  def text(self) -> str:
    return self.log.read_text(errors="replace") if self.log.exists() else ""

  def steps(self) -> list[dict]:
    path = self.workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

  def reaches(self, step: int) -> None:
    def there():
      state = self.slurm.job(self.number)["JobState"]
      assert state not in ("FAILED", "TIMEOUT", "COMPLETED"), f"{state}: {self.text()}"
      with contextlib.suppress(ValueError, IndexError):  # A line that is being written.
        return self.steps()[-1]["step"] >= step
      return False

    until(there, f"step {step} of {self.workdir.name}")

  def has(self, text: str, times: int = 1) -> None:
    until(lambda: self.text().count(text) >= times, f"{text!r} in:\n{self.text()}")

  def ends(self) -> dict[str, str]:
    """Its description, when none of its processes is left."""
    running = ("RUNNING", "COMPLETING", "PENDING", "SUSPENDED")
    until(lambda: self.slurm.job(self.number)["JobState"] not in running, f"job {self.number} ends")
    until(self.slurm.nodes_are_idle, "nodes are idle")
    return self.slurm.job(self.number)

  def saved_step(self) -> int:
    return max(int(p.name) for p in (self.workdir / "checkpoints").iterdir() if p.name.isdecimal())

  def requeued(self, times: int = 1) -> None:
    """Waits for a requeue, and starts the job soon: by itself Slurm waits for two minutes.

    In the second of its end Slurm takes the new start for the old one, and fails the job.
    """

    def waits():
      job = self.slurm.job(self.number)
      ready = job["JobState"] == "RUNNING" or job["Reason"] == "BeginTime"
      return int(job["Restarts"]) >= times and ready

    until(waits, "a requeue")
    self.slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now+2", check=False)

  def ends_soon(self) -> None:
    """Gives the job a time limit in one to two minutes."""
    hours, minutes, _ = map(int, self.slurm.job(self.number)["RunTime"].split(":"))
    limit = f"TimeLimit={60 * hours + minutes + 2}"
    self.slurm("scontrol", "update", f"JobId={self.number}", limit)

  def cancel(self) -> None:
    self.slurm("scancel", self.number)
    self.ends()


@pytest.fixture
def start(slurm, tmp_path_factory):
  """Submits the page's file; the job is cancelled after the test."""
  folder = slurm.folder / "runs"
  folder.mkdir(exist_ok=True)
  jobs = []

  def submit(name, *options):
    jobs.append(Job(slurm, folder / name, *options))
    return jobs[-1]

  yield submit
  for job in jobs:
    slurm("scancel", job.number, check=False)
  until(slurm.nodes_are_idle, "nodes are idle")


def numbers(job: Job) -> dict[int, dict]:
  """The metrics of each step, without times."""
  return {r["step"]: {k: v for k, v in r.items() if k not in TIMINGS} for r in job.steps()}


@pytest.fixture(scope="module")
def undisturbed(slurm):
  """The metrics of the first 60 steps of a run that nothing disturbs."""
  (slurm.folder / "runs").mkdir(exist_ok=True)
  job = Job(slurm, slurm.folder / "runs" / "undisturbed")
  job.reaches(60)
  job.cancel()
  return numbers(job)


def assert_same_bits(job: Job, undisturbed: dict[int, dict], beyond: int) -> None:
  job.reaches(beyond)
  mine = numbers(job)
  assert [*mine] == [*range(1, len(mine) + 1)]  # No step is missing or there twice.
  common = mine.keys() & undisturbed.keys()
  assert {step: mine[step] for step in common} == {step: undisturbed[step] for step in common}


def high(slurm: Slurm) -> None:
  """A job of a higher priority takes both nodes for half a minute."""
  slurm(
    "sbatch", "--partition=high", "--nodes=2", "--ntasks-per-node=2", "--output=/dev/null",
    "--wrap=sleep 30",
  )  # fmt: skip


def test_a_preemption_with_grace_resumes_with_the_same_bits(slurm, start, undisturbed):
  job = start("grace")
  job.reaches(8)
  high(slurm)
  job.has("Stopped by SIGTERM after step")
  job.requeued()
  saved = job.saved_step()
  job.has(f"Continuing after step {saved} of")
  assert_same_bits(job, undisturbed, saved + 8)


def test_a_preemption_without_grace_resumes_with_the_same_bits(slurm, start, undisturbed):
  job = start("abrupt", "--partition=abrupt")
  job.reaches(8)
  high(slurm)
  job.requeued()
  job.has("Continuing after step")
  assert_same_bits(job, undisturbed, job.saved_step() + 8)


def test_a_time_limit_saves_and_requeues(slurm, start, undisturbed):
  job = start("limit", "--time=60", "--signal=TERM@60")
  job.reaches(8)
  job.ends_soon()
  job.has("Stopped by SIGTERM after step")
  job.requeued()
  saved = job.saved_step()
  job.has(f"Continuing after step {saved} of")
  assert_same_bits(job, undisturbed, saved + 3)


def test_two_requeues_change_no_bit(slurm, start, undisturbed):
  job = start("requeue")
  for times in (1, 2):
    job.reaches(8 * times)
    slurm("scontrol", "requeue", job.number)
    job.has("Stopped by SIGTERM after step", times)
    job.requeued(times)
    job.has("Continuing after step", times)
  assert_same_bits(job, undisturbed, job.saved_step() + 8)


@pytest.mark.parametrize("options", [(), ("--full",)], ids=["plain", "full"])
def test_scancel_saves_the_last_step_and_does_not_start_again(slurm, start, options):
  job = start(f"scancel{len(options)}")
  job.reaches(8)
  slurm("scancel", *options, job.number)
  ended = job.ends()
  assert ended["JobState"] in ("CANCELLED", "FAILED") and ended["Restarts"] == "0", ended
  assert f"Stopped by SIGTERM after step {job.saved_step()}" in job.text()
  assert job.saved_step() >= 8


def test_a_signal_to_the_shell_alone_saves(slurm, start):
  job = start("shell", "--time=60", "--signal=B:USR1@60")
  job.reaches(8)
  job.ends_soon()
  job.has("Stopped by SIG")
  job.ends()
  assert job.saved_step() >= 1


def test_a_killed_task_ends_all_and_the_file_continues_the_run(slurm, start, undisturbed):
  job = start("killed")
  job.reaches(8)
  os.kill(tasks(job)[1], signal.SIGTERM)  # One is enough: all save, and Slurm starts them again.
  job.requeued()
  job.has("Continuing after step")
  job.reaches(job.saved_step() + 3)
  os.kill(tasks(job)[1], signal.SIGKILL)
  job.has("Process 1 of 2 ended without a message")
  ended = job.ends()
  assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "1")
  again = start("killed")
  again.has("Continuing after step", 2)
  assert_same_bits(again, undisturbed, again.saved_step() + 4)


def tasks(job: Job) -> list[int]:
  """The pids of the job's Python processes, by their SLURM_PROCID."""
  found = {}
  for folder in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError, KeyError):
      command = (folder / "cmdline").read_bytes().split(b"\0")
      if command[1:3] == [b"-m", b"train.main"] and f"--workdir={job.workdir}".encode() in command:
        variables = (folder / "environ").read_bytes().split(b"\0")
        environment = dict(v.split(b"=", 1) for v in variables if b"=" in v)
        found[int(environment[b"SLURM_PROCID"])] = int(folder.name)
  return [found[i] for i in sorted(found)]


def test_a_suspended_job_goes_on(slurm, start, undisturbed):
  job = start("suspended")
  job.reaches(8)
  slurm("scontrol", "suspend", job.number)
  time.sleep(float(os.environ.get("SUSPEND_SECONDS", "130")))  # JAX's own limit is 100 s.
  before = numbers(job)
  slurm("scontrol", "resume", job.number)
  assert_same_bits(job, undisturbed, max(before) + 8)
  assert slurm.job(job.number)["Restarts"] == "0"


def test_a_taken_port_is_named_and_the_job_does_not_start_again(slurm, start):
  job = start("port", "--hold")
  port = 61440 + int(job.number) % 4096
  with socket.create_server(("", port)):
    slurm("scontrol", "release", job.number)
    ended = job.ends()
  assert f"cannot listen at port {port}" in job.text() and "JAX_COORDINATOR_PORT" in job.text()
  assert "Segmentation fault" not in job.text()
  assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")
