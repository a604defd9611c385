"""Models, tokenizers and rows of data, in a local folder or on the hub.
`model_folder.py` reads a model's folder, `row_files.py` rows, `hub.py` fetches both.
All packages outside async_rl/base may import this package.
"""
