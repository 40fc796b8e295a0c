"""The choice of model.remat="auto", from the memory of steps that XLA compiles for the CPU."""

import dataclasses
import functools
import itertools
import json
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from sbjax.models.transformer import REMAT_POLICIES
from train import memory
from train.config import Config, MeshConfig, ModelConfig, OptimizerConfig
from train.optimizer import make_optimizer
from train.parallel.sharding import make_mesh
from train.run import Run, abstract_state
from train.task import block_options, make_task

pytestmark = pytest.mark.standard_promotion  # As optax needs.

TOKENIZER = SimpleNamespace(vocab_size=300, eot_id=2)


def make(recipe="full", accumulate=1, **model) -> Run:
  """A Run without data, whose activations take more memory than its state."""
  model = ModelConfig(size="tiny", image_size=32, recipe=recipe, dtype="float32", **model)
  config = Config(model=model, batch_size=256, accumulate=accumulate)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  task = make_task(config).with_tokenizer(TOKENIZER)
  optimizer, schedule = make_optimizer(OptimizerConfig(), config.steps)
  state = abstract_state(task, optimizer, config.seed, mesh)
  return Run(config, None, TOKENIZER, 0, mesh, task, optimizer, schedule, state, None)


def make_step(run):
  """The gradient of the image tower, in place of a training step, which compiles longer."""
  return _step_with(run.config.model.remat)


@functools.cache  # JAX does not compile the same jitted step twice.
def _step_with(policy):
  model = make(remat=policy).task.model

  def step(state, batch):
    def loss(params):
      pixels = batch["image"].astype(jnp.float32)
      return jnp.sum(model.apply({"params": params}, pixels, method=model.encode_image))

    return state._replace(params=jax.grad(loss)(state.params)), {}, jnp.ones(1, bool)

  return jax.jit(step, donate_argnums=0)


@functools.cache
def needed() -> dict[str, float]:
  """The bytes of a step with each policy."""
  run = make()
  runs = {policy: memory._with_remat(run, policy) for policy in memory.SAVED}
  return {policy: memory._compiled(each, make_step)[1].total for policy, each in runs.items()}


@pytest.fixture
def choose(monkeypatch, tmp_path):
  """choose(limit in bytes, run, resumes) -> (policy, line, names of what was compiled)."""

  def choose_within(limit, run=None, resumes=False, make_step=make_step):
    monkeypatch.setattr(memory, "bytes_limit", lambda: limit)
    compiled = []
    chosen, step, line = memory.choose_remat(
      make() if run is None else run,
      make_step,
      tmp_path,
      resumes=resumes,
      waits_for=compiled.append,
    )
    assert callable(step)
    policy = chosen.config.model.remat
    assert chosen.task.model.options.remat == policy
    return policy, line, [re.search(r"remat=(\w+)", what)[1] for what in compiled]

  return choose_within


def test_each_policy_takes_less_memory_than_the_ones_before():
  assert all(a > b for a, b in itertools.pairwise(needed().values())), needed()


@pytest.mark.parametrize("policy", memory.SAVED)
def test_the_first_policy_that_fits_is_chosen(choose, policy):
  exact = needed()[policy] / (1 - memory.FREE)
  assert choose(exact * 1.001)[0] == policy
  if policy != "block":
    assert choose(exact * 0.999)[0] != policy


def test_the_step_that_comes_with_the_choice_is_compiled(monkeypatch, tmp_path):
  monkeypatch.setattr(memory, "bytes_limit", lambda: 1e12)
  options = {"resumes": False, "waits_for": lambda _: None}
  _, step, _ = memory.choose_remat(make(), make_step, tmp_path, **options)
  assert isinstance(step, jax.stages.Compiled)


