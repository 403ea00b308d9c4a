"""Any hybrid as a folder for transformers' Auto classes: `format` has its table of names; the files `*_hybrid.py` are
its model in PyTorch. They are copied into every such folder and import nothing of this package."""
