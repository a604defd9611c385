"""Code that runs in vLLM's server, whose environment has none of our packages.
`weight_receiver.py` takes pushes.
Only its launch.py imports it, by plain names.
"""
