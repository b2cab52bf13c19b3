"""Write docs/compatibility.md: verdicts by family, counts, and a table of every architecture."""

import importlib.metadata
import platform
from collections.abc import Sequence

from architectures.compatibility import ONE_ROW_BACKENDS, Verdict
from architectures.image_step import WithImages
from architectures.shared_step import Sharing

# Family -> beginnings of the model types that belong to it. The first family that fits counts.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama": ("llama",),
    "Qwen": ("qwen",),
    "Gemma": ("gemma", "vaultgemma", "shieldgemma", "paligemma", "diffusion_gemma", "t5gemma"),
    "Mistral": ("mistral", "mixtral", "ministral"),
    "DeepSeek": ("deepseek",),
    "GLM": ("glm",),
    "Phi": ("phi",),
    "OLMo": ("olmo", "flex_olmo"),
    "Granite": ("granite",),
    "Cohere, Aya": ("cohere", "aya"),
    "SmolLM, SmolVLM, Idefics": ("smol", "idefics"),
    "Nemotron": ("nemotron",),
    "ERNIE 4.5": ("ernie4",),
    "EXAONE": ("exaone",),
    "Hunyuan": ("hunyuan", "hy_"),
    "Kimi": ("kimi",),
    "LFM": ("lfm",),
    "MiniMax, MiniCPM": ("minimax", "minicpm"),
    "GPT": ("gpt", "openai-gpt"),
    "Llava": ("llava", "video_llava", "vipllava"),
    "Recurrent and hybrid": (
        *("mamba", "falcon_mamba", "falcon_h1", "jamba", "zamba", "bamba", "bailing_hybrid"),
        *("rwkv", "xlstm", "recurrent_gemma"),
    ),
    "Falcon": ("falcon",),
    "BERT, encoders as decoders": (
        *("bert", "roberta", "camembert", "data2vec", "electra", "ernie", "megatron-bert"),
        *("rembert", "roc_bert", "roformer", "xlm", "xmod", "big_bird", "xlnet", "reformer"),
    ),
    "BART, decoders of encoder-decoders": (
        *("bart", "mbart", "bigbird_pegasus", "blenderbot", "marian", "mvp", "pegasus", "plbart"),
        *("prophetnet", "trocr", "whisper", "musicgen", "florence2", "pix2struct", "udop"),
        "vision-encoder-decoder",
    ),
}
OTHERS = "Others"

# Model type -> models that many people train.
COMMON = {
    "llama": "Llama 3, SmolLM2",
    "qwen2": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-30B-A3B",
    "gemma3_text": "Gemma 3",
    "mistral": "Mistral, Ministral",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3, Kimi K2",
    "qwen3_5_text": "Qwen3.5",
    "nemotron_h": "Nemotron-H",
}

_LONGEST_REASON = 240  # characters

_TEXT = """# Supported architectures

`make matrix` trains one packed optimizer step of a tiny random model of every
causal language model architecture that transformers knows, and of vision-language models, on text
alone and with images. It compares logits, loss and every gradient with the same documents one at a
time. TRL's packing is compared in the same way, on the untouched model.
`trl-packing verify --model M` checks a model of yours, and with `--prefixes` its
[shared prefixes](shared-prefixes.md) too.

**One row**: the documents share a row, and an exact attention backend keeps them apart. **Padded
rows**: no backend is exact on one row, so the trainer runs the same documents as padded rows: the
same steps and the same loss, but slower. **Silently**: without an error or a warning. {lost}

**Shared prefixes**: one more step, with `prefix_sharing="bin"` on documents that fork at two
depths, is compared with the documents one at a time. An architecture that cannot share trains them
apart, and the column says why.

**With images**: one more step, on documents with one, two and no [images](images.md) of different
sizes, is compared with TRL's collator and the untouched model on one document at a time; gradients
of tower and projector are compared apart from those of the text model. All other types take TRL's
padded path unchanged, and a warning says why.

**Packed by TRL** is measured in float32 on a CPU, without optional kernels. TRL is written for
FlashAttention on a GPU, whose boundaries keep documents apart in models that support it; that is
not measured here. Its `ValueError`s, on Qwen3.5, LFM2, Kimi Linear and Nemotron-H among others, ask
for kernels that are not installed (`causal_conv1d`, `fla`): they are no limit of TRL. Of the models
on which it differs silently, {odd} are decoders of the BERT and BART kind, which few people train.

## Ten that people train

{common}

## Families

{families}

## Summary

{summary}

## Every architecture

The backend `documents` is a kernel that takes boundaries, `model` is the model's own mask from
`position_ids`, and `mask` is an explicit 4-D mask. `padded` and `equal_lengths` are padded rows.
The details hold the errors relative to the largest value, and the largest error that rounding
explains on this model. The difference of TRL's packing is that of the log-probabilities.

<div class="filter" data-rows="architectures"></div>

{table}

{versions}
"""


