"""The model types whose documents with images are packed, and why others are not."""

#: Each type is trained packed in `tests/architectures/test_images.py` and in the matrix of
#: docs/compatibility.md: loss and gradients equal those of its documents one at a time.
FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni_thinker"),
    *("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl", "cohere_compass"),
    *("llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava"),
    *("internvl", "qianfan_ocr", "aya_vision", "aria", "deepseek_vl", "janus"),
    *("idefics3", "smolvlm", "granite_docling", "granite4_vision"),
    *("mistral3", "lighton_ocr", "gemma3", "gemma4"),
    *("exaone4_5", "hyperclovax_vision_v2", "video_llama_3"),
)

_TORCHVISION = "not verified, because its image processor needs torchvision"
_TIMM = "not verified, because its tower needs timm"
_PADDED = "its documents are exact as padded rows only"
_BY_REASON = {
    _TORCHVISION: "cohere2_vision gemma4_unified inkling_mm_model kimi_k25 muse_glimmer muse_spark "
    "molmo2 step3p7 unlimited_ocr",
    _TIMM: "fast_vlm gemma3n perception_lm",
    _PADDED: "dots3_note glm5_next inkling2 kosmos-2.5 lfm2_vl lfm3_vl llama4 minicpm_ocr "
    "minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral_large4 nemotron_h_omni qwen3_5 qwen3_5_moe "
    "qwen4_exp",
    "its text attends to the images of a whole row by cross-attention": "evolla idefics mllama",
    "it is an encoder-decoder": "florence2 pix2struct pp_formulanet t5gemma2 udop "
    "vision-encoder-decoder",
    "it is not a causal language model of text and images": "blip diffusion_gemma git pi0 "
    "shieldgemma2",
    "its processor takes no text without an image, and TRL passes it completions": "got_ocr2 "
    "pp_chart2table",
    "its processor takes no completion without an image, and TRL's rows do not say where a prompt "
    "ends, whose tokens see each other in both directions": "paligemma",
    "its processor rewrites text around images": "chameleon fuyu idefics2",
    "its images become tokens of its vocabulary": "emu3",
}
_REASONS = {name: why for why, names in _BY_REASON.items() for name in names.split()}
_NOT_VERIFIED = "not verified"


def why_no_family(model_type: str) -> str | None:
    """Return why documents with images are not packed for a model type, or None if they are."""
    if model_type in FAMILIES:
        return None
    why = _REASONS.get(model_type, _NOT_VERIFIED)
    return f"the data set has images, which are not packed for {model_type} models ({why})"
