"""The worker's process. `worker.py` is its loop: admit, generate, score, send. `scored_player.py` plays and evaluates.
`eval_command.py` evaluates without training.
Run and tools may import this package.
"""
