"""SGLang's server as a process of ours: launch, requests, pushes, and what it needs on a CPU.
`engine.py` implements `Engine`, `admin.py` implements `ServerAdmin`.
base/seams/engines.py names it.
"""
