"""The messages between processes: groups, reports and their limits, encoded with msgpack.
`codec.py` encodes a group, `fields.py` its fields within the limits of a run. Nothing here imports torch.
Buffer, workers, learner and driver may import this package.
"""
