"""Evaluations of the driver, and the watcher that warns, pauses, stops or rolls back.
`watcher.py` finds trouble in metrics, `run_watch.py` acts on it.
Pipeline, supervisor and tools may import this package.
"""
