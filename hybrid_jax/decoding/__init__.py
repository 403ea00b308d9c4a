"""Decoding: decoder.py reads prompts and writes what follows, sampling.py chooses tokens, text.py makes text of them,
complete.py does all of it for a list of prompts, interactive.py for somebody at a terminal."""
