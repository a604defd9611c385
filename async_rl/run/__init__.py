"""The roof: a running training. `processes/` starts, places and supervises them, `before_start/` checks the inputs,
`log/` writes what happened, `watch/` looks at the metrics.
async_rl/pipeline.py, tools, api and cli may import it.
"""
