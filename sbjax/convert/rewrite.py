"""Evaluates a function with other products: those of its parameters, found in its jaxpr.

A *weight* is a parameter as it is stored, up to layout: cast, transposed, reshaped, sliced, joined
with others, gathered from devices. The jaxpr says which operand of a product is one, and of which
parameter, whatever the function called: a layer, `jnp.einsum`, `@`. Loops, branches,
`jax.checkpoint` and `jax.shard_map` are entered; functions with rules of their own (derivatives,
batching) are not. `Replace` is told of a weight that is multiplied where nobody looks.

A parameter may be frozen in 8 bits (a `QuantizedWeight`). The function is traced with floats in its
place; the evaluation has a `Frozen` there, in whatever layout, until `Replace` multiplies by it or
opens it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxprs_in_params

from sbjax.convert import layouts
from sbjax.linear.frozen import Frozen, view
from sbjax.linear.weight import QuantizedWeight

JOINED = " + "  # between the paths of parameters that `jnp.concatenate` or `jnp.stack` joins


class Weight(NamedTuple):
  """A parameter in the layout that an operand has, or several that are joined."""

  path: str  # or paths
  # The operand, a Frozen or without the casts to narrower dtypes that its values went through.
  master: Any


class Replace(Protocol):
  """Decides about products."""

  enters_all: bool  # whether products without a weight matter too

  def __call__(self, eqn, operands: list, weights: list[Weight | None]) -> list | None:
    """The results of another computation of eqn, or None to leave it."""

  def left(self, eqn, weight: Weight) -> None:
    """Hears of a weight that eqn may multiply, where it is not replaced."""

  def opened(self, eqn, path: str, weight: Frozen) -> jax.Array:
    """The floats of a weight in 8 bits that eqn takes otherwise than in a product; or an error."""
    ...


def rewritten(function: Callable, paths: Sequence[str | None], replace: Replace) -> Callable:
  """A function of the same arguments, arrays, whose products went through `replace`.

  paths: for each argument where it is as a parameter, or None if it is none. The function is traced
  as by `jax.jit`; results that are no arrays are returned as they are.
  """

  def run(*args):
    operands = [view(arg) if isinstance(arg, QuantizedWeight) else arg for arg in args]
    given = [
      jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Frozen) else x for x in operands
    ]
    jaxpr, rebuild = _traced(function, given)
    named = zip(paths, operands, strict=True)
    weights = [None if path is None else Weight(path, x) for path, x in named]
    results, _ = _evaluate(jaxpr, operands, weights, replace)
    # A weight that comes back is as it was given. Literals and constants are numpy's, which `+=`
    # would change in place.
    as_given = {id(x): arg for x, arg in zip(operands, args, strict=True) if isinstance(x, Frozen)}
    results = [as_given.get(id(r), r) for r in results]
    return rebuild([r if isinstance(r, jax.Array | _FROZEN) else jnp.asarray(r) for r in results])

  return run


_FROZEN = QuantizedWeight | Frozen


def _traced(function, args):
  """The jaxpr of a function, and how its results are made of the jaxpr's."""
  found = []

  def arrays_of(*args):
    leaves, tree = jax.tree.flatten(function(*args))
    found.append((tree, [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

  jaxpr = jax.make_jaxpr(arrays_of)(*args)
  tree, others = found[-1]

  def rebuild(arrays):
    arrays = iter(arrays)
    return tree.unflatten(next(arrays) if other is None else other for other in others)

  return jaxpr, rebuild


def _evaluate(closed: ClosedJaxpr, args, weights, replace: Replace) -> tuple[list, list]:
  """The results, and which of them are weights."""
  jaxpr = closed.jaxpr
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
  known = {v: weight for v, weight in zip(jaxpr.invars, weights, strict=True) if weight}

  def read(var):
    return var.val if isinstance(var, Literal) else values[var]

  def weight_of(var):
    return None if isinstance(var, Literal) else known.get(var)

  for eqn in jaxpr.eqns:
    operands, operand_weights = map(read, eqn.invars), map(weight_of, eqn.invars)
    with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
      results, result_weights = _equation(eqn, list(operands), list(operand_weights), replace)
    values.update(zip(eqn.outvars, results, strict=True))
    known.update((v, w) for v, w in zip(eqn.outvars, result_weights, strict=True) if w)
  return [read(v) for v in jaxpr.outvars], [weight_of(v) for v in jaxpr.outvars]


def _equation(eqn, operands, weights, replace: Replace) -> tuple[list, list]:
  """An equation's results, and which of them are weights."""
  none = [None] * len(eqn.outvars)
  frozen = [isinstance(x, Frozen) for x in operands]
  if replace.enters_all or any(weights):
    if (enter := _ENTERED.get(_name(eqn))) and not (any(frozen) and enter is _shard_map):
      results = enter(eqn, operands, weights, replace)
      return results if isinstance(results, tuple) else (results, none)
    if (inner := _called(eqn)) and not any(frozen):
      return _call(eqn, inner, operands, weights, replace), none
  if any(frozen) and _keeps_values(eqn) and layouts.follows(eqn):
    return _in_8_bits(eqn, operands, weights)
  if any(weights) and _keeps_values(eqn) and not any(frozen):
    return _in_layout(eqn, operands, weights)
  if all(weights) and _name(eqn) in _JOINS:
    return _side_by_side(eqn, operands, weights, replace)
  for weight in filter(None, weights if may_multiply(eqn, weights) else ()):
    replace.left(eqn, weight)
  results = replace(eqn, operands, weights)
  if results is None:
    results = _bind(eqn, _in_floats(eqn, operands, weights, replace))
  return results, none


def _in_8_bits(eqn, operands, weights) -> tuple[list, list]:
  """`_in_layout` where an operand is a Frozen."""
  if _name(eqn) in _EACH:
    return operands, [w and Weight(w.path, x) for w, x in zip(weights, operands, strict=True)]
  results = layouts.moved(eqn, operands[0], operands[1:])
  return results, [Weight(weights[0].path, x) for x in results]


def _in_layout(eqn, operands, weights) -> tuple[list, list]:
  """The results of an equation that keeps values, and the weights that they are."""
  results = _bind(eqn, operands)
  masters: list[Any] = [w.master if w else None for w in weights]
  if eqn.primitive.name == "convert_element_type":
    narrows = eqn.outvars[0].aval.dtype.itemsize < masters[0].dtype.itemsize
    masters = masters if narrows else results
  elif any(m is not None and m is not x for m, x in zip(masters, operands, strict=True)):
    masters = _bind(eqn, [x if m is None else m for m, x in zip(masters, operands, strict=True)])
  else:
    masters = results
  # Of several operands each has a result; the only one may have several, its parts.
  sources = weights if _name(eqn) in _EACH else weights[:1] * len(results)
  return results, [w and Weight(w.path, m) for w, m in zip(sources, masters, strict=True)]


def _side_by_side(eqn, operands, weights, replace: Replace) -> tuple[list, list]:
  """Joined parameters as one weight, of floats: in 8 bits each has scales of its own."""
  floats = _in_floats(eqn, operands, weights, replace)
  pairs = zip(floats, weights, strict=True)
  masters = [x if isinstance(w.master, Frozen) else w.master for x, w in pairs]
  results = _bind(eqn, floats)
  same = len({m.dtype for m in masters}) == 1
  (master,) = _bind(eqn, masters) if same else results
  paths = dict.fromkeys(path for w in weights for path in w.path.split(JOINED))
  return results, [Weight(JOINED.join(paths), master)]


def _in_floats(eqn, operands, weights, replace: Replace) -> list:
  pairs = zip(operands, weights, strict=True)
  return [replace.opened(eqn, w.path, x) if isinstance(x, Frozen) else x for x, w in pairs]


def _bind(eqn, operands, changed=None) -> list:
  """The equation's results for other operands, and params where some are changed."""
  params = eqn.primitive.get_bind_params(eqn.params | (changed or {}))
  results = eqn.primitive.bind(*operands, **params)
  return list(results) if eqn.primitive.multiple_results else [results]


def _name(eqn) -> str:
  """The primitive's name; of a primitive that is an object (jax.experimental.hijax) its class's."""
  return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name


_EACH = {"optimization_barrier", "device_put", "pvary", "pcast"}  # A result for each operand.
_JOINS = {"concatenate", "stack"}
_LAYOUT = {
  *("reshape", "transpose", "squeeze", "slice", "split", "dynamic_slice", "copy", "rev", "unstack"),
  *("name", "CheckpointName", "stop_gradient"),
  *("sharding_constraint", "reshard", "all_gather", "all_gather_invariant", "all_to_all"),
  *("ppermute", *_EACH),
}


def _keeps_values(eqn) -> bool:
  """Whether values of the operands are those of the results, in some layout or dtype."""
  avals = [v.aval for v in (*eqn.invars[:1], *eqn.outvars[:1])]
  match eqn.primitive.name:
    case "convert_element_type":
      return all(jnp.issubdtype(a.dtype, jnp.floating) for a in avals)
    case "broadcast_in_dim":  # Also adds axes of size 1; a repeated row is no weight.
      before, after = (math.prod(a.shape) for a in avals)
      return before == after
    case "gather":  # Of matrices from a stack; rows of a table are activations.
      return eqn.invars[0].aval.ndim > 2 and layouts.takes_rows(eqn)
    case _:
      return _name(eqn) in _LAYOUT


# ---- Products where nobody looks

_PRODUCTS = {"dot_general", "conv_general_dilated"}
_ENTERED_IN_LAX = {"scan", "while", "cond", "custom_linear_solve", "ragged_dot_general"}
# What is known to multiply by no matrix: JAX's own elementwise operations, sums and the like.
_NO_PRODUCTS = {
  *(p.name for p in (*vars(jax.lax).values(), *vars(jax.lax.linalg).values())
    if isinstance(p, Primitive) and p.name not in _ENTERED_IN_LAX),
  *("add_any", "reduce_scatter", "psum_invariant", "debug_callback", "debug_print"),
}  # fmt: skip


def may_multiply(eqn, weights) -> bool:
  """Whether an equation that is not replaced may multiply by a weight that enters it."""
  name, entering = _name(eqn), [bool(w) for w in weights]
  if not any(entering) or name in _NO_PRODUCTS | _LAYOUT:
    return False
  inner = list(jaxprs_in_params(eqn.params))
  return not inner or any(_multiplies(jaxpr, entering) for jaxpr in inner)


def _multiplies(jaxpr: Jaxpr, entering: list[bool]) -> bool:
  """Whether a jaxpr may multiply by those of the operands, of which the last are its own."""
  if len(jaxpr.invars) > len(entering):
    return True  # A kernel's: its references are not followed.
  entering = entering[len(entering) - len(jaxpr.invars) :]
  known = {v for v, enters in zip(jaxpr.invars, entering, strict=True) if enters}
  for eqn in jaxpr.eqns:
    enters = [not isinstance(v, Literal) and v in known for v in eqn.invars]
    if any(enters) and (eqn.primitive.name in _PRODUCTS or may_multiply(eqn, enters)):
      return True
    joins = all(enters) and eqn.primitive.name in _JOINS
    if joins or (any(enters) and _keeps_values(eqn)):
      known.update(eqn.outvars)
  return False


# ---- Equations that hold jaxprs: each is evaluated, with the weights that its operands are


def _called(eqn) -> str | None:
  """The param that is a jaxpr of this equation's operands, where that is all that it computes."""
  jaxprs = [name for name, value in eqn.params.items() if isinstance(value, ClosedJaxpr)]
  others = len(list(jaxprs_in_params(eqn.params))) - len(jaxprs)
  has_rules = any(map(callable, eqn.params.values())) or _name(eqn).startswith("custom_")
  if len(jaxprs) != 1 or others or has_rules:
    return None
  inner, avals = eqn.params[jaxprs[0]], [v.aval for v in eqn.invars]
  return jaxprs[0] if list(inner.in_avals) == avals else None


def _call(eqn, name: str, operands, weights, replace):
  """An equation that calls a jaxpr, as it is but for the jaxpr."""
  function = _inner(eqn.params[name], weights, replace)
  return _bind(eqn, operands, {name: jax.make_jaxpr(function)(*operands)})


def _inner(closed: ClosedJaxpr, weights, replace: Replace):
  """The jaxpr as a function, whose arguments are the weights that its operands were."""

  def function(*args):
    own = [weight and Weight(weight.path, a) for weight, a in zip(weights, args, strict=True)]
    return _evaluate(closed, args, own, replace)[0]

  return function


def _jit(eqn, operands, weights, replace):
  function = _inner(eqn.params["jaxpr"], weights, replace)
  shardings = {name: eqn.params[name] for name in ("in_shardings", "out_shardings")}
  if any(isinstance(s, jax.sharding.Sharding) for given in shardings.values() for s in given):
    own = zip(shardings["in_shardings"], operands, strict=True)
    # A Frozen keeps the sharding that it has: its scales are too few to split.
    shardings["in_shardings"] = tuple(None if isinstance(x, Frozen) else s for s, x in own)
    return jax.jit(function, **shardings)(*operands)
  return _evaluate(eqn.params["jaxpr"], operands, weights, replace)


def _checkpoint(eqn, operands, weights, replace):
  function = _inner(ClosedJaxpr(eqn.params["jaxpr"], ()), weights, replace)
  options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
  return jax.checkpoint(function, **options)(*operands)


def _checkpoint3(eqn, operands, weights, replace):
  """`jax.checkpoint` under the option jax_remat3."""
  traced = eqn.params["_prim"]
  function = _inner(traced.jaxpr, weights, replace)
  return jax.checkpoint(function, policy=traced.policy)(*operands)


def _scan(eqn, operands, weights, replace):
  params = eqn.params
  if "ft_in" in params:  # jax >= 0.11
    num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
  else:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
  carried = range(num_consts, num_consts + num_carry)
  weights, operands = _without_changing(eqn, params["jaxpr"], weights, operands, carried, replace)
  consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
  xs = [x.stacked() if isinstance(x, Frozen) else x for x in operands[num_consts + num_carry :]]
  function = _inner(params["jaxpr"], weights, replace)

  def step(carry, xs):
    results = function(*consts, *carry, *xs)
    return results[:num_carry], results[num_carry:]

  options = {name: params[name] for name in ("length", "reverse", "unroll")}
  carry, ys = jax.lax.scan(step, carry, xs, **options)
  return [*carry, *ys]


def _without_changing(eqn, body: ClosedJaxpr, weights, operands, carried: range, replace):
  """The weights of a loop's body, but for those in the carry that may change from step to step.

  Those are floats. And the operands.
  """
  jaxpr, weights, operands = body.jaxpr, list(weights), list(operands)
  for i, result in zip(carried, jaxpr.outvars, strict=False):
    weight = weights[i]
    if weight and result is not jaxpr.invars[i]:
      weights[i] = None
      if isinstance(operands[i], Frozen):
        operands[i] = replace.opened(eqn, weight.path, operands[i])
      if _multiplies(jaxpr, [j == i for j in range(len(weights))]):
        replace.left(eqn, weight)
  return weights, operands


def _while(eqn, operands, weights, replace):
  params = eqn.params
  split, carried = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
  body, own = params["body_jaxpr"], range(carried - split, len(operands) - split)
  body_weights, operands[split:] = _without_changing(
    eqn, body, weights[split:], operands[split:], own, replace
  )
  cond_consts, body_consts = operands[:split], operands[split:carried]
  carry = operands[carried:]
  step = _inner(body, body_weights, replace)
  condition = _inner(params["cond_jaxpr"], [None] * (split + len(carry)), replace)
  return jax.lax.while_loop(
    lambda carry: condition(*cond_consts, *carry)[0],
    lambda carry: step(*body_consts, *carry),
    carry,
  )


def _cond(eqn, operands, weights, replace):
  branches = [_inner(branch, weights[1:], replace) for branch in eqn.params["branches"]]
  return jax.lax.switch(operands[0], branches, *operands[1:])


def _shard_map(eqn, operands, weights, replace):
  params = eqn.params
  function = _inner(ClosedJaxpr(params["jaxpr"], ()), weights, replace)
  options = {name: params[name] for name in ("mesh", "in_specs", "check_vma")}
  options["out_specs"] = list(params["out_specs"])  # As the results, a list.
  return jax.shard_map(function, axis_names=set(params["newly_manual_axes"]), **options)(*operands)


_ENTERED = {
  "jit": _jit,
  "remat2": _checkpoint,
  "RematTraced": _checkpoint3,
  "scan": _scan,
  "while": _while,
  "cond": _cond,
  "shard_map": _shard_map,
}
