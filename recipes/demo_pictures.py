"""The demo of vision.py: colored balls, questions about them, and a small LLaVA-NeXT, built here.

    one picture     user: [picture] Which color is it?        assistant: red on white
    two pictures    user: [picture] [picture] Which …?        assistant: red on white, blue on green
    no picture      user: Date: 1935-02-20 =>                 assistant: 20 February 1935

Pictures have 24 to 96 pixels on each side. The larger ones are cut into more tiles, so they have
more tokens.
"""

import random
from collections.abc import Sequence
from typing import Any

from trl_packing.recipes.make_demo_data import date
from trl_packing.recipes.sft_packed import DEMO_FILES, DEMO_MODEL, SPECIAL_TOKENS

from datasets import Dataset
from PIL import Image, ImageDraw
from transformers import (
    AutoTokenizer,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    set_seed,
)

COLORS = ("black", "white", "red", "green", "blue", "yellow")
TILE, PATCH = 32, 8  # pixels of a side
TILES = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
TEMPLATE = """\
{% for m in messages %}{{ m.role + ':' }}{% for part in m.content %}\
{{ '<image>' if part.type == 'image' else ' ' + part.text }}{% endfor %}{{ eos_token + '\n' }}\
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def picture(rng: random.Random) -> tuple[Image.Image, str]:
    """Return a ball on a background, and its colors in words."""
    ball, ground = rng.sample(COLORS, 2)
    width, height = (rng.randint(24, 96) for _ in range(2))
    image = Image.new("RGB", (width, height), ground)
    box = (width // 6, height // 6, width - width // 6, height - height // 6)
    ImageDraw.Draw(image).ellipse(box, fill=ball)
    return image, f"{ball} on {ground}"


def demo_rows(number: int, *, pictures: Sequence[int] = (0, 1, 1, 2), seed: int = 0) -> Dataset:
    """Return conversations with as many pictures each as drawn from `pictures`."""
    rows = []
    rng = random.Random(seed)
    for _ in range(number):
        drawn = [picture(rng) for _ in range(rng.choice(pictures))]
        question = "Which colors?"
        answer = ", ".join(words for _, words in drawn)
        if not drawn:
            document = date(rng)
            question = document["prompt"]
            answer = document["completion"].strip()
        content = [{"type": "image", "text": None}] * len(drawn)
        content += [{"type": "text", "text": question}]
        said = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        messages = [{"role": "user", "content": content}, said]
        rows.append({"images": [image for image, _ in drawn], "messages": messages})
    return Dataset.from_list(rows)


def exchanged(rows: Dataset) -> Dataset:
    """Return rows with the pictures of the next row each."""
    pictures = [row["images"] for row in rows]
    others = [*pictures[1:], pictures[0]]
    return Dataset.from_list([r | {"images": o} for r, o in zip(rows, others, strict=True)])


def demo_model(seed: int) -> tuple[Any, Any]:
    """Return a LLaVA-NeXT with random weights, and its processor."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FILES / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tile = {"height": TILE, "width": TILE}
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": TILE}, crop_size=tile, image_grid_pinpoints=TILES
        ),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token of the tower, which is left out
        chat_template=TEMPLATE,
    )
    set_seed(seed)
    text = {"model_type": "llama", "vocab_size": len(tokenizer), **DEMO_MODEL}
    text |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    tower = {"model_type": "clip_vision_model", "image_size": TILE, "patch_size": PATCH}
    tower |= {"hidden_size": 64, "intermediate_size": 128}
    tower |= {"num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaNextConfig(
        text_config=text | {"tie_word_embeddings": False},
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=TILES,
    )
    return LlavaNextForConditionalGeneration(config), processor
