"""Code that runs inside vLLM's server, whose environment lacks our packages.
`weight_receiver.py` receives weight pushes.
Only launch.py of this package imports the others, by plain names.
"""
