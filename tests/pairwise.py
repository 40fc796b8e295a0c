"""Grids of test cases: every pair of factor values, or a few cases and the rest on request."""

import itertools

import pytest


def pairwise(*factors, valid=lambda *case: True):
  """A few valid cases; every pair of values that occurs in a valid case occurs in one of them."""
  product = [case for case in itertools.product(*factors) if valid(*case)]
  missing = set().union(*map(_pairs, product))
  cases = []
  while missing:
    cases.append(max(product, key=lambda case: len(_pairs(case) & missing)))
    missing -= _pairs(cases[-1])
  return cases


def _pairs(case):
  return set(itertools.combinations(enumerate(case), 2))


def mainly(chosen, cases):
  """The cases as pytest's parameters; those that are not chosen are marked `slow`."""
  cases, chosen = list(cases), list(chosen)
  assert all(case in cases for case in chosen)
  return [
    pytest.param(
      *(case if type(case) is tuple else (case,)),
      marks=() if case in chosen else pytest.mark.slow,
    )
    for case in cases
  ]
