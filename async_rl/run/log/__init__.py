"""What the driver writes: the metrics of each step, the results, and the timeline.
`run_log.py` collects the reports of all processes.
Pipeline, tools and the supervisor may import this package.
"""
