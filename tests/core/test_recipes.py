"""A recipe is a value: compared, hashed, looked up by name, and checked once."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import reference

from sbjax import E4M3, E5M2, INT8, RECIPES, Recipe, Spec, quantized_dot
from sbjax.recipes import FULL, SWITCHBACK, SWITCHBACK_M, as_recipe

INT8_ROW, INT8_TENSOR = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")


@pytest.mark.parametrize("name", reference.METHODS)
def test_each_named_recipe_equals_the_reference_method(name):
  formats = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}
  scalings = {
    "row": "rowwise",
    "folded": "columnwise",
    "tensor": "tensorwise",
    "power": "tensorwise_pow2",
    "one": "static",
  }

  def specs(pair):
    return pair and tuple(Spec(formats[fmt], scalings[scaling]) for fmt, scaling in pair)

  method = reference.METHODS[name]
  assert RECIPES[name] == Recipe(
    fwd=specs(method.y),
    dgrad=specs(method.dx),
    wgrad=specs(method.dw),
    saved="quantized" if method.saves_rounded_x else "original",
  )


def test_the_recipes_are_distinct():
  assert list(RECIPES) == list(reference.METHODS)
  assert len(set(RECIPES.values())) == 14


def test_recipes_compare_by_value():
  twin = Recipe(fwd=(INT8_ROW, INT8_TENSOR), dgrad=(INT8_ROW, INT8_TENSOR), wgrad=None)
  assert twin == SWITCHBACK and hash(twin) == hash(SWITCHBACK)
  assert twin != SWITCHBACK_M
  assert dataclasses.replace(twin, saved="quantized") == SWITCHBACK_M


def test_equal_recipes_share_one_trace_as_static_argument():
  traced = []

  def f(x, w, recipe):
    traced.append(recipe)
    return quantized_dot(x, w, recipe)

  f = jax.jit(f, static_argnames="recipe")
  x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
  twin = Recipe(fwd=(INT8_ROW, INT8_TENSOR), dgrad=(INT8_ROW, INT8_TENSOR), wgrad=None)
  f(x, w, recipe=SWITCHBACK), f(x, w, recipe=twin), f(x, w, recipe=FULL)
  assert traced == [SWITCHBACK, FULL]


def test_a_recipe_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    SWITCHBACK.wgrad = (INT8_ROW, INT8_ROW)


def test_the_repr_shows_every_field():
  text = repr(SWITCHBACK_M)
  for word in ("fwd", "dgrad", "wgrad=None", "int8", "rowwise", "tensorwise", "'quantized'"):
    assert word in text


def test_as_recipe_accepts_a_name_or_a_recipe():
  assert as_recipe("switchback") is SWITCHBACK
  assert as_recipe(SWITCHBACK) is SWITCHBACK


@pytest.mark.parametrize("unknown", ["int4", "", "SwitchBack"])
def test_an_unknown_recipe_error_lists_the_known_ones(unknown):
  with pytest.raises(ValueError, match=f"{unknown!r}.*{', '.join(RECIPES)}"):
    as_recipe(unknown)


PAIR = (INT8_ROW, INT8_TENSOR)
ROWS = (INT8_ROW, INT8_ROW)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"fwd": (INT8_ROW, None)}, r"fwd=.*None or a pair of Specs"),
    ({"dgrad": INT8_ROW}, r"dgrad=.*None or a pair of Specs"),
    ({"wgrad": ("int8", "int8")}, r"wgrad=.*'int8'.*None or a pair of Specs"),
    ({"wgrad": jnp.dot}, r"wgrad=.*None or a pair of Specs"),
    ({"fwd": (INT8_ROW, Spec(E4M3, "tensorwise"))}, r"fwd: .*int8 with float8_e4m3fn"),
    ({"fwd": (INT8_ROW, Spec(jnp.float8_e4m3fn, "tensorwise"))}, r"fwd: .*int8 with float8_e4m3fn"),
    ({"saved": "int8"}, r"saved='int8'.*'original' or 'quantized'"),
    ({"fwd": None, "saved": "quantized"}, r"'quantized' needs a quantized fwd and dgrad"),
    ({"dgrad": None, "saved": "quantized"}, r"'quantized' needs a quantized fwd and dgrad"),
    ({"fwd": ROWS, "dgrad": ROWS, "saved": "quantized"}, r"'tensorwise'.*rowwise"),
    ({"fwd": (INT8_ROW, INT8_ROW.T)}, r"fwd: only w in dgrad may be 'columnwise'"),
    ({"dgrad": (INT8_ROW.T, INT8_ROW)}, r"dgrad: only w in dgrad may be 'columnwise'"),
    ({"dgrad": (INT8_ROW, Spec(INT8, "static")), "saved": "quantized"}, r"same.*static"),
  ],
)
def test_an_invalid_recipe_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Recipe(**{"fwd": PAIR, "dgrad": PAIR, "wgrad": None} | fields)
