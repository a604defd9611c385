"""The processes of a run, which Ray starts on the run's hosts.
`actors.py` defines them, `placement.py` places them, `supervisor.py` follows them, `server_pool.py` starts servers.
async_rl/pipeline.py and tools may import this package.
"""
