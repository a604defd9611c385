"""The learner's process. `learner.py` is its loop, from top to bottom in one function.
`updater.py` makes an update of a batch, `pushes.py` brings weights to the servers.
Run and tools may import it.
"""
