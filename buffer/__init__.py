"""The replay buffer: it admits prompts, tags groups with their staleness, and gives batches to the learner.
`staleness.py` has the rules, `store.py` the pure state machine, `server.py` the process, `operations.py` its messages.
The package imports only async_rl/base. Learner, workers and driver may import it.
"""