def test_the_line_has_the_memory_and_the_limit(choose):
  sizes = {policy: f"{count / 1e9:.3g} GB" for policy, count in needed().items()}
  assert choose(1e9)[1] == (
    f"remat=none: a step takes {sizes['none']} of the 1 GB that JAX has on a device"
  )
  assert choose(1e6)[1] == (
    f"remat=block: a step takes {sizes['block']} of the 0.001 GB that JAX has on a device"
    f" (none {sizes['none']})"
  )


def test_the_donated_state_counts_once():
  run = make()
  state, batch = (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    for tree in (run.abstract_state, run.task.abstract_batch(run.config.batch_size))
  )
  fixed = memory._compiled(memory._with_remat(run, "none"), make_step)[1].fixed
  batches = (1 + run.config.data.prefetch) * batch
  assert batches < fixed < state + batches + 1000  # 1000: what is not state.


def test_policies_that_cannot_fit_are_not_compiled(choose):
  assert choose(1e6)[2] == ["none", "block"]


def test_a_step_too_large_to_compile_does_not_fit(choose):
  def fails(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

  def make_large(run):
    is_first = run.config.model.remat == "none"
    return SimpleNamespace(lower=fails) if is_first else make_step(run)

  policy, line, _ = choose(1e12, make_step=make_large)
  assert policy == "dots" and line.endswith("(none more than there is)")


def test_other_errors_of_a_compilation_are_raised(choose):
  def fails(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

  with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
    choose(1e12, make_step=lambda run: SimpleNamespace(lower=fails))


def test_a_run_that_continues_keeps_its_policy_and_compiles_no_other(choose):
  limit = needed()["dots"] * 1.1
  policy, _, compiled = choose(limit)
  assert compiled == ["none", "dots"]
  assert choose(limit, resumes=True) == (policy, f"remat={policy}, as before", [])


def test_a_run_chooses_again_on_another_device_or_without_a_checkpoint(choose, tmp_path):
  choose(1e6)
  assert choose(1e6, resumes=True)[2] == []
  assert choose(1e12, resumes=True)[0] == "none"
  assert choose(1e12, resumes=True)[2] == []
  assert choose(1e12)[2] == ["none"]
  two = make(accumulate=2)
  assert choose(1e12, run=two, resumes=True)[2] == ["none"]
  for damaged in ("", "{", "[]", '{"remat": "unknown"}', '{"remat": ["none"]}'):
    (tmp_path / "remat.json").write_text(damaged)
    assert choose(1e12, run=two, resumes=True)[2] == ["none"]


def stages_of(**model) -> list[Run]:
  run = make(**model)
  return [run.at(stage.last) for stage in run.config.stages()]


def test_stages_of_other_images_have_conditions_of_their_own():
  one, two = stages_of(stages="16px until 0.5, 32px")
  assert memory._conditions(one, 1e12) != memory._conditions(two, 1e12)


@pytest.mark.parametrize(
  "model",
  [{"recipe": "switchback until 0.5, full"}, {"stages": "32px drop 0.5 until 0.5, 32px"}],
  ids=str,
)
def test_each_stage_has_a_policy_of_its_own(choose, model):
  stages = stages_of(**model)
  for stage in stages:
    assert choose(1e12, run=stage, resumes=True)[2] == ["none"]
    assert choose(1e12, run=stage, resumes=True)[2] == []
  plain = make()
  assert not {"recipe", "images"} & {*memory._conditions(plain, 1e12)}


@pytest.mark.parametrize("limit", [1e12, 1e9, 1e6, math.inf])
def test_a_process_alone_compiles_ahead_what_a_choice_will_ask_for(tmp_path, monkeypatch, limit):
  fits = {"dots": 0.9e9, "attention_dots": 0.4e9, "block": 1e6}  # bytes; else more than a GB

  def steps_in(made):
    def make_step(run):
      made.append(run.config.model.remat)
      sizes = dict.fromkeys(("argument", "output", "alias"), 0)
      sizes["temp"] = fits.get(made[-1], 2e9)
      stats = SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})
      return SimpleNamespace(memory_analysis=lambda: stats)

    return make_step

  chosen, ahead = [], []
  options = {"resumes": False, "waits_for": lambda _: None}
  monkeypatch.setattr(memory, "bytes_limit", lambda: limit)
  memory.choose_remat(make(), steps_in(chosen), tmp_path, **options)
  monkeypatch.setattr(jax, "process_count", lambda: 2)  # It would wait for the other for ever.
  memory.compile_ahead(make(), steps_in(ahead))
  assert ahead == chosen


