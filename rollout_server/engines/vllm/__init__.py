"""vLLM, whose server runs in an environment of its own.
`engine.py` implements `Engine`, `admin.py` implements `ServerAdmin`.
base/seams/engines.py names it.
"""
