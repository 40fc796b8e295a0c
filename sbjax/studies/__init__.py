"""Simulated FP4 and unit scaling: methods of papers that the core neither needs nor imports."""
