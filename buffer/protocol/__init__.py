"""What workers and learner ask the buffer, and what it answers.
`operations.py` lists the operations, `wire.py` sends them.
Server and client import it.
"""
