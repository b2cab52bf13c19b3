"""Doubles of kernels that need CUDA: their names, arguments and demands, computed by PyTorch.

    causal_conv1d 1.7.0   causal_conv1d_fn                            seq_idx
    fla 0.6.0             chunk_gated_delta_rule, chunk_kda           cu_seqlens
    mamba_ssm 2.3.2       mamba_chunk_scan_combined, the fused one    seq_idx
                          selective_scan_fn                           none

A double runs the function of transformers that it replaces on the documents that it is told of.
"""

import inspect
import sys
import types

import torch
import torch.nn.functional as F
from transformers.integrations import hub_kernels

# The parameters of each kernel in their order; those before the bar are tokens, weights and sizes.
KERNELS = {
    "causal_conv1d_fn": (
        "causal_conv1d",
        "x weight bias=None | seq_idx=None initial_states=None return_final_states=False "
        "final_states_out=None activation=None",
    ),
    "chunk_gated_delta_rule": (
        "fla",
        "q k v g beta | scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False "
        "state_v_first=False cu_seqlens=None cu_seqlens_cpu=None chunk_indices=None "
        "cp_context=None **kwargs",
    ),
    "chunk_kda": (
        "fla",
        "q k v g beta | scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False "
        "allow_neg_eigval=False safe_gate=False lower_bound=None disable_recompute=False "
        "return_intermediate_states=False state_v_first=False cu_seqlens=None "
        "cu_seqlens_cpu=None cp_context=None use_graph=False max_num_seqs=None **kwargs",
    ),
    "mamba_chunk_scan_combined": (
        "mamba_ssm",
        "x dt A B C chunk_size | D=None z=None dt_bias=None initial_states=None seq_idx=None "
        "cu_seqlens=None dt_softplus=False dt_limit=None return_final_states=False "
        "return_varlen_states=False",
    ),
    "mamba_split_conv1d_scan_combined": (
        "mamba_ssm",
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size | initial_states=None "
        "seq_idx=None dt_limit=None return_final_states=False activation='silu' "
        "rmsnorm_weight=None rmsnorm_eps=1e-6 outproj_weight=None outproj_bias=None headdim=None "
        "ngroups=1 norm_before_gate=True",
    ),
    "selective_scan_fn": (
        "mamba_ssm",
        "u delta A B C | D=None z=None delta_bias=None delta_softplus=False "
        "return_last_state=False",
    ),
}
_TOKENS = {"x", "q", "k", "v", "g", "beta", "dt", "B", "C", "zxbcdt", "u", "delta", "z"}


def install(monkeypatch, modeling, *names, ignores_boundaries=False):
    """Put doubles in place of functions of a modeling module; return their calls, by name."""
    calls = {}
    for attribute, function in functions(modeling).items():
        facts = inspect.getclosurevars(function).nonlocals
        name, package = facts["func_name"], facts["package"]
        if name not in names:
            continue
        calls[name] = []
        torch_function = inspect.unwrap(function)
        is_fused = name == "mamba_split_conv1d_scan_combined"
        computes = _fused_of(modeling) if is_fused else torch_function
        double = _double(name, computes, calls[name], ignores_boundaries)
        fake = types.ModuleType(package)
        setattr(fake, name, double)
        with monkeypatch.context() as inside:
            inside.setitem(sys.modules, package, fake)
            decorate = hub_kernels.use_kernel_func_from_hub_with_fallback(name, package)
            monkeypatch.setattr(modeling, attribute, decorate(torch_function))
    assert calls.keys() == set(names)
    return calls


def functions(modeling):
    """Return what kernels may replace in a module, by name, as transformers has decorated it."""
    found = {}
    for name, value in vars(modeling).items():
        function = value.recurrent.function if hasattr(value, "recurrent") else value
        is_decorated = inspect.isfunction(function) and hasattr(function, "__wrapped__")
        if is_decorated and "func_name" in inspect.getclosurevars(function).nonlocals:
            found[name] = function
    return found


