"""Tasks: where prompts and reference answers come from.
`base.py` has their base class and table, `files_task.py` reads the user's rows.
Workers, driver and tools may import this package.
"""
