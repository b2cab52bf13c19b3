"""The code of the articles that this project grew from, with nothing but imports and paths changed.

000  packing by hand: EOS, position ids and masks of a batch, without a loop
001  multipack: tests/tools/test_show.py draws its page
002  DART-Math: tests/plain_trainer/test_enable.py runs its four lines
003  Packing Analysis: recipes/compare_packing.py
004  padding-free training: the sample without TRL, and what it promises; that of SFTTrainer:
     tests/data/test_completion_only_collator.py
"""

import pytest
import torch
from helpers.drop_in import logged
from helpers.prepared import write_rows
from helpers.tiny import QUESTIONS_AND_ANSWERS, save_tiny_model, tiny_model, tiny_tokenizer

from trl_packing import (
    block_diagonal_mask,
    cu_seqlens_from_lengths,
    document_ids_from_lengths,
    lengths_from_eos,
    position_ids_from_lengths,
)

# --- 000: packing by hand -------------------------------------------------------------------------


def test_the_batch_of_packing_by_hand_runs_as_each_sentence_alone():
    """Two rows of two sentences, padded with EOS; masks and positions of all of it in one go."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama")
    rows = [
        ["Rome wasn't built in a day", "My hovercraft is full of eels"],
        ["The cat sat on the mat", "My aunt is a teacher"],
    ]
    tokens = [
        torch.tensor([t for s in row for t in [*tokenizer(s)["input_ids"], tokenizer.eos_token_id]])
        for row in rows
    ]
    batch = torch.nn.utils.rnn.pad_sequence(
        tokens, batch_first=True, padding_value=tokenizer.eos_token_id
    )

    lengths = lengths_from_eos(batch, tokenizer.eos_token_id)
    mask = block_diagonal_mask(lengths, dtype=torch.float32)
    positions = position_ids_from_lengths(lengths)

    def logits(**inputs):
        return model(input_ids=batch, use_cache=False, **inputs).logits

    packed = logits(attention_mask=mask, position_ids=positions)
    leaking = logits(position_ids=positions, attention_mask=torch.ones_like(batch))
    for row, sentences in enumerate(rows):
        ends = cu_seqlens_from_lengths(lengths)[row].tolist()
        for number, sentence in enumerate(sentences):
            ids = torch.tensor([[*tokenizer(sentence)["input_ids"], tokenizer.eos_token_id]])
            here = slice(ends[number], ends[number + 1])
            assert (document_ids_from_lengths(lengths)[row, here] == number).all()
            alone = model(input_ids=ids).logits[0]
            # Float32, two layers, another length of the row's sums.
            torch.testing.assert_close(packed[row, here], alone, rtol=0, atol=1e-5)
            if number:
                assert (leaking[row, here] - alone).abs().max() > 0.1


# --- 004: padding-free ----------------------------------------------------------------------------

FLATTENING = """
import torch

from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(
    "instructlab/merlinite-7b-lab",
    torch_dtype=torch.bfloat16,
    attn_implementation="flash_attention_2"
)

from datasets import load_dataset
train_dataset = load_dataset("json", data_files="path/to/my/dataset")["train"]

from transformers import DataCollatorWithFlattening
data_collator = DataCollatorWithFlattening()

from transformers import TrainingArguments, Trainer
train_args = TrainingArguments(output_dir="/save/path")
trainer = Trainer(
    args=train_args,
    model=model,
    train_dataset=train_dataset,
    data_collator=data_collator
)
trainer.train()
"""

NUM_ROWS = 20  # steps of 8, 8 and 4 documents, three epochs


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Changes besides the imports: the places of the model and the data, and no CUDA here."""
    monkeypatch.chdir(tmp_path)
    pairs = [QUESTIONS_AND_ANSWERS[i % 12] for i in range(NUM_ROWS)]
    tokenizer = tiny_tokenizer()
    texts = [f"### Question: {question}\n ### Answer: {answer}<eos>" for question, answer in pairs]
    tokens = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    return {
        "instructlab/merlinite-7b-lab": save_tiny_model(tmp_path, "llama", chat=False),
        "path/to/my/dataset": write_rows(tmp_path / "tokens.jsonl", tokens),
        "/save/path": str(tmp_path / "saved"),
        "flash_attention_2": "sdpa",
        "torch.bfloat16": "torch.float32",
        "output_dir=": 'use_cpu=True, bf16=False, report_to="none", logging_steps=1, output_dir=',
    }


def run(sample: str, *changes: dict[str, str]):
    """Execute `sample`, each of `changes` made in it; return its trainer."""
    for change in changes:
        for old, new in change.items():
            sample = sample.replace(old, new)
    names: dict = {"__name__": "sample"}
    exec(compile(sample, "sample", "exec"), names)
    return names["trainer"]


THEIR_COLLATOR = "from transformers import DataCollatorWithFlattening"
OUR_FLATTENING = {THEIR_COLLATOR: "from trl_packing import DataCollatorWithFlattening"}
# The padded run that the post compares with: rows padded to the longest, every token trained.
PADDED = {
    THEIR_COLLATOR: "from helpers.padded import Padded",
    "DataCollatorWithFlattening()": "Padded()",
}
ENABLED = {
    "data_collator = ": "import trl_packing; trl_packing.enable_packing(model)\ndata_collator = "
}


def assert_same_losses(found, expected):
    # Nine float32 steps of AdamW, which divides by the size of small gradients.
    torch.testing.assert_close(
        logged(found, "loss"), logged(expected, "loss"), rtol=1e-3, atol=1e-3
    )


def test_the_flattening_sample_makes_the_steps_and_losses_of_the_padded_run(places):
    flattened, padded = run(FLATTENING, OUR_FLATTENING, places), run(FLATTENING, PADDED, places)
    assert flattened.state.global_step == padded.state.global_step == 3 * 3
    assert_same_losses(flattened, padded)


def test_a_model_that_needs_it_takes_one_line_more(places, tmp_path):
    """gpt_oss ignores position_ids where it masks: the control of the test above."""
    folder = save_tiny_model(tmp_path, "gpt_oss", chat=False)
    places |= {"instructlab/merlinite-7b-lab": folder, "flash_attention_2": "eager"}
    padded = run(FLATTENING, PADDED, places)
    assert_same_losses(run(FLATTENING, OUR_FLATTENING, ENABLED, places), padded)
    with pytest.raises(AssertionError):
        assert_same_losses(run(FLATTENING, OUR_FLATTENING, places), padded)
