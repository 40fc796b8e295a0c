"""Data sets: where pairs come from, how captions become ids and images pixels."""
