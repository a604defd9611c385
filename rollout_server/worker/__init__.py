"""The worker's process. `worker.py` is its loop: admit, generate, score, send. `evaluation.py` is the held-out
evaluation; `eval_command.py` evaluates without training.
Run and tools may import this package.
"""
