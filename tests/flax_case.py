"""Output and gradients of Flax layers at random parameters, in one compilation each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

# Compilation takes most of a test's time, and programs run only a few times.
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
compiled = functools.partial(jax.jit, compiler_options=_OPTIONS)
# XLA's older emitters (conftest.py) may round a product and a sum at once in one program and not in
# another. This is for programs whose bits are compared.
_NEW_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
bitwise = functools.partial(jax.jit, compiler_options=_OPTIONS | _NEW_EMITTERS)


def normal(shape, dtype="float32", seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def drawn(shapes):
  """Random numbers for a tree of shapes; kernels have about 1 / sqrt(fan-in)."""
  leaves, treedef = jax.tree.flatten(shapes)
  return treedef.unflatten(
    [normal(a.shape, a.dtype, seed) * a.dtype.type(0.3) for seed, a in enumerate(leaves)]
  )


def value_and_grads(function, *args):
  """The function's output, and the gradients of the sum of its sines."""

  def scalar(*args):
    y = function(*args)
    return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

  argnums = tuple(range(len(args)))
  run = compiled(jax.value_and_grad(scalar, argnums, has_aux=True, allow_int=True))
  (_, y), grads = run(*args)
  return jax.tree.map(np.asarray, (y, grads))


def output_and_gradients(function, dy, *arguments):
  """y, and the gradients of the arguments for dy."""

  @bitwise
  def run(dy, *arguments):
    y, backward = jax.vjp(function, *arguments)
    return y, *backward(dy)

  return run(dy, *arguments)


def linen(module, x):
  """Output and gradients in parameters and x of a linen module."""
  variables = drawn(jax.eval_shape(module.init, jax.random.key(0), x))
  return value_and_grads(module.apply, variables, x)


def assert_close(actual, expected, rtol):
  """Leaf by leaf in the same dtype, within rtol of the largest of its kind: y, or gradients."""
  for kinds in zip(actual, expected, strict=True):
    ours, theirs = map(jax.tree.leaves, kinds)
    largest = max(float(np.max(np.abs(b))) for b in theirs)
    for a, b in zip(ours, theirs, strict=True):
      assert a.shape == b.shape and a.dtype == b.dtype
      a, b = a.astype(np.float32), b.astype(np.float32)
      np.testing.assert_allclose(a, b, rtol=0, atol=rtol * largest)


def int8_products(function, *args):
  """How many products of int8 a function has, those within loops and branches once."""
  found = 0

  def count(jaxpr):
    nonlocal found
    for eqn in jaxpr.eqns:
      if eqn.primitive.name == "dot_general":
        found += all(v.aval.dtype == jnp.int8 for v in eqn.invars)
      for inner in jaxprs_in_params(eqn.params):
        count(inner)

  count(jax.make_jaxpr(function)(*args).jaxpr)
  return found
