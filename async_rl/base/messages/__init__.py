"""What processes say to each other: groups, reports and their limits, coded with msgpack.
`codec.py` codes a group. Nothing here imports torch.
Buffer, workers, learner and driver may import it.
"""
