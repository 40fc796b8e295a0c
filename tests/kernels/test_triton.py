"""Calls of Triton kernels that write in place."""

import jax
import jax.numpy as jnp
import pytest

from sbjax.pallas.triton.call import _call_with_refs

like = jax.ShapeDtypeStruct


@pytest.mark.parametrize("wrapped", [jax.jit, lambda run: run], ids=["jit", "eager"])
def test_outputs_written_in_place_are_returned_in_order(wrapped):
  def call(a, b, c, *, out_type, **no_outputs):
    # Like jax-triton 0.4, it writes to Refs and returns the other outputs.
    assert no_outputs == {"second_out": None, "fourth_out": None}
    assert [(one.shape, one.dtype) for one in out_type] == [((2,), jnp.int8), ((3,), jnp.float32)]
    old_a, old_c = a[...], c[...]
    a[...], c[...] = old_a + b, old_c * b
    return [jnp.full((2,), 7, jnp.int8), 2 * old_c[:3]]

  names = ("a", "b", "c", "first_out", "second_out", "third_out", "fourth_out")
  out = (like((2,), jnp.int8), (like((4,), jnp.float32), like((3,), jnp.float32)),
         like((4,), jnp.float32))  # fmt: skip
  a, b, c = (jnp.arange(4.0) + i for i in (1, 10, 100))

  def run(a, b, c):
    return _call_with_refs(call, (a, b, c), names, out, {0: 3, 2: 1})

  first, (second, third), fourth = wrapped(run)(a, b, c)
  assert jnp.array_equal(first, jnp.full((2,), 7, jnp.int8))
  assert jnp.array_equal(second, c * b) and jnp.array_equal(fourth, a + b)
  assert jnp.array_equal(third, 2 * c[:3])
  assert jnp.array_equal(a, jnp.arange(4.0) + 1)  # The operand is unchanged.
