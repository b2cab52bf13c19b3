"""Write the data of sft_packed.py's demo: a tokenizer, and orders with packing lists.

    python recipes/make_demo_data.py            # writes recipes/demo/, the same bytes every time

There are two kinds of documents, from a dozen to over 400 tokens long. Their lengths are
log-normal, like those of real instruction data:

    prompt      Order: Bella wants 8 pears, 12 plums and 6 limes by Sunday.\\nPacking list:
    completion   Sunday, Bella\\n- 8 pears\\n- 12 plums\\n- 6 limes

    prompt      Date: 1935-02-20 =>
    completion   20 February 1935

No held-out prompt occurs in the training set, so the model cannot answer from memory.
"""

# ruff: noqa: SIM905  (word lists are easier to read as text)

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NUM_TRAIN, NUM_TEST, SEED = 5000, 200, 0
NUM_ITEMS = {"median": 5, "sigma": 0.8}  # log-normal number of items in an order

NAMES = """Ada Aiko Anton Bella Ben Carlos Clara David Dina Elena Emil Farid Fatima Gina Grace Hans
Hugo Ines Iris Jamal Jonas Karin Kira Leo Liam Maria Mona Nadia Nils Olga Omar Paula Pedro Quinn
Rita Rosa Samir Sven Tara Tina Uma Victor Viola Walter Wanda Xavier Yara Yuki Zara Zoe""".split()
VERBS = ["wants", "needs", "ordered", "asked for"]
ITEMS = """apples bags baskets beans blankets books bottles bowls boxes brushes buns buttons cakes
candles carrots chairs combs cookies corks cups eggs figs forks gloves grapes hammers hats jars keys
kites ladders lamps leeks lemons limes maps melons mirrors muffins mugs mushrooms nails nuts olives
onions pans pears peas pencils pens pies pillows plates plums potatoes pretzels radishes ribbons
ropes spoons stamps tomatoes towels waffles""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()

Document = dict[str, str]


def order(rng: random.Random) -> Document:
    drawn = rng.lognormvariate(math.log(NUM_ITEMS["median"]), NUM_ITEMS["sigma"])
    names = rng.sample(ITEMS, min(max(1, round(drawn)), len(ITEMS)))
    items = [f"{rng.randint(2, 20)} {name}" for name in names]
    name, verb, day = rng.choice(NAMES), rng.choice(VERBS), rng.choice(DAYS)
    wish = " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
    return {
        "prompt": f"Order: {name} {verb} {wish} by {day}.\nPacking list:",
        "completion": f" {day}, {name}" + "".join(f"\n- {item}" for item in items),
    }


def date(rng: random.Random) -> Document:
    year, month, day = rng.randint(1900, 2099), rng.randint(1, 12), rng.randint(1, 28)
    return {
        "prompt": f"Date: {year}-{month:02}-{day:02} =>",
        "completion": f" {day} {MONTHS[month - 1]} {year}",
    }


def make_documents(number: int, seed: int) -> list[Document]:
    """Return documents of mixed kinds and lengths, no two with the same prompt."""
    rng = random.Random(seed)
    documents: dict[str, Document] = {}
    while len(documents) < number:
        (make,) = rng.choices([order, date], [0.75, 0.25])
        document = make(rng)
        documents.setdefault(document["prompt"], document)
    return list(documents.values())


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: lossless on any text; most words are one token."""
    words = Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def main(out: Path) -> None:
    documents = make_documents(NUM_TRAIN + NUM_TEST, SEED)
    train, test = documents[:NUM_TRAIN], documents[NUM_TRAIN:]
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / "data" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    train_tokenizer(d["prompt"] + d["completion"] for d in train).save_pretrained(out / "tokenizer")
    print(f"wrote {out}: {len(train)} + {len(test)} documents")


if __name__ == "__main__":
    main(Path(__file__).parent / "demo")
