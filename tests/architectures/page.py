"""Write docs/compatibility.md: verdicts by family, counts, and a table of every architecture.

`page.md` is its text.
"""

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from architectures.compatibility import ONE_ROW_BACKENDS, Verdict

# Family -> beginnings of the model types that belong to it. The first family that fits counts.
FAMILIES = {
    "Llama": "llama",
    "Qwen": "qwen",
    "Gemma": "gemma vaultgemma shieldgemma paligemma diffusion_gemma t5gemma",
    "Mistral": "mistral mixtral ministral",
    "DeepSeek": "deepseek",
    "GLM": "glm",
    "Phi": "phi",
    "OLMo": "olmo flex_olmo",
    "Granite": "granite",
    "Cohere, Aya": "cohere aya",
    "SmolLM, SmolVLM, Idefics": "smol idefics",
    "Nemotron": "nemotron",
    "ERNIE 4.5": "ernie4",
    "EXAONE": "exaone",
    "Hunyuan": "hunyuan hy_",
    "Kimi": "kimi",
    "LFM": "lfm",
    "MiniMax, MiniCPM": "minimax minicpm",
    "GPT": "gpt openai-gpt",
    "Llava": "llava video_llava vipllava",
    "Recurrent and hybrid": "mamba falcon_mamba falcon_h1 jamba zamba bamba bailing_hybrid rwkv "
    "xlstm recurrent_gemma",
    "Falcon": "falcon",
    "BERT, encoders as decoders": "bert roberta camembert data2vec electra ernie megatron-bert "
    "rembert roc_bert roformer xlm xmod big_bird xlnet reformer",
    "BART, decoders of encoder-decoders": "bart mbart bigbird_pegasus blenderbot marian mvp "
    "pegasus plbart prophetnet trocr whisper musicgen florence2 pix2struct udop "
    "vision-encoder-decoder",
}
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

#: Row of the summary, what is counted here, what is counted of TRL's packing.
_SUMMARY = [
    ("exact in one row", "one row", "trl: exact"),
    ("exact as padded rows", "padded rows", None),
    ("another loss, silently", "silent", "trl: differs"),
    ("refused with an error", "refused", "trl: refuses"),
    ("shares prefixes exactly", "sharing: exact", None),
    ("trains shared prefixes apart, exactly", "sharing: apart", None),
    ("another loss with shared prefixes, silently", "sharing: differs", None),
    ("packs images exactly", "images: exact", None),
    ("takes the path of TRL with images", "images: trl", None),
    ("another loss with images, silently", "images: differs", None),
    ("not built", "not built", "not built"),
    ("**all**", "all", "all"),
]


def report(verdicts: Sequence[Verdict]) -> str:
    """Return the page docs/compatibility.md."""
    lost = [f"`{v.name}`" for v in verdicts if place_of(v) == "padded rows" and v.by_trl == "exact"]
    words = "Packed exactly by TRL, but as padded rows here:"
    none = "No architecture that TRL packs exactly needs padded rows here."
    packages = ("torch", "transformers", "trl", "trl-packing")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    odd = counts_of(v for v in verdicts if family_of(v.name)[:4] in ("BERT", "BART"))
    text = (Path(__file__).parent / "page.md").read_text()
    return text.format(
        summary=summary_table(verdicts),
        lost=f"{words} {', '.join(lost)}." if lost else none,
        families=family_table(verdicts),
        common=common_table(verdicts),
        odd=odd["trl: differs"],
        table=table(verdicts),
        versions=f"Python {platform.python_version()}, {versions}; float32 on CPU.",
    )


def place_of(v: Verdict) -> str:
    """Return where an architecture trains its documents, or why it does not."""
    if v.outcome != "exact":
        return v.outcome
    return "one row" if v.backend in ONE_ROW_BACKENDS else "padded rows"


