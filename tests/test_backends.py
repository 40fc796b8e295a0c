"""A backend is found by name, and one that was named is never swapped for another."""

import jax.numpy as jnp
import pytest

from sbjax import quantize, quantized_dot, quantized_dot_general, scaled_matmul
from sbjax.backends import get_backend


def test_xla_is_the_definition():
  backend = get_backend("xla")
  assert backend.quantize is quantize and backend.scaled_matmul is scaled_matmul


def test_none_chooses_one_that_exists():
  assert get_backend(None) == get_backend(get_backend(None).name)


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_a_backend_without_kernels_says_what_there_is(name):
  with pytest.raises(NotImplementedError, match=rf"{name}.*'xla'"):
    get_backend(name)
  with pytest.raises(NotImplementedError, match=rf"{name}.*'xla'"):
    quantized_dot(jnp.ones((2, 4)), jnp.ones((4, 3)), "switchback", backend=name)
  with pytest.raises(NotImplementedError, match=rf"{name}.*'xla'"):
    quantized_dot_general("switchback", backend=name)


def test_an_unknown_backend_says_what_there_is():
  with pytest.raises(ValueError, match=r"'cuda'.*'xla'.*None chooses"):
    get_backend("cuda")
  with pytest.raises(ValueError, match=r"'cuda'.*'xla'"):
    quantized_dot(jnp.ones((2, 4)), jnp.ones((4, 3)), "full", backend="cuda")
