"""Patches that are planned from image sizes are those that the vision tower computes."""

import pytest
import torch
from architectures import tiny_processors, tiny_vision
from datasets import Dataset
from helpers.vision import image_dataset, noise
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.vision import support
from trl_packing.vision.sizes import Placeholders, patch_size_of

SIZES = [(20, 36), (90, 30), (33, 120), (64, 64)]

_FAST = {"qwen2_5_vl", "llava_next", "mistral3"}
FAMILIES = [
    pytest.param(name, marks=[] if name in _FAST else pytest.mark.slow) for name in support.FAMILIES
]

# GLM-4V's processor reads tensors in a way that NumPy deprecates (transformers 5.23).
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


class TowerPositions:
    """Counts the positions of the vision tower of a model: outputs of its layer of pixels."""

    def __init__(self, model):
        self.calls = []
        of_pixels = [module for name, module in model.named_modules() if reads_pixels(name, module)]
        assert of_pixels
        for module in of_pixels:
            module.register_forward_hook(self.count)

    def count(self, module, _, output):
        width = getattr(module, "out_channels", None) or module.out_features
        self.calls.append(output.numel() // width)


def reads_pixels(name, module):
    if isinstance(module, torch.nn.Linear):
        return name.endswith("patch_embedder.input_proj")  # gemma4
    return isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)) and module.in_channels == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_patches_by_size_are_those_of_the_tower(name):
    processor = tiny_processors.tiny_processor(name)
    model = tiny_vision.tiny_vision_model(name, processor).eval()
    tower = TowerPositions(model)
    placeholders = Placeholders(processor, patch_size_of(model.config))
    placeholders.learn((*size, 1) for size in SIZES)
    collate = DataCollatorForVisionLanguageModeling(processor)
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "is"}]}
    for height, width in SIZES:
        images = [noise(height, width, 0)]
        batch = collate([{"images": images, "prompt": [user], "completion": [answer]}])
        tower.calls.clear()
        with torch.no_grad():
            model(**batch)
        assert placeholders.of((height, width, 1)).patches == sum(tower.calls)


@pytest.mark.parametrize("options", [{}, {"overflow": "split", "max_length": 90}])
def test_the_report_counts_the_images_of_its_documents(options, trainer_of, processor):
    trainer = trainer_of(shuffle_dataset=True, **options)
    feature = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    tokens = sum(ids.count(feature) for ids in trainer.train_dataset["input_ids"])
    images = [len({*ids} - {0}) for ids in trainer.train_dataset["image_ids"]]
    counts = trainer.packing_report.images
    documents = len(images) - images.count(0)
    assert (counts.images, counts.documents) == (sum(images), documents)
    assert (counts.tokens, counts.patches) == (tokens, 4 * tokens)  # 2 × 2 patches are one token
    assert counts.images == 8 or options
    words = f"images       {counts.images} in {documents} document"
    assert words in str(trainer.packing_report)
    assert '"images": {' in trainer.packing_report.to_json()


@pytest.mark.slow
def test_the_tower_never_computes_more_than_max_patches(trainer_of):
    most = {}
    for limit in (200, None):
        options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 1}
        options |= {"max_length": 1000, "isolation_check": "off", "max_patches": limit}
        trainer = trainer_of(image_dataset(32), **options)
        tower = TowerPositions(trainer.model)
        trainer.train()
        most[limit] = max(tower.calls)
        assert most[limit] == trainer.packing_report.images.most_patches
        log = trainer.state.log_history[-1]
        assert log["train_images"] == trainer.packing_report.images.images
    assert most[200] <= 200 < most[None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_patches": 8}, "patches, but max_patches=8; raise max_patches"),
        ({"max_patches": 0}, "max_patches=0 must be at least 1"),
        ({"max_patches": 400, "packing": False}, "packing=False exclude each other"),
        ({"max_patches": 400, "documents_per_step": 4}, "documents_per_step=4 exclude each other"),
    ],
)
def test_limits_that_cannot_hold_are_refused(options, message, trainer_of):
    with pytest.raises(ValueError, match=message):
        trainer_of(**options)


def test_a_limit_of_patches_needs_images(trainer_of):
    rows = Dataset.from_list([{"prompt": "Hi", "completion": " there"}] * 4)
    assert trainer_of(rows).packing_report.images is None
    with pytest.raises(ValueError, match="max_patches=8 limits the images of a bin"):
        trainer_of(rows, max_patches=8)
    with pytest.raises(ValueError, match="max_patches=8, but a data set is a stream"):
        trainer_of(image_dataset().to_iterable_dataset(), max_patches=8)
