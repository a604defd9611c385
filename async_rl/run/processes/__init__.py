"""The processes of a run: where Ray places them, how they start, answer, die and are replaced.
`actors.py` says what each is, `supervisor.py` keeps them alive.
async_rl/pipeline.py and tools may import it.
"""
