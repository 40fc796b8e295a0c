import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from sbjax import Quantized, Spec
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BlockOptions
from sbjax.optim.state_formats import CompressedState, join_details
from train.config import MeshConfig, OptimizerConfig
from train.optimizer import make_optimizer, matrix_dtype
from train.parallel.sharding import (
  make_mesh,
  parameter_shardings,
  path_name,
  state_shardings,
)
from train.step import make_init
from train.task import CLIPTask


@pytest.fixture(scope="module", params=[True, False], ids=["scan", "unrolled"])
def state(request):
  """Shapes of the state of a tiny CLIP with all optional parameters."""
  options = BlockOptions(scan=request.param, zero_init_layer_scale=True, qk_norm=True)
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  return jax.eval_shape(make_init(CLIPTask(CLIP(SIZES["tiny"], options)), optimizer, 0))


def specs(tree):
  return {path_name(path): s.spec for path, s in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
  ("config", "shape"),
  [((-1, 1), (8, 1)), ((-1, 4), (2, 4)), ((2, -1), (2, 4)), ((1, 8), (1, 8))],
)
def test_a_mesh_size_of_minus_one_takes_the_remaining_devices(config, shape):
  mesh = make_mesh(MeshConfig(data=config[0], fsdp=config[1]))
  assert (mesh.shape["data"], mesh.shape["fsdp"]) == shape


@pytest.mark.parametrize("config", [(3, 2), (-1, 3), (-1, -1), (0, 8), (4, 1)])
def test_a_mesh_that_does_not_use_all_devices_is_an_error(config):
  with pytest.raises(ValueError, match="does not make 8 devices"):
    make_mesh(MeshConfig(data=config[0], fsdp=config[1]))


def test_every_parameter_has_a_rule_and_only_large_ones_are_split(state):
  parameter_specs = specs(parameter_shardings(state.params, make_mesh(MeshConfig(data=2, fsdp=4))))
  for name, spec in parameter_specs.items():
    large = name.endswith(("kernel", "proj", "token_embedding/embedding"))
    assert ("fsdp" in spec) == large, name


def test_moments_are_sharded_as_their_parameters_and_the_rest_is_replicated(state):
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  parameters = specs(parameter_shardings(state.params, mesh))
  for name, spec in specs(state_shardings(state, state.params, mesh)).items():
    owner = next((p for p in parameters if name.endswith("/" + p)), None)
    if owner and ("/mu/" in name or "/nu/" in name or name.startswith("params/")):
      assert spec == parameters[owner], name
    else:
      assert spec == PartitionSpec(), name


def test_a_parameter_without_a_rule_is_named():
  mesh = make_mesh(MeshConfig())
  with pytest.raises(ValueError, match="covers parameter 'image/mystery'"):
    parameter_shardings({"image": {"mystery": jnp.zeros(3)}}, mesh)


def test_an_axis_that_does_not_divide_is_named():
  mesh = make_mesh(MeshConfig(data=1, fsdp=8))
  with pytest.raises(ValueError, match=r"mesh.fsdp=8 does not divide .* 12 .*'image/proj'"):
    parameter_shardings({"image": {"proj": jnp.zeros((12, 8))}}, mesh)


def test_the_state_of_any_optax_optimizer_is_sharded(state):
  mesh = make_mesh(MeshConfig(data=1, fsdp=8))
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  moments = jax.eval_shape(optimizer.init, state.params)
  split = [s for s in jax.tree.leaves(state_shardings(moments, state.params, mesh)) if s.spec]
  kernels = sum("fsdp" in s for s in specs(parameter_shardings(state.params, mesh)).values())
  assert sum("fsdp" in s.spec for s in split) == 2 * kernels
  assert np.all([s.mesh == mesh for s in split])


def test_an_8_bit_state_is_sharded_as_its_parameters(state):
  mesh = make_mesh(MeshConfig(data=1, fsdp=8))
  rowwise = Spec(jnp.int8, "rowwise")

  def rounded(leaf):
    scale = jax.ShapeDtypeStruct((*leaf.shape[:-1], 1), jnp.float32)
    return Quantized(jax.ShapeDtypeStruct(leaf.shape, jnp.int8), scale, rowwise)

  state_specs = specs(
    state_shardings({"mu": jax.tree.map(rounded, state.params)}, state.params, mesh)
  )
  for name, spec in specs(parameter_shardings(state.params, mesh)).items():
    assert state_specs[f"mu/{name}/values"] == spec, name
    assert state_specs[f"mu/{name}/scale"] == PartitionSpec(*(*spec[:-1], None)[: len(spec)]), name


@pytest.mark.parametrize("states", ["coat", "fp8_lm", "bfloat16", "collage_plus"])
def test_moments_in_few_bits_are_split_like_their_parameters(states):
  options = BlockOptions(zero_init_layer_scale=True, qk_norm=True)
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1, states=states), 10)
  task = CLIPTask(CLIP(SIZES["tiny"], options), matrix_dtype=matrix_dtype(states))
  state = jax.eval_shape(make_init(task, optimizer, 0))
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))

  def is_compressed(x):
    return isinstance(x, CompressedState)

  shardings = state_shardings(state, state.params, mesh)
  assert jax.tree.structure(shardings) == jax.tree.structure(state)
  of_state = specs(
    jax.tree.map(
      lambda x: join_details(x) if is_compressed(x) else x, shardings, is_leaf=is_compressed
    )
  )
  residuals = 0
  for name, spec in specs(parameter_shardings(state.params, mesh)).items():
    for moment in ("mu", "nu"):
      ends = (f"/{moment}/{name}", f"/{moment}/{name}/values")
      (path,) = (p for p in of_state if p.endswith(ends))
      assert of_state[path] == spec, path
      details = [s for p, s in of_state.items() if f"/{moment}/{name}/details" in p]
      if states == "coat" and spec[-1:] == (None,):  # A number a group is split with its rows.
        assert all(s == spec for s in details), path
    residual = [s for p, s in of_state.items() if p.endswith(f"/residual/{name}")]
    assert all(s == spec for s in residual), name
    residuals += len(residual)
  (compressed,) = filter(is_compressed, jax.tree.leaves(state.opt_state, is_leaf=is_compressed))
  assert sum(x.dtype.itemsize < 4 for x in jax.tree.leaves(compressed)) > 10
  assert (residuals > 10) == (states == "collage_plus")
