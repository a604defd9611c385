"""Engines that generate tokens and take new weights: SGLang, vLLM and hf (transformers, deterministic on a CPU).
`base.py` has the Protocol that each implements.
Workers, and run to start servers, may import it.
"""
