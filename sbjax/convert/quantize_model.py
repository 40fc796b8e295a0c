"""`quantize_model`: a whole model, linen, nnx or a function, with its products in 8 bits.

The model's own code runs, under a trace; what it multiplies its parameters by becomes
`quantized_dot`. So parameters, their names and checkpoints stay as they are.
"""

import contextvars
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import lift
from flax.linen.transforms import lift_transform
from flax.nnx.transforms.general import merge_inputs, split_inputs

from sbjax.convert.matmuls import Conversion, Products, fits
from sbjax.convert.rewrite import rewritten
from sbjax.linear.frozen import Frozen
from sbjax.linear.weight import is_frozen, master_weight
from sbjax.ops.registry import check_name
from sbjax.quantize import as_floating
from sbjax.recipes import Recipe, RecipeRules, as_recipe

_Choice = Recipe | str | None
Rules = Recipe | str | RecipeRules | Mapping[str, _Choice] | Iterable[tuple[str, _Choice]]


def quantize_model(
  model,
  rules: Rules,
  *,
  activations: Recipe | str | None = None,
  backend: str | None = None,
  verbose: bool = False,
):
  """A model with the products of its parameters in the recipes that rules give them.

  Reaches every matmul of activations with a parameter as it is stored (cast, transposed, reshaped,
  sliced), whatever layer or function multiplies, and convolutions whose windows do not overlap.
  docs/convert_a_model.md says what it leaves; it warns of a weight with a recipe that may be
  multiplied there. Each gradient is the recipe's. A call is traced, as by `jax.jit`.

  Parameters may be frozen in 8 bits, as `quantize_weights` makes them for the same rules.

  Args:
    model: a linen module or class of modules; an nnx module, of which a copy is returned with the
      same arrays; or a function whose first argument is a tree of parameters.
    rules: a recipe for all products, or pairs (or a mapping) of a pattern and a recipe or None; the
      first that fits counts, and a product without one is left as it is. A pattern is that of a
      shell, for the path of a parameter or its layer: "*/kernel", "encoder/*", "*/fc1".
    activations: a recipe for products of two activations, as attention's.
    verbose: prints, at each trace, a table of the products: shapes, and the recipe or why not.

  Returns:
    A linen module of a subclass with the same name, fields and parameters; an nnx module likewise;
    or a function. Among converted models within one another the outermost counts.

  Raises:
    ValueError: no model, a linen module that is bound, an unknown recipe or backend; and, when the
      model is called, a pattern that fits no parameter.
    NotImplementedError: when the model is called, the backend does not run here.

  >>> dense = quantize_model(nn.Dense(16), "switchback")
  >>> params = dense.init(jax.random.key(0), jnp.ones((4, 32)))
  >>> dense.apply(params, jnp.ones((4, 32))).shape
  (4, 16)
  """
  activations = None if activations is None else as_recipe(activations)
  check_name(backend)
  conversion = Conversion(pairs_of(rules), activations, backend, verbose)
  if isinstance(model, nnx.Module):
    model = nnx.clone(model)
    model.__class__ = _nnx_class(type(model), conversion)
    return model
  if isinstance(model, nn.Module):
    return _linen_module(model, conversion)
  if inspect.isclass(model) and issubclass(model, nn.Module):
    return _linen_class(model, conversion)
  if not callable(model) or inspect.isclass(model):
    raise ValueError(
      f"A model is a linen module or class, an nnx module, or a function, not {model!r}. Of a"
      " transformers model pass `model.module`."
    )
  return _function(model, conversion)


def pairs_of(rules: Rules) -> tuple[tuple[str, Recipe | None], ...]:
  if isinstance(rules, Recipe | str):
    return (("*", as_recipe(rules)),)
  if isinstance(rules, RecipeRules):
    return rules.rules
  pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
  for pair in pairs:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
      raise ValueError(f"A rule is a pair of a pattern and a recipe or None, not {pair!r}.")
  return tuple((p, None if recipe is None else as_recipe(recipe)) for p, recipe in pairs)


ARRAYS = jax.Array | np.ndarray
_converting = contextvars.ContextVar("converting", default=False)


