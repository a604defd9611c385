"""The checks before any process starts: names, files, a trial call of the reward, and memory.
`preflight.py` lists the checks, `dry_run.py` prints what a run would do.
Pipeline, tools and cli may import this package.
"""
