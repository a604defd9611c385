"""The folder of a run: its name and files, checkpoints, events of the watcher, and what a resume keeps of it.
`run_dir.py` lists the files, `resuming.py` prepares a resume.
All packages outside async_rl/base may import this package.
"""
