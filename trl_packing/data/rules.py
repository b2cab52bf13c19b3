"""The two inputs of preparation: the user's rows, and the rules of the run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names

from trl_packing.config import PackingOptions
from trl_packing.data.eos import EosRule
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.formatting.responses import ResponseLabeler
from trl_packing.formatting.row_format import RowFormat
from trl_packing.formatting.tokenize_rows import can_prepare

AnyDataset: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True)
class UserRows:
    """A user's data set, of any form.

    Attributes:
        dataset: the rows.
        name: of the data set, for messages.
        formatting_func: the user's function from a row to its text.
        columns: names of the columns.
    """

    dataset: AnyDataset
    name: str
    formatting_func: Any
    columns: tuple[str, ...]

    @classmethod
    def from_dataset(cls, dataset: AnyDataset, name: str, formatting_func: Any) -> "UserRows":
        """Return the rows of `dataset`. Columns of a stream may be known only by reading one."""
        return cls(dataset, name, formatting_func, tuple(get_dataset_column_names(dataset)))

    @property
    def are_tokenized(self) -> bool:
        return "input_ids" in self.columns

    @property
    def are_packed(self) -> bool:
        return self.are_tokenized and SEQ_LENGTHS in self.columns


@dataclass(frozen=True)
class Preparation:
    """Rules by which the data sets of one run become documents.

    Attributes:
        args: TRL's config, or ours.
        processing_class: tokenizer or processor.
        packing: documents will be packed, so columns that training does not read are dropped.
        row_format: rules that render rows and choose the trained tokens.
        eos: tokens that end a document, and whether EOS is appended.
        by_trl: TRL's own preparation, of (dataset, formatting_func, name), nothing cut or packed.
        labeler: finds trained tokens by the template of a completion-only collator.
    """

    args: SFTConfig
    processing_class: Any
    packing: bool
    row_format: RowFormat
    eos: EosRule
    by_trl: Callable[[AnyDataset, Any, str], AnyDataset]
    labeler: ResponseLabeler | None = None

    @classmethod
    def of_run(
        cls,
        args: SFTConfig,
        processing_class: Any,
        tokenizer: Any,
        *,
        packing: bool,
        chat_template: str | None,
        completion_only: bool,
        generation_config: Any,
        by_trl: Callable[[AnyDataset, Any, str], AnyDataset],
        labeler: ResponseLabeler | None,
    ) -> "Preparation":
        """Return the rules of a run: the trainer's, and those of a run that has not started.

        Args:
            args: its settings.
            processing_class: tokenizer or processor.
            tokenizer: the one inside of it.
            packing: documents will be packed.
            chat_template: replaces that of the tokenizer; None leaves it.
            completion_only: of prompts and completions, only completions are trained.
            generation_config: of the model; None if there is none.
            by_trl: TRL's own preparation.
            labeler: of a completion-only collator; None without one.
        """
        row_format = RowFormat.from_args(
            args, tokenizer, chat_template=chat_template, completion_only=completion_only
        )
        eos = EosRule.from_args(args, tokenizer, processing_class, generation_config)
        return cls(args, processing_class, packing, row_format, eos, by_trl, labeler)

    @property
    def options(self) -> PackingOptions:
        return PackingOptions.of(self.args)

    @property
    def needs_trl(self) -> bool:
        """Whether TRL must prepare rows: the class renders or tokenizes in its own way."""
        return not can_prepare(self.processing_class)
