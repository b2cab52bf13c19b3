"""The code of the articles that this project grew from, with nothing but its imports changed.

000  packing by hand (github.com/sirluk's article): EOS, position ids and masks, a batch, no loop
001  multipack: tests/test_render.py
002  DART-Math: tests/test_plain_trainer.py
003  Packing Analysis: recipes/compare_packing.py
004  padding-free training in transformers and TRL: both samples, and what they promise
"""
