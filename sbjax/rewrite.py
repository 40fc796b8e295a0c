"""Evaluates a function with other products: those of its parameters, found in its jaxpr.

A *weight* is a parameter as it is stored, up to layout: cast, transposed, reshaped, sliced,
gathered from devices. The jaxpr says which operand of a product is one, and of which parameter,
whatever the function called: a layer, `jnp.einsum`, `@`. Loops, branches, `jax.checkpoint` and
`jax.shard_map` are entered; functions with their own derivative rules are not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal


class Weight(NamedTuple):
  """A parameter in the layout that an operand has.

  Attributes:
    path: where the parameter is.
    master: the operand, without the casts to narrower dtypes that its values went through.
  """

  path: str
  master: Any


class Replace(Protocol):
  """Decides about products.

  Attributes:
    enters_all: whether products without a weight matter too.
  """

  enters_all: bool

  def __call__(self, eqn, operands: list, weights: list[Weight | None]) -> list | None:
    """The results of another computation of eqn, or None to leave it."""


def rewritten(function: Callable, paths: Sequence[str | None], replace: Replace) -> Callable:
  """A function of the same arguments, arrays, whose products went through `replace`.

  paths: for each argument where it is as a parameter, or None if it is none. The function is traced
  as by `jax.jit`; results that are no arrays are returned as they are.
  """

  def run(*args):
    jaxpr, rebuild = _traced(function, args)
    named = zip(paths, args, strict=True)
    weights = [None if path is None else Weight(path, arg) for path, arg in named]
    return rebuild(_evaluate(jaxpr, args, weights, replace))

  return run


def _traced(function, args):
  """The jaxpr of a function, and how its results are made of the jaxpr's."""
  found = []

  def arrays_of(*args):
    leaves, tree = jax.tree.flatten(function(*args))
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    others = [None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
    found.append((tree, is_array, others))
    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

  jaxpr = jax.make_jaxpr(arrays_of)(*args)
  tree, is_array, others = found[-1]

  def rebuild(arrays):
    arrays = iter(arrays)
    pairs = zip(is_array, others, strict=True)
    return jax.tree.unflatten(tree, [next(arrays) if array else other for array, other in pairs])

  return jaxpr, rebuild


def _evaluate(closed: ClosedJaxpr, args, weights, replace: Replace) -> list:
  jaxpr = closed.jaxpr
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
  known = {v: weight for v, weight in zip(jaxpr.invars, weights, strict=True) if weight}

  def read(var):
    return var.val if isinstance(var, Literal) else values[var]

  for eqn in jaxpr.eqns:
    operands = [read(v) for v in eqn.invars]
    operand_weights = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
    with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
      results, result_weights = _equation(eqn, operands, operand_weights, replace)
    values.update(zip(eqn.outvars, results, strict=True))
    known.update((v, w) for v, w in zip(eqn.outvars, result_weights, strict=True) if w)
  return [read(v) for v in jaxpr.outvars]


def _equation(eqn, operands, weights, replace: Replace):
  """An equation's results, and which of them are weights."""
  none = [None] * len(eqn.outvars)
  enter = _ENTERED.get(eqn.primitive.name)
  if enter and (replace.enters_all or any(weights)):
    return enter(eqn.params, operands, weights, replace), none
  first = weights[0] if weights else None
  if first and _keeps_values(eqn):
    results = _bind(eqn, operands)
    masters = results
    if eqn.primitive.name == "convert_element_type":
      masters = [first.master if _narrows(eqn, first.master) else results[0]]
    elif first.master is not operands[0]:
      masters = _bind(eqn, [first.master, *operands[1:]])
    return results, [Weight(first.path, master) for master in masters]
  results = replace(eqn, operands, weights)
  return (_bind(eqn, operands) if results is None else results), none


def _bind(eqn, operands) -> list:
  results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
  return list(results) if eqn.primitive.multiple_results else [results]


_LAYOUT = {
  *("reshape", "transpose", "squeeze", "slice", "split", "dynamic_slice", "copy", "name"),
  *("sharding_constraint", "reshard", "all_gather", "all_gather_invariant", "pvary", "pcast"),
}


def _keeps_values(eqn) -> bool:
  """Whether the first operand's values are those of the results, in some layout or dtype."""
  before, after = eqn.invars[0].aval, eqn.outvars[0].aval
  match eqn.primitive.name:
    case "convert_element_type":
      return all(jnp.issubdtype(a.dtype, jnp.floating) for a in (before, after))
    case "broadcast_in_dim":  # Also adds axes of size 1; a repeated row is no weight.
      return math.prod(before.shape) == math.prod(after.shape)
    case "optimization_barrier":
      return len(eqn.outvars) == 1
    case name:
      return name in _LAYOUT


def _narrows(eqn, master) -> bool:
  return eqn.outvars[0].aval.dtype.itemsize < master.dtype.itemsize


# Each takes an equation's params, operands and weights, and evaluates the jaxprs in the params.


def _inner(closed: ClosedJaxpr, weights, replace: Replace):
  """The jaxpr as a function, whose arguments are the weights that its operands were."""

  def function(*args):
    own = [weight and Weight(weight.path, a) for weight, a in zip(weights, args, strict=True)]
    return _evaluate(closed, args, own, replace)

  return function


def _jit(params, operands, weights, replace):
  function = _inner(params["jaxpr"], weights, replace)
  shardings = {name: params[name] for name in ("in_shardings", "out_shardings")}
  if any(isinstance(s, jax.sharding.Sharding) for given in shardings.values() for s in given):
    return jax.jit(function, **shardings)(*operands)
  return _evaluate(params["jaxpr"], operands, weights, replace)


def _checkpoint(params, operands, weights, replace):
  function = _inner(ClosedJaxpr(params["jaxpr"], ()), weights, replace)
  options = {name: params[name] for name in ("prevent_cse", "policy")}
  return jax.checkpoint(function, **options)(*operands)


def _scan(params, operands, weights, replace):
  if "ft_in" in params:  # jax >= 0.11
    num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
  else:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
  consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
  xs = operands[num_consts + num_carry :]
  of_consts, of_xs = weights[:num_consts], weights[num_consts + num_carry :]
  # A weight in the carry may be another one in the next step.
  function = _inner(params["jaxpr"], [*of_consts, *[None] * num_carry, *of_xs], replace)

  def step(carry, xs):
    results = function(*consts, *carry, *xs)
    return results[:num_carry], results[num_carry:]

  options = {name: params[name] for name in ("length", "reverse", "unroll")}
  carry, ys = jax.lax.scan(step, carry, xs, **options)
  return [*carry, *ys]


def _while(params, operands, weights, replace):
  split, carried = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
  cond_consts, body_consts = operands[:split], operands[split:carried]
  carry = operands[carried:]
  body_weights = [*weights[split:carried], *[None] * len(carry)]
  body = _inner(params["body_jaxpr"], body_weights, replace)
  condition = _inner(params["cond_jaxpr"], [None] * (split + len(carry)), replace)
  return jax.lax.while_loop(
    lambda carry: condition(*cond_consts, *carry)[0],
    lambda carry: body(*body_consts, *carry),
    carry,
  )


def _cond(params, operands, weights, replace):
  branches = [_inner(branch, weights[1:], replace) for branch in params["branches"]]
  return jax.lax.switch(operands[0], branches, *operands[1:])


def _shard_map(params, operands, weights, replace):
  function = _inner(ClosedJaxpr(params["jaxpr"], ()), weights, replace)
  options = {name: params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
  names = params["newly_manual_axes"]
  # A list of results has a list of specs.
  options["out_specs"] = list(options["out_specs"])
  return jax.shard_map(function, axis_names=set(names), **options)(*operands)


_ENTERED = {
  "jit": _jit,
  "remat2": _checkpoint,
  "scan": _scan,
  "while": _while,
  "cond": _cond,
  "shard_map": _shard_map,
}
