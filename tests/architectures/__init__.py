"""Every architecture that transformers knows, as a tiny model, trained packed: `make matrix`.

Read `compatibility.py` first.
"""
