"""The hf engine: generates with transformers in the worker's process, deterministically.
`engine.py` implements `Engine`, `batch.py` decodes, `weights.py` takes pushes.
base/seams/engines.py names it.
"""