def convert(
  conversion: Conversion,
  function: Callable,
  tree,
  name_of: Callable,
  products: Products | None = None,
):
  """function(tree), with products of the parameters in it replaced.

  name_of: the path of a parameter, by the keys of a leaf in the tree; None for other leaves.
  products: the replacement; None: that of `quantize_model`.
  """
  if _converting.get():
    return function(tree)
  keyed, treedef = jax.tree.flatten_with_path(tree, is_leaf=_in_8_bits)
  leaves = [leaf for _, leaf in keyed]
  names = [name_of(keys) if _is_parameter(leaf) else None for keys, leaf in keyed]
  # By their places: two parameters may have one path, such as leaves of a parameter that is a tree.
  places = [i for i, name in enumerate(names) if name is not None]
  paths: list[Any] = [names[i] for i in places]
  parameters: list[Any] = [leaves[i] for i in places]
  check_patterns(conversion, paths)
  products = products or Products(conversion)

  def of_parameters(*arrays):
    given = leaves.copy()
    for i, array in zip(places, arrays, strict=True):
      given[i] = array
    token = _converting.set(True)
    try:
      return function(treedef.unflatten(given))
    finally:
      _converting.reset(token)

  result = rewritten(of_parameters, paths, products)(*parameters)
  if conversion.verbose:
    pairs = zip(paths, parameters, strict=True)
    print(products.table({path: master_weight(x).shape for path, x in pairs}))
  return result


def _in_8_bits(leaf) -> bool:
  return isinstance(leaf, Frozen) or is_frozen(leaf)


def _is_parameter(leaf) -> bool:
  return isinstance(leaf, ARRAYS) or _in_8_bits(leaf)


def check_patterns(conversion: Conversion, paths: list[str]) -> None:
  for pattern, _ in conversion.rules:
    if not any(fits(pattern, path) for path in paths):
      near = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.3) or paths[:5]
      raise ValueError(
        f"The rule for {pattern!r} fits no parameter. Near it are: {', '.join(near) or 'none'}."
      )


def _joined(keys) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def path_of(keys) -> str:
  """The path of a leaf of a tree of parameters."""
  if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):  # A box, or an nnx.Param.
    keys = keys[:-1]
  return _joined(keys) or "params"  # One array is a tree too.


PARAMS = jax.tree_util.DictKey("params")


def path_in_collections(keys) -> str | None:
  """The path of a leaf of linen's variables; None if that is in another collection."""
  return _linen_name(keys) if keys[0] == PARAMS else None


def naming(tree) -> Callable:
  """The path of a leaf by its keys: in linen's variables, or in another tree of parameters."""
  keyed = jax.tree.leaves_with_path(tree, is_leaf=is_frozen)
  return path_in_collections if any(keys[:1] == (PARAMS,) for keys, _ in keyed) else path_of


def _function(function: Callable, conversion: Conversion) -> Callable:
  @functools.wraps(function)
  def run(params, *args, **kwargs):
    return convert(conversion, lambda p: function(p, *args, **kwargs), params, path_of)

  return run


def _linen_module(module: nn.Module, conversion: Conversion) -> nn.Module:
  if module.scope is not None:
    raise ValueError("A bound module cannot be converted: convert it before `bind` or `apply`.")
  fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
  return _linen_class(type(module), conversion)(**fields)


@functools.cache
def _linen_class(cls: type[nn.Module], conversion: Conversion) -> type[nn.Module]:
  """A subclass whose methods are lifted as those of `nn.remat`, and `apply` is converted whole.

  So whatever `apply` is told to call is converted. Lifted methods serve a module within another
  one, and a bound one.
  """

  def converted(call, variables):
    if not any(_linen_name(keys) for keys, _ in jax.tree.leaves_with_path(variables)):
      return call(variables)  # The parameters are being initialised.
    return convert(conversion, call, variables, _linen_name)

  def transform(function):
    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
      def call(variables):
        scopes = scope_fn(variables, rngs)
        return function(scopes, *args, **kwargs), repack_fn(scopes)

      return converted(call, variables)

    return lift.pack(inner, (True,), (True,), (True,), enable_kwargs=True)

  methods = _methods(cls, nn.Module)
  lifted: Any = lift_transform(transform, cls, methods=list(methods))
  for name, method in methods.items():
    setattr(lifted, name, _if_bound(getattr(lifted, name), method))

  @functools.wraps(cls.apply)
  def apply(self, variables, *args, **kwargs):
    return converted(lambda variables: cls.apply(self, variables, *args, **kwargs), variables)

  lifted.apply = apply
  return _renamed(lifted, cls)


