"""Weight pushes: moves weights from the learner's ranks into every running rollout server.

    publisher.py         a push: its states, the recovery from dead servers, the verification
    servers.py           the operations of one server (the seam of an engine); the members that get a push
    transport.py         how the bytes are sent (the seam of a transport); buckets; nccl and gloo, both halves
    cuda_ipc.py          transport cuda_ipc; memory of GPUs that learner and servers share
    disk.py              transport disk
    parcels.py           compact pushes: changes (delta) and adapters
    sums.py              sums of weights, for verified pushes
    checkpoint_names.py  names and shapes of weights in model folders

A version is served completely or not at all: servers are paused, receive every bucket, get the version's number with
the last bucket, and only then continue. A push that fails is repeated or raises an error; paused servers stay paused
until a push succeeds.
"""
