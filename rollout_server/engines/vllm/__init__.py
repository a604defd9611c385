"""vLLM's server as a process of ours, in an environment of its own: requests and pushes.
`engine.py` implements `Engine`, `admin.py` implements `ServerAdmin`.
base/seams/engines.py names it.
"""
