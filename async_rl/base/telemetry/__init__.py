"""Measurements: metrics and their figures, the timeline, the status of a run, and trackers such as wandb.
`metrics.py` reduces the metrics of a step and computes the figures of a run; `metrics_logger.py` writes them.
Every package above the ground may import it.
"""