def _if_bound(lifted, method):
  @functools.wraps(method)
  def run(self, *args, **kwargs):
    # Only a bound module has variables to lift, and none while `setup` makes its layers.
    plain = self.scope is None or self._state.in_setup or _converting.get()
    return (method if plain else lifted)(self, *args, **kwargs)

  return run


def _linen_name(keys) -> str | None:
  """A parameter's path, from keys that begin (group, module, collection); boxes add attributes."""
  names = [key for key in keys if not isinstance(key, jax.tree_util.GetAttrKey)]
  collections = [i for i, key in enumerate(names) if key == PARAMS]
  return _joined(names[collections[0] + 1 :]) if collections else None


@functools.cache
def _nnx_class(cls: type[nnx.Module], conversion: Conversion) -> type[nnx.Module]:
  """A subclass whose methods split the module, and convert a function of its parameters."""

  def converted(method):
    def call(arguments):
      self, args, kwargs = arguments
      return method(self, *args, **kwargs)

    @split_inputs
    def split(arguments):
      names = _nnx_names(arguments)
      return convert(conversion, merge_inputs(call), arguments, lambda keys: names.get(keys))

    @functools.wraps(method)
    def run(self, *args, **kwargs):
      if _converting.get():
        return method(self, *args, **kwargs)
      return split((self, args, kwargs))

    return run

  methods = {name: converted(method) for name, method in _methods(cls, nnx.Module).items()}
  metaclass: Any = type(cls)
  return _renamed(metaclass(cls.__name__, (cls,), methods), cls)


def _nnx_names(arguments) -> dict[tuple, str]:
  """The paths of a split module's parameters by their keys; arguments are (module, ...)."""
  names = {}
  of_module = jax.tree.leaves_with_path(arguments[0], is_leaf=lambda x: isinstance(x, nnx.Variable))
  for keys, leaf in of_module:
    if isinstance(leaf, nnx.Param):
      path = _joined(keys[2:])  # After (states, index).
      for inner, _ in jax.tree.leaves_with_path(leaf, is_leaf=is_frozen):
        names[jax.tree_util.SequenceKey(0), *keys, *inner] = path
  return names


def _methods(cls, base) -> dict[str, Callable]:
  """The methods that a model adds to its library's class: `__call__`, public and private ones."""
  found = {}
  for parent in reversed(cls.__mro__):
    if parent not in base.__mro__:
      found.update((n, f) for n, f in vars(parent).items() if inspect.isfunction(f))
  hidden = {n for n in found if n.startswith("__") or hasattr(base, n)} - {"__call__"} | {"setup"}
  return {n: f for n, f in found.items() if n not in hidden and not getattr(f, "nowrap", False)}


def _renamed(new: type, cls: type) -> type:
  for name in ("__name__", "__qualname__", "__module__", "__doc__"):
    setattr(new, name, getattr(cls, name))
  return new


def quantized_einsum(
  equation: str, x: jax.Array, w: jax.Array, recipe: Recipe | str, *, backend: str | None = None
) -> jax.Array:
  """`jnp.einsum(equation, x, w)` with w as the weight, whatever the order of the letters.

  Several contracted letters count as one; each index of a letter that both operands and the result
  have (an expert's) is a product of its own, with scales of its own. The result has x's dtype; w
  may be wider, as in `quantized_dot`. As nnx.Einsum's `einsum_op` it needs its recipe:
  `lambda e, x, w, **_: quantized_einsum(e, x, w, "switchback")`.

  Raises:
    ValueError: operands that are no floating-point arrays of 16 bits or more; an equation without a
      product of x and w, or one that sums or takes a diagonal of w first; what `jnp.einsum` raises.

  >>> x, w = jnp.ones((2, 5, 32)), jnp.ones((2, 32, 16))
  >>> quantized_einsum("ebd,edf->bef", x, w, "switchback").shape
  (5, 2, 16)
  """
  x, w = as_floating("x", x), as_floating("w", w)
  products = Products(Conversion((("*", as_recipe(recipe)),), backend=backend))

  def einsum(w):
    return jnp.einsum(equation, x, w.astype(x.dtype))

  y = rewritten(einsum, ["w"], products)(w)
  if not products.rows or any(row.why for row in products.rows):
    raise ValueError(f"{equation!r} of {x.shape} and {w.shape} is no product with the weight w.")
  return y
