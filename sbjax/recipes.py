"""A recipe says, for each of a linear layer's three matmuls, what its operands are rounded to.

Every matmul is `lhs [M, K]` with `rhs [N, K]`, contracted along the last axis of both:

  fwd    y  = x @ w      rows of x   with rows of w.T
  dgrad  dx = dy @ w.T   rows of dy  with rows of w
  wgrad  dw = x.T @ dy   rows of x.T with rows of dy.T

A method is a value here, so that one look compares it with the others. Its formats are those of
`FORMATS` in sbjax/quantize.py. Formats that no tensor core of Hopper takes, such as 4 bits, are
simulated: sbjax/studies/fp4.py computes the matmuls and adds its recipes to `SIMULATED`.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import jax

from sbjax.quantize import E4M3, E5M2, INT8, Spec, share_accumulator


class Simulation(Protocol):
  """The matmuls of a linear layer as a study computes them, for x [M, K], w [K, N], dy [M, N].

  Frozen and hashable; `sbjax.studies.fp4` has one.
  """

  def fwd(self, x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w [M, N] in float32."""
    ...

  def rounded_weight(self, w: jax.Array, dtype) -> jax.Array:
    """w [K, N] as `fwd` took it, in `dtype`."""
    ...

  def wgrad(self, x: jax.Array, dy: jax.Array, w: jax.Array, out_sharding) -> jax.Array:
    """The gradient of w [K, N] in float32."""
    ...


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The Specs of both operands of each matmul; None leaves a matmul in the compute dtype.

  saved: "original" saves x and w for the backward pass as they came; "quantized" saves their 8-bit
    values and scales, so that wgrad takes the dequantized x.

  simulated: how a study computes matmuls that are all None; see `sbjax.studies.fp4`.

  >>> int8 = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")
  >>> Recipe(fwd=int8, dgrad=int8, wgrad=None) == RECIPES["switchback"]
  True
  """

  fwd: tuple[Spec, Spec] | None
  dgrad: tuple[Spec, Spec] | None
  wgrad: tuple[Spec, Spec] | None
  saved: Literal["original", "quantized"] = "original"
  simulated: Simulation | None = None

  def __post_init__(self):
    for name in ("fwd", "dgrad", "wgrad"):
      _check_pair(name, getattr(self, name))
    if not isinstance(self.saved, str) or self.saved not in ("original", "quantized"):
      raise ValueError(f"saved={self.saved!r} must be 'original' or 'quantized'.")
    if self.saved == "quantized":
      if self.fwd is None or self.dgrad is None:
        raise ValueError("saved='quantized' needs a quantized fwd and dgrad to share them.")
      if not self.shares_w:
        raise ValueError(
          "saved='quantized' reuses the forward's w, transposed, in dgrad: both need the same"
          " 'tensorwise' or 'static' Spec, or 'rowwise' in fwd and 'columnwise' in dgrad, not"
          f" fwd={self.fwd[1]} and dgrad={self.dgrad[1]}."
        )
    if self.simulated is not None and (self.fwd, self.dgrad, self.wgrad) != (None, None, None):
      raise ValueError("simulated is for all three matmuls: fwd, dgrad and wgrad must be None.")

  @property
  def rounds(self) -> bool:
    """Whether any matmul's operands are rounded."""
    return any((self.fwd, self.dgrad, self.wgrad, self.simulated))

  @property
  def shares_w(self) -> bool:
    """Whether `dgrad` takes the same 8 bits of w as `fwd`, transposed."""
    return bool(self.fwd and self.dgrad and self.dgrad[1] == self.fwd[1].T)

  @property
  def rounds_w(self) -> bool:
    """Whether the forward pass or the input gradient rounds the weight to 8 bits."""
    return self.fwd is not None or self.dgrad is not None


def _check_pair(name: str, pair) -> None:
  if pair is None:
    return
  if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(s, Spec) for s in pair)):
    raise ValueError(f"{name}={pair!r} must be None or a pair of Specs: (lhs, rhs).")
  lhs, rhs = pair
  if lhs.is_columnwise or (rhs.is_columnwise and name != "dgrad"):
    raise ValueError(
      f"{name}: only w in dgrad may be 'columnwise'; elsewhere its scales are summed over."
    )
  if not share_accumulator(lhs, rhs):
    raise ValueError(f"{name}: no matmul takes {lhs.dtype.name} with {rhs.dtype.name}.")


int8_row, int8_tensor = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")
int8_column = int8_row.T
e4m3_row, e4m3_tensor = Spec(E4M3, "rowwise"), Spec(E4M3, "tensorwise")
e5m2_row, e5m2_tensor = Spec(E5M2, "rowwise"), Spec(E5M2, "tensorwise")

