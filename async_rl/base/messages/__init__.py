"""The messages between processes: groups, reports and their limits, encoded with msgpack.
`codec.py` encodes a group. Nothing here imports torch.
Buffer, workers, learner and driver may import this package.
"""
