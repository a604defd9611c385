"""What the driver writes down: the metrics of each step, the results, and the timeline.
`run_log.py` takes the reports of all processes.
Pipeline, tools and the supervisor may import it.
"""