def counts_of(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Return the numbers of architectures by result, with images, and packed by TRL."""
    found: Counter[str] = Counter()
    for v in verdicts:
        found.update(["all", place_of(v), *["silent"] * v.is_silent_difference])
        found.update([f"sharing: {v.sharing.outcome}", f"images: {v.images.outcome}"])
        found.update([f"trl: {v.by_trl.partition(' ')[0]}"])
    return found


def family_of(name: str) -> str:
    """Return the family of a model type."""
    found = (family for family, begin in FAMILIES.items() if name.startswith((*begin.split(),)))
    return next(found, "Others")


def summary_table(verdicts: Sequence[Verdict]) -> str:
    """Return the numbers of architectures by result, here and packed by TRL."""
    found = counts_of(verdicts)
    rows = ((name, found[here], found[trl] if trl else "–") for name, here, trl in _SUMMARY)
    return _table(("", "here", "packed by TRL"), rows, "| --- | ---: | ---: |")


def family_table(verdicts: Sequence[Verdict]) -> str:
    """Return one row for each family: its architectures by result."""
    rows = []
    words = {"exact": "exact", "differs": "silently different", "refuses": "refused"}
    for family in (*FAMILIES, "Others"):
        members = [v for v in verdicts if family_of(v.name) == family and v.outcome != "not built"]
        found = counts_of(members)
        padded = ", ".join(f"`{v.name}`" for v in members if place_of(v) == "padded rows")
        trl = [f"{found[f'trl: {key}']} {said}" for key, said in words.items()]
        known = ", ".join(said for said in trl if not said.startswith("0 "))
        if members:
            rows.append((family, f"{found['one row']} of {len(members)}", padded, known))
    columns = ("family", "in one row", "as padded rows", "packed by TRL")
    return _table(columns, rows, "| --- | ---: | --- | --- |")


def common_table(verdicts: Sequence[Verdict]) -> str:
    """Return one row for each model type that many people train."""
    found = {v.name: v for v in verdicts}
    rows = [
        (models, f"`{name}`", _here(found[name]), _trl_words(found[name]))
        for name, models in COMMON.items()
        if name in found
    ]
    return _table(("models", "model type", "here", "packed by TRL"), rows)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table with one row for each architecture, its numbers folded."""
    rows = (
        (f"`{v.name}`", _here(v), _shared(v), _with_images(v), _trl_words(v), _details(v))
        for v in sorted(verdicts, key=lambda v: v.name)
    )
    columns = ("architecture", "here", "shared prefixes", "with images", "packed by TRL", "details")
    return _table(columns, rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], rule: str = "") -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    head = f"| {' | '.join(columns)} |".replace("|  |", "| |")
    return "\n".join([head, rule or "| --- " * len(columns) + "|", *lines])


def _here(v: Verdict) -> str:
    return f"{place_of(v)}, `{v.backend}`" if v.outcome == "exact" else v.outcome


def _shared(v: Verdict) -> str:
    """Return whether an architecture shares prefixes, or why it does not."""
    words = {"exact": "exact", "differs": f"**differs** by {v.sharing.error:.0e}"}
    return words.get(v.sharing.outcome, _cell(v.sharing.reason))


def _with_images(v: Verdict) -> str:
    """Return whether documents with images are packed exactly, or why they are not packed."""
    found = v.images
    words = {"exact": f"exact, `{found.backend}`", "trl": "TRL's path", "": ""}
    words["differs"] = f"**differs** by {found.error:.0e}"
    return words.get(found.outcome, _cell(f"{found.outcome}: {found.reason}"))


def _trl_words(v: Verdict) -> str:
    words = v.by_trl.replace("differs (", "**differs** by ").replace("refuses (", "refused: ")
    return words.rstrip(")")


def _details(v: Verdict) -> str:
    """Return the numbers and the reason, folded under the largest error."""
    errors = {"logits": v.logits_error, "loss": v.loss_error, "gradients": v.gradient_error}
    known = {name: error for name, error in errors.items() if error == error}
    reason = "" if place_of(v) == "one row" else f" {_cell(v.reason)}"
    if v.images.outcome == "trl":
        reason += f"{'.' if reason else ''} With images: {_cell(v.images.reason)}."
    if not known:
        return f"<details><summary>reason</summary>{reason.lstrip()}</details>"
    numbers = ", ".join(f"{name} {error:.0e}" for name, error in known.items())
    others = "".join(
        f"; {words} {found.error:.0e}, rounding explains {found.tolerance:.0e}"
        for words, found in (("shared prefixes", v.sharing), ("with images", v.images))
        if found.error == found.error
    )
    return (
        f"<details><summary>within {max(known.values()):.0e}</summary>{numbers}; rounding explains "
        f"{v.tolerance:.0e}{others}; {v.seconds:.1f} s.{reason}</details>"
    )


def _cell(text: str) -> str:
    """Return a text as a cell of a table: one line, as it is, not too long."""
    line = " ".join(text.split())
    short = line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"
    return short.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
