"""Training: the parts that `PackedSFTTrainer` holds, each with its own state.

Belongs here: arguments of TRL, dataloaders, checkpoints, metrics, the report. Does not: overrides
of Hugging Face's methods, which all stand in `trl_packing/trainer.py`.

Read `loaders.py` first.
"""
