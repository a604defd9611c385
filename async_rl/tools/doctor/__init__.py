"""`async-rl doctor`: checks whether a host, or a cluster, supports what a config needs.
`host.py` checks one host, `cluster.py` all nodes.
Only cli.py may import this package.
"""
