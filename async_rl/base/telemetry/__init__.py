"""Measurements: metrics and their figures, the timeline, the status of a run, and trackers such as wandb.
`metrics.py` reduces the metrics of a step, `figures.py` computes the figures of a run that people quote.
Every package above the ground may import it.
"""
