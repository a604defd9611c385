"""Sweeps of settings, such as staleness 0 to 10: their runs, the table, the plots, the page of results, and plans.
`sweep.py` runs the cells, `report.py` makes the table.
Only cli.py and view may import this package.
"""