FULL = Recipe(fwd=None, dgrad=None, wgrad=None)

# Wortsman et al. 2023, https://arxiv.org/abs/2304.13013: Algorithm 1, then its variants: M saves
# memory, Q has a scale for each row of w too. LLM_INT8 is the paper's baseline (Dettmers et al.
# 2022 without outlier decomposition, as the paper ran it): the weight gradient in int8 as well.
SWITCHBACK = Recipe(fwd=(int8_row, int8_tensor), dgrad=(int8_row, int8_tensor), wgrad=None)
SWITCHBACK_M = dataclasses.replace(SWITCHBACK, saved="quantized")
SWITCHBACK_Q = Recipe(fwd=(int8_row, int8_row), dgrad=(int8_row, int8_row), wgrad=None)
# One int8 w with a scale for each output, as in Q's forward pass, serves both matmuls: dgrad sums
# over outputs, so dy is multiplied by these scales before it is rounded (`sbjax.quantize.folded`).
SWITCHBACK_C = Recipe(fwd=(int8_row, int8_row), dgrad=(int8_row, int8_column), wgrad=None)
SWITCHBACK_CM = dataclasses.replace(SWITCHBACK_C, saved="quantized")
LLM_INT8 = dataclasses.replace(SWITCHBACK_Q, wgrad=(int8_row, int8_row))

# fp8 after the paper's section 2.3: e4m3 for inputs and weights, e5m2 for gradients. True
# row-wise scales here, where the paper's code had blocks of the flattened tensor.
FP8_TENSORWISE = Recipe(
  fwd=(e4m3_tensor, e4m3_tensor),
  dgrad=(e5m2_tensor, e4m3_tensor),
  wgrad=(e4m3_tensor, e5m2_tensor),
)
FP8_SWITCHBACK = Recipe(fwd=(e4m3_row, e4m3_tensor), dgrad=(e5m2_row, e4m3_tensor), wgrad=None)

# Simeoni et al. 2025 (DINOv3, https://arxiv.org/abs/2508.10104), whose code has a scale for each
# output of w in the forward pass, one for all of w in the input gradient, and e4m3 for dy too.
FP8_DINOV3 = Recipe(fwd=(e4m3_row, e4m3_row), dgrad=(e4m3_row, e4m3_tensor), wgrad=None)

# Perez et al. 2023, https://arxiv.org/abs/2309.17224: FP8-AMAX has a power of two for each operand,
# of its absmax in this step.
e4m3_pow2, e5m2_pow2 = Spec(E4M3, "tensorwise_pow2"), Spec(E5M2, "tensorwise_pow2")
FP8_AMAX = Recipe(
  fwd=(e4m3_pow2, e4m3_pow2), dgrad=(e5m2_pow2, e4m3_pow2), wgrad=(e4m3_pow2, e5m2_pow2)
)


def fp8_cscale(exponent: int) -> Recipe:
  """FP8-CSCALE: one constant scale for all operands, 2**-exponent; no maximum is taken.

  e4m3 for inputs and weights, e5m2 for gradients (Perez et al. 2023,
  https://arxiv.org/abs/2309.17224). Larger values than 448 * 2**-exponent (e5m2: 57,344) saturate.
  As a name in a config it is "fp8_cscale:4", for example.

  exponent: from -63 to 63.

  >>> fp8_cscale(0) == RECIPES["fp8_static"]
  True
  """
  e4m3, e5m2 = (Spec(dtype, "static", exponent) for dtype in (E4M3, E5M2))
  return Recipe(fwd=(e4m3, e4m3), dgrad=(e5m2, e4m3), wgrad=(e4m3, e5m2))


# Operands are cast as they are, which suits a model whose activations, weights and gradients have
# unit variance: munit scaling (Narayan et al. 2025, https://arxiv.org/abs/2502.05967).
FP8_STATIC = fp8_cscale(0)

# For experiments. The paper keeps wgrad in 16 bits: one scale would serve a feature over all
# tokens, and a token far out costs int8 the others' last bits. fp8's steps shrink with the value:
# e4m3 has three bits of mantissa, e5m2 two and a range for dy of any tail.
# docs/studies/weight_gradient.md has what both lose.
SWITCHBACK_FP8_WGRAD = dataclasses.replace(SWITCHBACK, wgrad=(e4m3_row, e5m2_row))
SWITCHBACK_E4M3_WGRAD = dataclasses.replace(SWITCHBACK, wgrad=(e4m3_row, e4m3_row))

