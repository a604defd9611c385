"""`async-rl doctor`: checks whether a host, or a cluster, can do what a config asks for.
`host.py` checks one host, `cluster.py` all nodes.
Only cli.py may import it.
"""
