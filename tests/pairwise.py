"""Grids of test cases in which all pairs of factor values occur, not their full product."""

import itertools


def pairwise(*factors, valid=lambda *case: True):
  """Few valid cases that have each pair of values of two factors which a valid case can have."""
  product = [case for case in itertools.product(*factors) if valid(*case)]
  missing = set().union(*map(_pairs, product))
  cases = []
  while missing:
    cases.append(max(product, key=lambda case: len(_pairs(case) & missing)))
    missing -= _pairs(cases[-1])
  return cases


def _pairs(case):
  return set(itertools.combinations(enumerate(case), 2))
