"""The figures of the SwitchBack paper (arXiv 2304.13013) in miniature.

arms.py says what is trained, runs.py trains it and keeps a row for each run, analysis.py compares
rows, and draw.py and draw_spikes.py make the pictures: python -m benchmarks.figures.
"""
