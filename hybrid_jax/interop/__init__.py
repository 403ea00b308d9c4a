"""Other people's model formats: for each a table of tensor names, and config.json in both directions.

`formats.choose(config)` gives the format that holds a model; see `formats.Format`.
"""
