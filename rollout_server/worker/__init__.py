"""The worker's process. `worker.py` is its loop: admit, generate, score, send. `eval_worker.py` evaluates.
`run_eval.py` evaluates without a training.
Run and tools may import it.
"""
