"""Settings that are not possible together raise an error with the way out."""

from numbers import Real
from typing import Any

from trl_packing.config.options import PackingOptions
from trl_packing.config.values import check_values
from trl_packing.packing.bins import find_strategy


def check_options(args: Any) -> None:
    """Raise ValueError for the first setting of `args` that is not possible, with the way out.

    A plain `SFTConfig` does not check its settings for packing, so the trainer calls this for it.
    """
    options = PackingOptions.of(args)
    check_values(args, options)
    _check_supervision(args, options)
    _check_static_shapes(args, options)
    _check_groups(args, options)
    _check_mixture(args, options)
    _check_overlap(args, options)
    _check_curriculum(args, options)
    _check_patches(args, options)


def _check_static_shapes(args: Any, options: PackingOptions) -> None:
    if not options.static_shapes:
        return
    if not args.packing:
        raise ValueError(
            "static_shapes=True needs packing=True: without packing, the number of tokens differs "
            "from step to step; set packing=True, or leave static_shapes out"
        )
    if options.documents_per_step is not None:
        raise ValueError(
            f"static_shapes=True and documents_per_step={options.documents_per_step}: documents "
            "differ in length, so micro-batches would too; leave one of them out"
        )
    if options.prefix_sharing not in ("off", PackingOptions.prefix_sharing):
        raise ValueError(
            f"static_shapes=True and prefix_sharing={options.prefix_sharing!r}: rows with shared "
            "prefixes differ in length; leave one of them out"
        )
    if options.attention in ("padded", "equal_lengths"):
        raise ValueError(
            f"static_shapes=True with attention={options.attention!r} would have no effect: the "
            "shapes of padded rows depend on the documents; leave one of them out"
        )


def _check_groups(args: Any, options: PackingOptions) -> None:
    size, mode = options.prefix_group_size, options.prefix_sharing
    if mode != "group":
        if size != PackingOptions.prefix_group_size:
            raise ValueError(
                f"prefix_group_size={size} has no effect with prefix_sharing={mode!r}; set "
                "prefix_sharing='group', or leave prefix_group_size out"
            )
        return
    if size < 2:
        raise ValueError(
            f"prefix_group_size={size} must be at least 2; to share only what lies in one bin "
            "anyway, set prefix_sharing='bin'"
        )
    if not find_strategy(args.packing_strategy).shuffles:
        raise ValueError(
            f"prefix_sharing='group' with packing_strategy={args.packing_strategy!r}: pieces are "
            "cut where rows end, in the order of the data set, which groups would change; set "
            "prefix_sharing='bin', or another packing_strategy"
        )


def _check_mixture(args: Any, options: PackingOptions) -> None:
    temperature: Any = options.mixture_temperature
    mixture: Any = options.mixture
    if mixture is None and temperature is None:
        return
    if mixture is not None:
        _check_shares(mixture)
        weighted = [name for name, share in mixture.items() if "weight" in share]
        if temperature is not None and weighted:
            raise ValueError(
                f"mixture_temperature={temperature} and a weight of {weighted[0]!r} in mixture "
                "both say how often sources are drawn; leave one of them out"
            )
    if temperature is not None and not (_is_number(temperature) and temperature > 0):
        raise ValueError(f"mixture_temperature={temperature!r} must be above 0, or None")
    name = "mixture" if mixture is not None else "mixture_temperature"
    if args.train_sampling_strategy == "sequential":
        raise ValueError(
            f"{name} draws documents at random, and train_sampling_strategy='sequential' keeps "
            "their order; leave one of them out"
        )
    if options.prefix_sharing == "group":
        raise ValueError(
            f"{name} draws single documents, and prefix_sharing='group' groups of them; set "
            f"prefix_sharing='bin', or leave {name} out"
        )
    if options.curriculum is not None:
        raise ValueError(
            f"{name} draws documents at random, and curriculum={options.curriculum!r} orders them; "
            "leave one of them out"
        )
    if not find_strategy(args.packing_strategy).shuffles:
        raise ValueError(
            f"{name} with packing_strategy={args.packing_strategy!r}: pieces are cut where rows "
            "end, in the order of the data set, which a mixture changes; set another "
            "packing_strategy"
        )


