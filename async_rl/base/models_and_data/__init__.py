"""Models, tokenizers and rows of data, in a local folder or on the hub.
`model_folder.py` reads a model's folder, `row_files.py` rows, `hub.py` fetches both.
Every package above the ground may import it.
"""