def report(verdicts: Sequence[Verdict]) -> str:
    """Return the page docs/compatibility.md."""
    return _TEXT.format(
        summary=summary_table(verdicts),
        lost=_lost(verdicts),
        families=family_table(verdicts),
        common=common_table(verdicts),
        odd=_by_trl([v for v in verdicts if family_of(v.name)[:4] in ("BERT", "BART")], "differs"),
        table=table(verdicts),
        versions=_versions(),
    )


def summary_table(verdicts: Sequence[Verdict]) -> str:
    """Return the numbers of architectures by result, here and packed by TRL."""
    not_built = sum(v.outcome == "not built" for v in verdicts)
    rows = [
        ("exact in one row", sum(map(_in_one_row, verdicts)), _by_trl(verdicts, "exact")),
        ("exact as padded rows", sum(map(_padded, verdicts)), "–"),
        (
            "another loss, silently",
            sum(v.is_silent_difference for v in verdicts),
            _by_trl(verdicts, "differs"),
        ),
        (
            "refused with an error",
            sum(v.outcome == "refused" for v in verdicts),
            _by_trl(verdicts, "refuses"),
        ),
        ("shares prefixes exactly", _sharing(verdicts, "exact"), "–"),
        ("trains shared prefixes apart, exactly", _sharing(verdicts, "apart"), "–"),
        ("another loss with shared prefixes, silently", _sharing(verdicts, "differs"), "–"),
        ("packs images exactly", _images(verdicts, "exact"), "–"),
        ("takes the path of TRL with images", _images(verdicts, "trl"), "–"),
        ("another loss with images, silently", _images(verdicts, "differs"), "–"),
        ("not built", not_built, not_built),
        ("**all**", len(verdicts), len(verdicts)),
    ]
    lines = [f"| {name} | {here} | {trl} |" for name, here, trl in rows]
    return "\n".join(["| | here | packed by TRL |", "| --- | ---: | ---: |", *lines])


def family_table(verdicts: Sequence[Verdict]) -> str:
    """Return one row for each family: its architectures by result."""
    header = "| family | in one row | as padded rows | packed by TRL |"
    rows = [header, "| --- | ---: | --- | --- |"]
    for family in (*FAMILIES, OTHERS):
        members = [v for v in verdicts if family_of(v.name) == family and v.outcome != "not built"]
        if members:
            padded = ", ".join(f"`{v.name}`" for v in members if _padded(v))
            one_row = f"{sum(map(_in_one_row, members))} of {len(members)}"
            rows.append(f"| {family} | {one_row} | {padded} | {_trl_counts(members)} |")
    return "\n".join(rows)


def common_table(verdicts: Sequence[Verdict]) -> str:
    """Return one row for each model type that many people train."""
    rows = ["| models | model type | here | packed by TRL |", "| --- | --- | --- | --- |"]
    found = {v.name: v for v in verdicts}
    for name, models in COMMON.items():
        if (v := found.get(name)) is not None:
            rows.append(f"| {models} | `{name}` | {_here(v)} | {_trl_words(v.by_trl)} |")
    return "\n".join(rows)


