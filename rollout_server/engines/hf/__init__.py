"""The hf engine: generates with transformers in the worker's process, deterministically.
`engine.py` implements `Engine` and takes pushes, `batch.py` decodes.
base/seams/engines.py names it.
"""
