"""The documents of a run as TRL's own trainer prepares them.

A real `SFTTrainer` with a tiny model prepares the rows: TRL has no function for it alone.
"""

import sys
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.preview.source_rows import SourceRows

# The settings of TRL on which tokens and labels depend. The tokenizer of the run has its EOS and
# padding tokens and its chat template already.
_SETTINGS = (
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_kwargs",
    "dataset_num_proc",
    "dataset_text_field",
    "max_length",
    "truncation_mode",
)


def documents_by_trl(run: PreviewedRun) -> Dataset:
    """Return the documents of `run` as TRL prepares them with packing=False, and all columns.

    Settings that TRL does not have (`train_on`, `overflow`, templates, ...) have no effect.

    Raises:
        ValueError: TRL cannot prepare these rows; the message has its reason.
    """
    if isinstance(run.dataset, SourceRows):
        raise ValueError(
            "TRL's trainer takes one data set, and train_dataset is a dictionary of several; "
            "compare them one by one"
        )
    if run.images.packs:
        raise ValueError(
            "TRL tokenizes rows with images when it makes a batch, so there are no documents to "
            "compare; a few rows are compared with its collator whenever rows are prepared"
        )
    tokenizer = run.preparation.processing_class
    vocabulary = len(getattr(tokenizer, "tokenizer", tokenizer))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    settings = {name: getattr(run.args, name) for name in _SETTINGS}
    # DeepSpeed, which accelerate imports, prints to stdout, where a command's JSON goes.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        args = SFTConfig(
            folder, packing=False, use_cpu=True, bf16=False, report_to="none", **settings
        )
        try:
            trainer = SFTTrainer(
                model,
                args,
                train_dataset=run.dataset,
                processing_class=tokenizer,
                formatting_func=run.formatting_func,
            )
        except Exception as error:  # a template or TRL may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"TRL cannot prepare these rows: {reason}") from error
    return trainer.train_dataset