def family_of(name: str) -> str:
    """Return the family of a model type."""
    families = (family for family, begin in FAMILIES.items() if name.startswith(begin))
    return next(families, OTHERS)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table with one row for each architecture, its numbers folded."""
    columns = ("architecture", "here", "shared prefixes", "with images", "packed by TRL", "details")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for v in sorted(verdicts, key=lambda v: v.name):
        cells = [f"`{v.name}`", _here(v), _shared(v), _with_images(v), _trl_words(v.by_trl)]
        lines.append("| " + " | ".join([*cells, _details(v)]) + " |")
    return "\n".join(lines)


def _here(v: Verdict) -> str:
    if v.outcome != "exact":
        return v.outcome
    return f"{'one row' if _in_one_row(v) else 'padded rows'}, `{v.backend}`"


def _shared(v: Verdict) -> str:
    """Return whether an architecture shares prefixes, or why it does not."""
    words = {"exact": "exact", "differs": f"**differs** by {v.sharing.error:.0e}"}
    return words.get(v.sharing.outcome, _cell(v.sharing.reason))


def _with_images(v: Verdict) -> str:
    """Return whether documents with images are packed exactly, or why they are not packed."""
    found = v.images
    words = {
        "exact": f"exact, `{found.backend}`",
        "differs": f"**differs** by {found.error:.0e}",
        "trl": "TRL's path",
        "": "",
    }
    return words.get(found.outcome, _cell(f"{found.outcome}: {found.reason}"))


def _details(v: Verdict) -> str:
    """Return the numbers and the reason, folded under the largest error."""
    errors = {"logits": v.logits_error, "loss": v.loss_error, "gradients": v.gradient_error}
    known = {name: error for name, error in errors.items() if error == error}
    reason = "" if _in_one_row(v) else f" {_cell(v.reason)}"
    if v.images.outcome == "trl":
        reason += f"{'.' if reason else ''} With images: {_cell(v.images.reason)}."
    if not known:
        return f"<details><summary>reason</summary>{reason.lstrip()}</details>"
    numbers = ", ".join(f"{name} {error:.0e}" for name, error in known.items())
    others = _measured("shared prefixes", v.sharing) + _measured("with images", v.images)
    return (
        f"<details><summary>within {max(known.values()):.0e}</summary>{numbers}; rounding explains "
        f"{v.tolerance:.0e}{others}; {v.seconds:.1f} s.{reason}</details>"
    )


def _measured(words: str, found: Sharing | WithImages) -> str:
    if found.error != found.error:
        return ""
    return f"; {words} {found.error:.0e}, rounding explains {found.tolerance:.0e}"


def _lost(verdicts: Sequence[Verdict]) -> str:
    lost = [f"`{v.name}`" for v in verdicts if _padded(v) and v.by_trl == "exact"]
    if not lost:
        return "No architecture that TRL packs exactly needs padded rows here."
    return f"Packed exactly by TRL, but as padded rows here: {', '.join(lost)}."


def _in_one_row(v: Verdict) -> bool:
    return v.outcome == "exact" and v.backend in ONE_ROW_BACKENDS


def _padded(v: Verdict) -> bool:
    return v.outcome == "exact" and v.backend not in ONE_ROW_BACKENDS


def _sharing(verdicts: Sequence[Verdict], outcome: str) -> int:
    return sum(v.sharing.outcome == outcome for v in verdicts)


def _images(verdicts: Sequence[Verdict], outcome: str) -> int:
    return sum(v.images.outcome == outcome for v in verdicts)


def _by_trl(verdicts: Sequence[Verdict], result: str) -> int:
    return sum(v.by_trl.startswith(result) for v in verdicts)


def _trl_counts(verdicts: Sequence[Verdict]) -> str:
    words = {"exact": "exact", "differs": "silently different", "refuses": "refused"}
    counts = {said: _by_trl(verdicts, result) for result, said in words.items()}
    return ", ".join(f"{count} {said}" for said, count in counts.items() if count)


def _trl_words(by_trl: str) -> str:
    return (
        by_trl.replace("differs (", "**differs** by ").replace("refuses (", "refused: ").rstrip(")")
    )


def _versions() -> str:
    packages = ("torch", "transformers", "trl", "trl-packing")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"Python {platform.python_version()}, {versions}; float32 on CPU."


def _cell(text: str) -> str:
    """Return a text as a cell of a table: one line, as it is, not too long."""
    line = " ".join(text.split())
    short = line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"
    return short.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