def _double(name, computes, calls, ignores_boundaries):
    named = KERNELS[name][1].replace("dt_limit=None", "dt_limit=(0.0, float('inf'))")
    first = named.split(" | ")[0].count(" ") + 1
    own = list(inspect.signature(computes).parameters)
    dim = 2 if name in ("causal_conv1d_fn", "selective_scan_fn") else 1

    def run(**given):
        asked = ("initial_state", "return_", "output_")
        assert not any(v for k, v in given.items() if k.startswith(asked)), "rows have no states"
        told = {k: given.pop(k, None) for k in ("seq_idx", "cu_seqlens", "cu_seqlens_cpu")}
        tokens = next(iter(given.values()))
        lengths = _lengths(told, tokens, dim)
        calls.append(lengths)
        if lengths is None or ignores_boundaries:
            lengths = [tokens.shape[dim]]
        of_tokens = {k: v for k, v in given.items() if k in _TOKENS and v is not None}
        parts = {k: v.split(lengths, dim) for k, v in of_tokens.items()}
        outputs = []
        for document in range(len(lengths)):
            part = given | {k: v[document] for k, v in parts.items()}
            rest = {k: v for k, v in list(part.items())[first:] if k in own}
            outputs.append(computes(*list(part.values())[:first], **rest))
        if isinstance(outputs[0], tuple):
            return torch.cat([values for values, _ in outputs], dim), None
        return torch.cat(outputs, dim)

    # A function of exactly these parameters: transformers reads them, and drops all others.
    scope = {"run": run}
    parameters = named.replace(" | ", " ").replace("(0.0, ", "(0.0,").replace(" ", ", ")
    body = "return run(**{k: v for k, v in locals().items() if k != 'kwargs'})"
    exec(f"def {name}({parameters}): {body}", scope)
    return scope[name]


def _lengths(told, tokens, dim):
    """Return the lengths of the documents that a kernel is told of, None if of none."""
    ids, ends, on_host = told.values()
    if ends is not None:
        assert tokens.shape[0] == 1
        assert on_host is None or (on_host.device.type == "cpu" and torch.equal(on_host, ends))
        return ends.diff().tolist()
    if ids is None:
        return None
    assert ids.shape == (1, tokens.shape[dim])
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert dim == 1 or tokens.stride(1) == 1, "the convolution takes seq_idx on channel-last input"
    return torch.unique_consecutive(ids[0], return_counts=True)[1].tolist()


def _fused_of(modeling):
    """Return what the fused kernel of Mamba-2 computes, by the two functions of `modeling`."""

    def fused(zxbcdt, weight, bias, dt_bias, A, D, chunk_size, **options):
        scan = inspect.unwrap(modeling.mamba2_chunk_scan)
        conv = inspect.unwrap(modeling.causal_conv1d_fn)
        heads, groups = len(D), options["ngroups"]
        inner = heads * options["headdim"]
        z, mixed, dt = zxbcdt.split([inner, len(weight), heads], -1)
        mixed = conv(mixed.transpose(1, 2), weight, bias, options["activation"]).transpose(1, 2)
        state = (len(weight) - inner) // 2
        x, b, c = mixed.split([inner, state, state], -1)
        shaped = [x.unflatten(-1, (heads, -1)), dt, A]
        shaped += [part.unflatten(-1, (groups, -1)) for part in (b, c)]
        limit = {"dt_bias": dt_bias, "dt_softplus": True, "dt_limit": options["dt_limit"]}
        y = scan(*shaped, chunk_size, D=D, **limit)
        y = (y[0] if isinstance(y, tuple) else y).flatten(2) * F.silu(z)
        y = F.rms_norm(y, y.shape[-1:], options["rmsnorm_weight"], options["rmsnorm_eps"])
        return F.linear(y, options["outproj_weight"], options["outproj_bias"])

    names = "zxbcdt weight bias dt_bias A D chunk_size ngroups headdim activation dt_limit "
    names += "rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fused.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names.split()])
    return fused
