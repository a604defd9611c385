"""`async-rl view`: the page of a run, with lanes, charts and every token of its groups, and the list of runs.
`app.py` answers the browser.
Only cli.py may import this package.
"""
