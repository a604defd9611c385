"""Engines that generate tokens and load new weights: SGLang, vLLM and hf (transformers, deterministic on a CPU).
`base.py` has the Protocol `Engine`, which each engine implements.
Workers may import this package; async_rl/run imports it to start servers.
"""
