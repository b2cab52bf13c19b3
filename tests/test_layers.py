"""Imports point one way: a module may import only modules above it in this table.

A new module adds its row here first. `docs/LOG.md` says why the table differs from the first plan.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "trl_packing"

# module -> (modules of ours that it imports, third-party packages that it imports at the top)
TABLE = {
    "versions": (set(), {"packaging"}),
    "seams": (set(), set()),
    "remixing": (set(), {"numpy"}),
    "packing": ({"remixing"}, {"numpy"}),
    "printable": (set(), set()),
    "exit_messages": ({"printable"}, set()),
    "documents": (set(), {"numpy", "torch"}),
    "labels": (set(), {"numpy"}),
    "host": ({"labels"}, {"numpy", "torch"}),
    "weighting": ({"labels"}, {"numpy"}),
    "arrow_documents": ({"labels"}, {"datasets", "numpy", "pyarrow", "torch"}),
    "document_columns": (
        {"arrow_documents", "labels", "weighting"},
        {"datasets", "numpy", "pyarrow"},
    ),
    "token_metrics": (set(), {"torch"}),
    "evaluation": ({"document_columns", "token_metrics"}, {"torch"}),
    "report": (set(), set()),
    "token_columns": ({"arrow_documents", "labels"}, {"numpy", "pyarrow"}),
    "bad_rows": (set(), {"numpy"}),
    "model_config": (set(), set()),
    "length_constants": ({"model_config"}, set()),
    "model_limits": (
        {"arrow_documents", "bad_rows", "labels", "model_config"},
        {"datasets", "numpy", "torch"},
    ),
    "dataset_checks": (
        {"arrow_documents", "bad_rows", "labels", "model_limits", "token_columns"},
        {"datasets", "numpy", "pyarrow", "trl"},
    ),
    "stop_tokens": (
        {"arrow_documents", "labels", "printable", "token_columns"},
        {"datasets", "numpy", "pyarrow"},
    ),
    "pieces": ({"arrow_documents", "labels", "token_columns"}, {"numpy"}),
    "overflow": (
        {"arrow_documents", "labels", "pieces", "report", "token_columns"},
        {"datasets", "numpy", "pyarrow"},
    ),
    "unpadding": (
        {"arrow_documents", "bad_rows", "labels", "pieces", "token_columns"},
        {"accelerate", "datasets", "numpy", "pyarrow", "trl"},
    ),
    "balance": (set(), {"numpy"}),
    "steps": ({"balance", "packing"}, {"numpy"}),
    "document_order": (set(), {"numpy", "torch", "transformers"}),
    "sampler": ({"document_order", "packing", "steps"}, {"numpy", "transformers"}),
    "unpacking": (
        {"arrow_documents", "pieces", "token_columns"},
        {"datasets", "numpy", "pyarrow", "trl"},
    ),
    "set_afterwards": (set(), {"numpy"}),
    "stream_parts": (set(), {"datasets"}),
    "stream_windows": (
        {"labels", "model_limits", "stream_parts", "weighting"},
        {"datasets", "numpy"},
    ),
    "stream_overflow": (
        {
            "arrow_documents",
            "dataset_checks",
            "document_columns",
            "model_limits",
            "overflow",
            "pieces",
            "report",
            "stream_parts",
            "token_columns",
        },
        {"datasets", "pyarrow"},
    ),
    "streaming": (
        {
            "model_limits",
            "packing",
            "report",
            "stream_overflow",
            "stream_parts",
            "stream_windows",
        },
        {"datasets", "numpy", "torch"},
    ),
    "stream_batches": (
        {
            "model_limits",
            "report",
            "stream_overflow",
            "stream_parts",
            "stream_windows",
            "streaming",
        },
        {"numpy", "torch"},
    ),
    "static_shapes": ({"length_constants", "model_config"}, set()),
    "collator": ({"documents", "host", "labels", "static_shapes", "weighting"}, {"numpy", "torch"}),
    "templates": ({"printable"}, {"numpy"}),
    "conversations": ({"printable"}, set()),
    "prompt_templates": (set(), set()),
    "turns": ({"conversations", "printable"}, {"jinja2", "transformers", "trl"}),
    "tokenization": ({"labels", "templates"}, {"numpy", "trl"}),
    "supervision": (
        {"conversations", "printable", "prompt_templates", "templates", "tokenization", "turns"},
        {"datasets", "pyarrow"},
    ),
    "documents_from_rows": (
        {
            "bad_rows",
            "dataset_checks",
            "labels",
            "printable",
            "supervision",
            "tokenization",
            "turns",
        },
        {"accelerate", "datasets", "numpy", "transformers", "trl"},
    ),
    "legacy_collator": (
        {"collator", "labels", "templates"},
        {"datasets", "numpy", "torch", "transformers", "trl"},
    ),
    "neftune": (set(), {"torch", "transformers"}),
    "architectures": (set(), {"torch", "transformers"}),
    "engines": (set(), {"torch"}),
    "known_documents": (set(), {"numpy"}),
    "packed_call": ({"collator", "host", "labels"}, {"numpy", "torch", "transformers"}),
    "row_in_flight": ({"host", "packed_call"}, {"numpy", "torch", "transformers"}),
    "rows_by_content": ({"host", "known_documents", "row_in_flight"}, {"numpy", "torch"}),
    "current_row": (
        {"collator", "documents", "host", "labels", "rows_by_content"},
        {"numpy", "torch"},
    ),
    "attention.implementation": ({"model_config"}, {"torch"}),
    "attention.interface": (
        {"attention.implementation", "current_row", "host", "neftune"},
        {"torch", "transformers"},
    ),
    "attention.document_sdpa": ({"attention.interface", "host"}, {"torch"}),
    "attention.torch_varlen": ({"attention.interface"}, {"torch"}),
    "attention.flash_attn": (set(), {"torch", "transformers"}),
    "attention.kernel_backward": (set(), {"torch", "transformers"}),
    "attention.explicit_mask": (
        {"attention.interface", "documents", "host", "model_config"},
        {"numpy", "torch"},
    ),
    "attention.padded_rows": (
        {"attention.interface", "engines", "host", "labels", "neftune"},
        {"numpy", "torch", "transformers"},
    ),
    "attention": (
        {
            "length_constants",
            "model_config",
            "attention.explicit_mask",
            "attention.padded_rows",
            "attention.implementation",
            "attention.interface",
            "attention.document_sdpa",
            "attention.torch_varlen",
            "attention.flash_attn",
            "attention.kernel_backward",
        },
        {"torch"},
    ),
    "head": ({"attention.interface", "engines", "host", "labels"}, {"numpy", "torch", "trl"}),
    "label_smoothing": (set(), {"torch", "transformers"}),
    "loss": (
        {
            "document_columns",
            "evaluation",
            "host",
            "label_smoothing",
            "labels",
            "neftune",
            "token_metrics",
        },
        {"accelerate", "torch", "transformers", "trl"},
    ),
    "throughput": (set(), set()),
    "device_peaks": (set(), set()),
    "model_flops": ({"attention.interface", "model_config"}, {"numpy", "torch"}),
    "measured": (
        {"device_peaks", "host", "loss", "model_flops", "throughput", "token_metrics"},
        {"accelerate", "torch", "transformers"},
    ),
    "epoch_record": ({"arrow_documents"}, {"numpy"}),
    "resuming": (
        {"arrow_documents", "epoch_record", "measured", "sampler"},
        {"accelerate", "numpy", "transformers"},
    ),
    "probes": ({"length_constants"}, {"numpy", "torch"}),
    "undisturbed": ({"current_row"}, {"numpy", "torch"}),
    "isolation": (
        {
            "attention",
            "attention.interface",
            "collator",
            "host",
            "engines",
            "labels",
            "probes",
            "undisturbed",
        },
        {"numpy", "torch"},
    ),
    "exact_way": ({"attention", "engines", "isolation"}, {"numpy", "torch"}),
    "isolation_messages": (
        {"attention", "exact_way", "isolation", "length_constants"},
        set(),
    ),
    "config": ({"weighting"}, {"trl"}),
    "arguments": (
        {
            "collator",
            "config",
            "legacy_collator",
            "pieces",
            "prompt_templates",
            "supervision",
            "templates",
            "turns",
        },
        {"datasets", "transformers", "trl"},
    ),
    "plan": (
        {"arguments", "arrow_documents", "config", "document_order", "report", "sampler"},
        {"numpy", "trl"},
    ),
    "prepare": (
        {
            "arguments",
            "arrow_documents",
            "config",
            "dataset_checks",
            "document_columns",
            "documents_from_rows",
            "labels",
            "legacy_collator",
            "overflow",
            "report",
            "stop_tokens",
            "stream_overflow",
            "supervision",
            "templates",
            "token_columns",
            "unpadding",
        },
        {"accelerate", "datasets", "numpy", "trl"},
    ),
    "gate": (
        {
            "engines",
            "arrow_documents",
            "attention",
            "attention.interface",
            "collator",
            "config",
            "exact_way",
            "head",
            "isolation",
            "isolation_messages",
            "length_constants",
            "model_limits",
            "stream_windows",
        },
        {"accelerate", "datasets", "numpy", "torch"},
    ),
    "render": ({"labels", "printable"}, {"numpy"}),
    "inspection": (
        {
            "arguments",
            "arrow_documents",
            "config",
            "plan",
            "prepare",
            "printable",
            "render",
            "report",
            "token_columns",
            "weighting",
        },
        {"datasets", "transformers", "trl"},
    ),
    "packed_dataset": (
        {"arrow_documents", "known_documents", "labels", "model_limits", "packing"},
        {"datasets", "numpy", "torch", "transformers"},
    ),
    "supervised_dataset": (
        {
            "documents_from_rows",
            "inspection",
            "overflow",
            "packed_dataset",
            "pieces",
            "prompt_templates",
            "stop_tokens",
            "supervision",
            "turns",
        },
        {"datasets"},
    ),
    "plain_trainer": (
        {
            "attention",
            "attention.implementation",
            "attention.interface",
            "config",
            "current_row",
            "engines",
            "exact_way",
            "isolation_messages",
            "length_constants",
            "model_limits",
            "neftune",
            "packed_call",
            "packed_dataset",
            "probes",
            "undisturbed",
            "versions",
        },
        {"numpy", "torch"},
    ),
    "checkpoints": (set(), {"accelerate", "safetensors", "transformers"}),
    "allocator": (set(), set()),
    "recipes": (set(), set()),
    "loaders": (
        {
            "arguments",
            "arrow_documents",
            "attention",
            "collator",
            "config",
            "current_row",
            "document_columns",
            "gate",
            "labels",
            "legacy_collator",
            "loss",
            "model_config",
            "plan",
            "resuming",
            "sampler",
            "set_afterwards",
            "static_shapes",
            "stream_batches",
            "stream_overflow",
            "streaming",
            "token_columns",
            "unpacking",
        },
        {"accelerate", "datasets", "numpy", "torch", "trl"},
    ),
    "trainer": (
        {
            "allocator",
            "arguments",
            "arrow_documents",
            "attention",
            "attention.implementation",
            "checkpoints",
            "collator",
            "config",
            "current_row",
            "dataset_checks",
            "document_columns",
            "engines",
            "gate",
            "head",
            "legacy_collator",
            "loaders",
            "loss",
            "measured",
            "neftune",
            "plan",
            "prepare",
            "report",
            "sampler",
            "stream_overflow",
            "versions",
            "weighting",
        },
        {"accelerate", "datasets", "torch", "transformers", "trl"},
    ),
    "matrix": (
        {
            "architectures",
            "attention.interface",
            "collator",
            "config",
            "isolation",
            "labels",
            "trainer",
        },
        {"datasets", "numpy", "tokenizers", "torch", "transformers", "trl"},
    ),
    "cli": (
        {
            "architectures",
            "attention",
            "exact_way",
            "exit_messages",
            "inspection",
            "matrix",
        },
        {"torch"},
    ),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    return {name: path for path in PACKAGE.rglob("*.py") if (name := module_name(path))}


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Return modules of ours imported anywhere in the file, and packages imported at its top."""
    tree = ast.parse(path.read_text())
    ours, third_party = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module in ("trl_packing", "trl_packing.attention"):
                base = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [
                    n if n.removeprefix("trl_packing.") in modules() else node.module for n in base
                ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root = name.split(".")[0]
            if root == "trl_packing":
                ours.add(name.removeprefix("trl_packing").removeprefix("."))
            elif node in tree.body and root not in sys.stdlib_module_names:
                third_party.add(root)
    return ours - {""}, third_party


def test_every_module_has_its_row_and_every_row_its_module():
    assert set(modules()) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_module_imports_only_what_its_row_says(name):
    ours, third_party = imports_of(modules()[name])
    assert ours <= TABLE[name][0], f"{name} imports {ours - TABLE[name][0]}"
    assert third_party <= TABLE[name][1], f"{name} imports {third_party - TABLE[name][1]}"


@pytest.mark.parametrize("name", TABLE)
def test_rows_name_only_modules_above_them(name):
    order = list(TABLE)
    assert all(order.index(other) < order.index(name) for other in TABLE[name][0])


def test_the_check_sees_a_forbidden_import(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("from trl_packing.trainer import PackedSFTTrainer\nimport torch\n")
    assert imports_of(path) == ({"trainer"}, {"torch"})


def test_importing_the_package_and_packing_needs_neither_torch_nor_trl():
    code = (
        "import sys, trl_packing\n"
        "assert len(trl_packing.pack([3, 2, 1], 4)) == 2\n"
        "heavy = {'torch', 'trl', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported():
    import trl_packing

    assert all(getattr(trl_packing, name) is not None for name in trl_packing.__all__)
    assert set(trl_packing.__all__) == set(trl_packing._HOME)
