"""A running training. `processes/` starts, places and supervises its processes, `before_start/` checks the inputs,
`log/` writes what happened, `watch/` checks the metrics. async_rl/pipeline.py, tools, api and cli may import this
package.
"""
