"""Measurements: metrics and their figures, the timeline, the status of a run, and trackers such as wandb.
`metrics.py` reduces the metrics of a step and computes the figures of a run; `metrics_logger.py` writes them.
All packages outside async_rl/base may import this package.
"""