RECIPES = {
  "full": FULL,
  "switchback": SWITCHBACK,
  "switchback_m": SWITCHBACK_M,
  "switchback_q": SWITCHBACK_Q,
  "switchback_c": SWITCHBACK_C,
  "switchback_cm": SWITCHBACK_CM,
  "llm_int8": LLM_INT8,
  "fp8_tensorwise": FP8_TENSORWISE,
  "fp8_switchback": FP8_SWITCHBACK,
  "fp8_dinov3": FP8_DINOV3,
  "fp8_amax": FP8_AMAX,
  "fp8_static": FP8_STATIC,
  "switchback_fp8_wgrad": SWITCHBACK_FP8_WGRAD,
  "switchback_e4m3_wgrad": SWITCHBACK_E4M3_WGRAD,
}

# Those of sbjax.studies, which add their own.
SIMULATED: dict[str, Recipe] = {}


def as_recipe(recipe: Recipe | str) -> Recipe:
  """The recipe itself, or the one of that name in RECIPES or SIMULATED.

  "fp8_cscale:4" is fp8_cscale(4).
  """
  if isinstance(recipe, Recipe):
    return recipe
  if not isinstance(recipe, str):
    raise ValueError(f"A recipe is a Recipe or the name of one, not {recipe!r}.")
  if exponent := re.fullmatch(r"fp8_cscale:(-?\d+)", recipe):
    return fp8_cscale(int(exponent[1]))
  known = RECIPES | SIMULATED
  if recipe not in known:
    raise ValueError(
      f"Unknown recipe {recipe!r}; known: {', '.join(known)}, fp8_cscale:<exponent>."
    )
  return known[recipe]


@dataclasses.dataclass(frozen=True)
class RecipeRules:
  """A recipe for each linear layer of a model, by its path; the first rule that fits counts.

  rules: pairs of a pattern and a recipe. A pattern is that of a shell, for the path of the layer's
    parameters: "*/fc1", "image/*", "text/block_0/*". `RecipeRules.of` makes them from a mapping.

  >>> rules = RecipeRules.of({"*/fc1": "full", "*": "switchback"})
  >>> rules.at("image/blocks/fc1") == RECIPES["full"]
  True
  """

  rules: tuple[tuple[str, Recipe], ...]

  def __post_init__(self):
    pairs: tuple[Any, ...] = self.rules if isinstance(self.rules, tuple) else (None,)
    are_pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    if not are_pairs or not all(isinstance(p, str) and isinstance(r, Recipe) for p, r in pairs):
      raise ValueError(
        f"rules={self.rules!r} must be a tuple of pairs (pattern, Recipe); see RecipeRules.of."
      )

  @classmethod
  def of(cls, rules: Mapping[str, Recipe | str]) -> "RecipeRules":
    """The rules of a mapping in its order; a ValueError for a recipe of an unknown name."""
    if not isinstance(rules, Mapping):
      raise ValueError(f"rules={rules!r} must be a mapping of patterns to recipes.")
    return cls(tuple((pattern, as_recipe(recipe)) for pattern, recipe in rules.items()))

  def at(self, path: str) -> Recipe:
    """The recipe of the linear layer at a path; a ValueError if no rule fits."""
    return self._rule(path)[1]

  def _rule(self, path: str) -> tuple[str, Recipe]:
    for rule in self.rules:
      if fnmatch.fnmatchcase(path, rule[0]):
        return rule
    raise ValueError(f"No rule fits the linear layer {path!r}; end the rules with one for '*'.")

  def check(self, paths: Iterable[str]) -> None:
    """Raises a ValueError unless each layer has a rule, and each rule is that of some layer."""
    paths = list(paths)
    of_some_layer = {self._rule(path) for path in paths}
    for rule in self.rules:
      if rule not in of_some_layer:
        raise ValueError(
          f"The rule for {rule[0]!r} fits no linear layer, or only those of rules before it. The"
          f" layers are {', '.join(paths)}."
        )


def recipes_of(recipe: Recipe | RecipeRules) -> tuple[Recipe, ...]:
  """The recipe itself, or those of the rules."""
  return (recipe,) if isinstance(recipe, Recipe) else tuple(own for _, own in recipe.rules)


def parse_recipe(text: str) -> Recipe | RecipeRules:
  """A recipe by its name, or rules written "*/fc1=full, *=switchback".

  Raises:
    ValueError: an unknown name, or a rule without a pattern.
  """
  if not isinstance(text, str) or "=" not in text:
    return as_recipe(text)
  rules = []
  for rule in text.split(","):
    pattern, equals, name = (part.strip() for part in rule.partition("="))
    if not (pattern and equals):
      raise ValueError(f"{rule.strip()!r} of {text!r} must be a rule: a pattern, '=', a recipe.")
    rules.append((pattern, as_recipe(name)))
  return RecipeRules(tuple(rules))
