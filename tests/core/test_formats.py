"""The 8-bit formats: largest values, accumulators and accepted names."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sbjax import E4M3, E5M2, INT8
from sbjax.quantize import format_of


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_max_value_of_fp8_is_the_largest_finite_value(dtype):
  assert format_of(dtype).max == float(ml_dtypes.finfo(dtype).max)


def test_int8_is_symmetric():
  assert format_of(INT8).max == 127 == -np.iinfo(INT8).min - 1


def test_sums_are_int32_for_int8_and_float32_for_fp8():
  assert format_of(INT8).accumulator == jnp.int32
  assert format_of(E4M3).accumulator == format_of(E5M2).accumulator == jnp.float32


def test_a_format_may_be_given_by_scalar_type_or_name():
  assert format_of(jnp.int8).max == format_of("int8").max == 127
  assert format_of(jnp.int8).accumulator == format_of("int8").accumulator == jnp.int32


def test_an_unsupported_dtype_error_lists_the_known_formats():
  with pytest.raises(ValueError, match=r"float16.*int8, float8_e4m3fn, float8_e5m2"):
    format_of(jnp.float16)
