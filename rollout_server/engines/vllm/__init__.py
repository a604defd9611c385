"""The vLLM engine, whose server runs in its own Python environment.
`engine.py` implements `Engine`, `admin.py` implements `ServerAdmin`.
base/seams/engines.py names it.
"""
