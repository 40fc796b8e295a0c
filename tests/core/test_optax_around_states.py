"""Optimizers of optax around coded states and compensated parameters, and within them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sbjax.optim.collage import compensated, split_parameters, summed_parameters
from sbjax.optim.state_formats import BFLOAT16, E4M3_EXPANDED, compress_state


@pytest.mark.parametrize(
  ("optimizer", "outer", "inner"),
  [
    pytest.param(
      optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
      {"acc_grads": BFLOAT16},
      lambda state: state.inner_opt_state[0],
      marks=pytest.mark.slow,
    ),
    (
      optax.contrib.schedule_free_adamw(1e-3),
      {"z": BFLOAT16},
      lambda state: state.base_optimizer_state[0],
    ),
  ],
)
def test_a_field_within_a_state_with_a_named_field_is_coded_too(optimizer, outer, inner):
  optimizer = compress_state(optimizer, min_size=1, nu=E4M3_EXPANDED, **outer)
  params = {"w": jnp.ones((8, 128))}
  state = optimizer.init(params)
  with jax.numpy_dtype_promotion("standard"):  # optax mixes integer steps with floating rates.
    _, after = optimizer.update(params, state, params)
  for each in (state, after):
    (name,) = outer
    assert getattr(each.inner_state, name)["w"].dtype == jnp.bfloat16
    assert inner(each.inner_state).nu["w"].dtype == jnp.float8_e4m3fn


def test_a_mask_or_label_may_stand_for_a_subtree():
  """optax then has one MaskedNode for it."""
  values = {"blk": {"w": jnp.full((4, 4), 1.001), "b": jnp.full(4, 1.001)}, "h": jnp.full(4, 1.001)}
  params = optax.tree.cast(values, jnp.bfloat16)
  inner = compensated(optax.sgd(1e-4))
  for optimizer in (
    optax.masked(inner, {"blk": False, "h": True}),
    optax.multi_transform({"no": optax.set_to_zero(), "yes": inner}, {"blk": "no", "h": "yes"}),
  ):
    state = optimizer.init(params)
    new, state = split_parameters(values, params, state)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(new))
    total = summed_parameters(new, state)
    np.testing.assert_allclose(total["h"], 1.001, rtol=1e-5)
    np.testing.assert_array_equal(total["blk"]["w"], params["blk"]["w"].astype(jnp.float32))
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, new)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