def check_mixture_unit(options: PackingOptions) -> None:
    """Raise ValueError for a unit without a mixture, which may be set after the configuration."""
    is_mixed = options.mixture is not None or options.mixture_temperature is not None
    if options.mixture_unit != PackingOptions.mixture_unit and not is_mixed:
        raise ValueError(
            f"mixture_unit={options.mixture_unit!r} has no effect without mixture and "
            "mixture_temperature; set one of them, or leave mixture_unit out"
        )


def _check_shares(mixture: Any) -> None:
    """Raise ValueError unless `mixture` names shares of sources."""
    example = "{'math': {'weight': 3}, 'chat': {'epochs': 0.5}}"
    if not isinstance(mixture, dict) or not mixture:
        raise ValueError(f"mixture={mixture!r} must name sources, as in {example}")
    for source, share in mixture.items():
        if not (isinstance(share, dict) and len(share) == 1 and {*share} <= {"weight", "epochs"}):
            raise ValueError(
                f"mixture[{source!r}]={share!r} must have a 'weight' or 'epochs', as in {example}"
            )
        ((kind, value),) = share.items()
        if not (_is_number(value) and 0 <= value < float("inf")):
            raise ValueError(f"{kind}={value!r} of {source!r} in mixture must be a number from 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_overlap(args: Any, options: PackingOptions) -> None:
    overlap, capacity = options.overlap_tokens, args.max_length
    if options.overflow != "overlap":
        if overlap is not None:
            raise ValueError(
                f"overlap_tokens={overlap} has no effect with overflow={options.overflow!r}; set "
                "overflow='overlap', or leave overlap_tokens out"
            )
        return
    if capacity is None:
        raise ValueError(
            "overflow='overlap' with max_length=None: no document is too long; set max_length, or "
            "leave overflow out"
        )
    if args.packing and find_strategy(args.packing_strategy).overflow == "wrapped":
        raise ValueError(
            f"overflow='overlap' with packing_strategy={args.packing_strategy!r}: its pieces are "
            "cut where rows end, and do not overlap; leave one of them out"
        )
    if overlap is not None and not 1 <= overlap <= capacity // 2:
        raise ValueError(
            f"overlap_tokens={overlap} must be at least 1 and at most half of max_length="
            f"{capacity}: with more, most tokens would be computed more than twice"
        )


def _check_curriculum(args: Any, options: PackingOptions) -> None:
    curriculum, default = options.curriculum, PackingOptions.curriculum_order
    if curriculum is None:
        if options.curriculum_order != default:
            raise ValueError(
                f"curriculum_order={options.curriculum_order!r} has no effect without curriculum; "
                "set curriculum='length' or a column, or leave curriculum_order out"
            )
        return
    others: dict[str, tuple[Any, Any]] = {
        "prefix_sharing": (options.prefix_sharing, ("group",)),
        "train_sampling_strategy": (
            str(args.train_sampling_strategy),
            ("sequential", "group_by_length"),
        ),
    }
    if args.packing:
        others["packing_strategy"] = args.packing_strategy, ("wrapped",)
    for name, (value, refused) in others.items():
        if value in refused:
            raise ValueError(
                f"curriculum={curriculum!r} and {name}={value!r} both say which documents come "
                "together; leave one of them out"
            )


def _check_patches(args: Any, options: PackingOptions) -> None:
    most, per_step = options.max_patches, options.documents_per_step
    if most is None:
        return
    if most < 1:
        raise ValueError(f"max_patches={most} must be at least 1, or None")
    other = f"documents_per_step={per_step}" if per_step is not None else "packing=False"
    if not args.packing or per_step is not None:
        raise ValueError(
            f"max_patches={most} limits bins, and {other} makes none; leave max_patches out, and "
            "raise gradient_accumulation_steps for smaller micro-batches"
        )


def _check_supervision(args: Any, options: PackingOptions) -> None:
    if options.train_on and args.assistant_only_loss:
        raise ValueError(
            f"train_on={options.train_on!r} and assistant_only_loss=True both say what is trained; "
            "leave assistant_only_loss out"
        )
    if options.instruction_template is not None and options.response_template is None:
        raise ValueError("instruction_template needs response_template: set both, or neither")
    if options.response_template is not None and (options.train_on or args.assistant_only_loss):
        other = f"train_on={options.train_on!r}" if options.train_on else "assistant_only_loss=True"
        raise ValueError(f"response_template and {other} both say what is trained; set one of them")
