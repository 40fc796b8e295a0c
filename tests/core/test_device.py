"""A newer GPU that is to compute as an older one: SBJAX_ASSUME_CAPABILITY."""

import jax
import pytest
import triton_case

from benchmarks.tables import name_of
from benchmarks.timing import provenance
from sbjax.attention import fastest_backend
from sbjax.ops import device
from sbjax.ops.split_k import num_splits


@pytest.fixture(autouse=True)
def unset(monkeypatch):
  monkeypatch.delenv(device.VARIABLE, raising=False)


@pytest.mark.parametrize("chip", [89, 90, 100, 103, 120])
def test_a_newer_gpu_has_the_capability_that_is_assumed_and_its_own_cores(monkeypatch, chip):
  with triton_case.chip(chip, cores=7):
    own = device.target()
    monkeypatch.setenv(device.VARIABLE, "80")
    assumed = device.target()
  assert (device.compute_capability(own), device.compute_capability(assumed)) == (chip, 80)
  assert assumed.chip == own and device.num_sms(assumed) == 7
  assert (own.device_kind, assumed.device_kind) == ("NVIDIA", "NVIDIA as sm_80")


@pytest.mark.parametrize(("number", "chip"), [("", 90), ("80", 80), ("89", 89)])
def test_a_gpu_of_that_capability_is_itself(monkeypatch, number, chip):
  monkeypatch.setenv(device.VARIABLE, number)
  with triton_case.chip(chip):
    assert not isinstance(device.target(), device.Assumed)
    assert device.compute_capability(device.target()) == chip


def test_a_device_that_is_no_nvidia_gpu_is_itself(monkeypatch):
  monkeypatch.setenv(device.VARIABLE, "80")
  assert device.target() == jax.devices()[0]


@pytest.mark.parametrize("number", ["8.0", "75", "81", "90", "100", "a100", " 80", "-80"])
def test_a_capability_that_no_other_chip_runs_is_refused(monkeypatch, number):
  monkeypatch.setenv(device.VARIABLE, number)
  message = f"^SBJAX_ASSUME_CAPABILITY='{number}' must be one of 80 .A100., 86 .*, 89 .*RTX 40.*"
  with pytest.raises(ValueError, match=message):
    device.target()
  with triton_case.chip(90), pytest.raises(ValueError, match=message):
    device.target()


@pytest.mark.parametrize(("number", "chip"), [("80", 75), ("86", 80), ("89", 86)])
def test_a_capability_newer_than_the_gpu_is_refused(monkeypatch, number, chip):
  monkeypatch.setenv(device.VARIABLE, number)
  message = f"^SBJAX_ASSUME_CAPABILITY={number} is newer than this NVIDIA, which has {chip}: "
  with triton_case.chip(chip), pytest.raises(ValueError, match=message):
    device.target()


def test_a_hopper_gpu_as_an_a100_takes_no_way_of_hopper_s(monkeypatch):
  def ways():
    with triton_case.chip(90, cores=132):
      return num_splits(2**17, 1280, 5120), device.compute_capability(device.target())

  assert ways()[0] > 1
  monkeypatch.setenv(device.VARIABLE, "80")
  assert ways() == (1, 80)
  with triton_case.chip(90):
    assert fastest_backend(jax.numpy.dtype("bfloat16"), 257, 64) == "cudnn"


def test_rows_of_results_say_what_was_assumed(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda *_: [triton_case.gpu(90)])
  assert provenance()["chip"] == "NVIDIA"
  monkeypatch.setenv(device.VARIABLE, "80")
  said = provenance()
  assert said["chip"] == "NVIDIA as sm_80"
  assert " SBJAX_ASSUME_CAPABILITY='80' python -m " in " " + said["command"]
  assert name_of("NVIDIA H200 as sm_80") == "H200 as sm_80"
  assert name_of("NVIDIA H100 80GB HBM3") == "H100"