@pytest.mark.parametrize("policy", ["none", "block", *REMAT_POLICIES])
def test_a_policy_of_the_config_is_taken_as_it_is(choose, tmp_path, policy):
  assert choose(1.0, run=make(remat=policy), make_step=lambda _: len) == (policy, "", [])
  assert not (tmp_path / "remat.json").exists()


def test_a_device_that_does_not_name_its_memory_repeats_nothing(choose, tmp_path):
  assert memory.bytes_limit() == math.inf  # A CPU.
  assert choose(memory.bytes_limit()) == ("none", "", [])
  assert not (tmp_path / "remat.json").exists()


def test_the_limit_is_that_of_the_smallest_device(monkeypatch):
  devices = [SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": n}) for n in (30, 20, 40)]
  monkeypatch.setattr(jax, "local_devices", lambda: devices)
  assert memory.bytes_limit() == 20


@pytest.mark.parametrize(
  ("recipe", "policies"),
  [
    ("full", ["none", "dots", "attention_dots", "block"]),
    ("switchback_m", ["none", "dots_and_residuals", "residuals", "block"]),
    ("*/fc1=full, *=switchback_m", ["none", "dots", "attention_dots", "block"]),
  ],
)
def test_the_policies_to_choose_from_fit_the_recipe(recipe, policies):
  assert list(memory._shares(make(recipe).task.model)) == policies


@pytest.mark.parametrize("recipe", ["full", "switchback_m"])
def test_grouped_activations_are_kept_by_the_policies_to_choose_from(recipe):
  policies = ["none", "dots_and_residuals", "residuals", "block"]
  assert list(memory._shares(make(recipe, keep="grouped").task.model)) == policies


def test_remat_json_says_what_was_chosen_and_where(choose, tmp_path):
  choose(2e9)
  found = json.loads((tmp_path / "remat.json").read_text())
  assert found["remat"] == "none" and found["device"] == "cpu" and found["gigabytes"] == 2.0


def test_all_layers_are_unrolled_on_a_gpu_only(monkeypatch):
  assert block_options(ModelConfig(size="tiny")).unroll == 1
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert block_options(ModelConfig(size="tiny")).unroll == 0
  assert block_options(ModelConfig(size="tiny", unroll=2)).unroll == 2


@pytest.mark.parametrize(
  ("recipe", "mlp_ratio", "layer_scale", "policy", "share"),
  [  # As tests.saved_bytes counts them for such models.
    ("switchback", 8192 / 1664, False, "attention_dots", 0.419),
    ("switchback", 4, True, "dots", 0.767),
    ("switchback", 4, True, "attention_dots", 0.384),
    ("switchback_m", 4, True, "residuals", 0.333),
    ("switchback+grouped", 4, True, "dots_and_residuals", 0.805),
    ("switchback_m+grouped", 4, True, "dots_and_residuals", 0.893),
  ],
)
def test_shares_are_those_of_the_model(recipe, mlp_ratio, layer_scale, policy, share):
  recipe, _, keep = recipe.partition("+")
  model = make(recipe, zero_init_layer_scale=layer_scale, keep=keep or "original").task.model
  vision = dataclasses.replace(model.config.vision, mlp_ratio=mlp_ratio)
  config = dataclasses.replace(model.config, vision=vision)
  assert memory._shares(model.clone(config=config))[policy] == pytest.approx(share, rel=4e-3)
