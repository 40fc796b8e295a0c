"""Grids of test cases that have every pair of factor values, not the full product."""

import itertools


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
