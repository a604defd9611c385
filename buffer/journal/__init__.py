"""The journal: every group is on disk before its sender hears that it arrived, as SQLite and files of payloads.
`journal.py` writes and reads it, `export.py` makes Parquet of it.
The buffer's server, tools and cli may import it.
"""
