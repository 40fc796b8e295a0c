"""sbjax compiled for absent TPUs: its matmuls in 8 bits, its gathers, its memory.

One process of `tpu.py` compiles for each chip; all run at once.
"""

import collections
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from sbjax import RECIPES
from tests.aot import tpu
from train.memory import is_out_of_memory
from train.task import BF16_PEAK

pytestmark = [pytest.mark.aot, pytest.mark.slow]

ROOT = pathlib.Path(__file__).parents[2]
CHIPS = {"v5e": 16, "v6e": 32}  # GiB of memory.
PARTS = ("layers", "step", "update", "out of memory")


@functools.cache
def proofs():
  """{chip: the results of tpu.py, or its error}; skips the test where libtpu is missing."""
  pytest.importorskip("libtpu", reason="the extra `tpu` is not installed")
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return dict(zip(CHIPS, pool.map(_proof, CHIPS), strict=True))


def _proof(chip):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
  environment["XLA_FLAGS"] = ""
  command = [sys.executable, "-m", "tests.aot.tpu", chip, "--parts", *PARTS]
  run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
  return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else run.stderr[-5000:]


@pytest.fixture(params=CHIPS)
def chip(request):
  return request.param


@pytest.fixture
def proof(chip):
  result = proofs()[chip]
  return pytest.fail(result) if isinstance(result, str) else result


# Bytes a parameter; "coat" has no kernel there.
TEMPORARY = {"v5e": {"bfloat16": 2.1, "coat": 28.2}}
TEMPORARY["v6e"] = TEMPORARY["v5e"] | {"collage_plus": 8.1}
NAMES = {"int8": "s8", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


def expected_operands(recipe, layers: int) -> dict[str, int]:
  """The operands of the matmuls of linear layers: forward, input gradient, weight gradient."""
  found = collections.Counter()
  for pair in (recipe.fwd, recipe.dgrad, recipe.wgrad):
    names = sorted(NAMES[spec.dtype.name] for spec in pair) if pair else ["bf16", "bf16"]
    found[" x ".join(names)] += layers
  return found


@pytest.mark.parametrize(("piece", "recipe"), tpu.CASES)
def test_each_matmul_has_its_recipe_s_8_bits(proof, piece, recipe):
  layers = {"linear": 3, "mlp": 2}[piece]
  matmuls = proof["layers"][f"{piece}, {recipe}"]["matmuls"]
  found = collections.Counter()
  for name, count in matmuls.items():
    operands, _, result = name.partition(" -> ")
    found[operands] += count
    assert (result == "s32") == (operands == "s8 x s8")
  assert found == expected_operands(RECIPES[recipe], layers)


@pytest.mark.parametrize("part", ["layers", "step"])
def test_no_call_is_of_a_gpu(proof, part):
  found = proof[part].values() if part == "layers" else [proof[part]]
  targets = {target for one in found for target in one["targets"]}
  assert not re.search("triton|mosaic_gpu|cublas|cudnn", " ".join(targets))


def test_a_step_multiplies_and_gathers_in_8_bits(proof):
  found = proof["step"]
  # Of a layer of each tower: forward q, k, v, out, fc1 and fc2, then the input gradients of four
  # kernels.
  assert found["matmuls"]["s8 x s8 -> s32"] == 2 * (6 + 4)
  assert [n for dtype, n in found["gathered"] if dtype == "s8"] == found["kernels"]


def test_a_step_of_a_split_state_fits_into_the_chip(proof, chip):
  found = proof["step"]
  arguments, temporary = (1e9 * n for n in found["gigabytes"])
  # Weights and two moments in float32; pixels; and what is not split.
  state, pixels = 12 * found["parameters"] / found["mesh"][1], 3 * 224**2 * found["images"]
  assert state + pixels <= 1.001 * arguments <= 1.01 * (state + pixels)
  assert arguments + temporary < CHIPS[chip] * 2**30


def test_an_update_of_states_in_few_bits_is_in_place(proof, chip):
  in_place = {name: round(one["in_place"], 3) for name, one in proof["update"].items()}
  of_moments = {"float32": 12, "averaged": 16, "bfloat16": 8, "coat": 6.125, "fp8_lm": 7}
  assert in_place == of_moments | {"collage_light": 8, "collage_plus": 10}
  for name, one in proof["update"].items():
    assert one["temporary"] <= TEMPORARY[chip].get(name, 0.1), name


def test_xla_s_message_for_too_little_memory_is_known(proof):
  assert is_out_of_memory(jax.errors.JaxRuntimeError(proof["out of memory"]))


def test_a_chip_s_peak_is_known_by_its_kind(proof):
  assert proof["kind"] in BF16_PEAK
