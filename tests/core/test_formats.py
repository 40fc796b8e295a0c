"""The 8-bit formats: largest values, accumulators and accepted names."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sbjax import E4M3, E5M2, INT8
from sbjax.formats import accumulator_dtype, max_value


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_max_value_of_fp8_is_the_largest_finite_value(dtype):
  assert max_value(dtype) == float(ml_dtypes.finfo(dtype).max)


def test_int8_is_symmetric():
  assert max_value(INT8) == 127 == -np.iinfo(INT8).min - 1


def test_sums_are_int32_for_int8_and_float32_for_fp8():
  assert accumulator_dtype(INT8) == jnp.int32
  assert accumulator_dtype(E4M3) == accumulator_dtype(E5M2) == jnp.float32


def test_a_format_may_be_given_by_scalar_type_or_name():
  assert max_value(jnp.int8) == max_value("int8") == 127
  assert accumulator_dtype(jnp.int8) == accumulator_dtype("int8") == jnp.int32


def test_an_unsupported_dtype_error_lists_the_known_formats():
  with pytest.raises(ValueError, match=r"float16.*int8, float8_e4m3fn, float8_e5m2"):
    max_value(jnp.float16)
