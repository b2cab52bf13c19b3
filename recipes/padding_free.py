"""Show that padded and padding-free training have the same steps and the same losses.

    python recipes/padding_free.py                                       # the demo's data
    python recipes/padding_free.py --config recipes/compare_packing.yaml # SmolLM2 on GSM8K

The blog post on padding-free training promises that it "retains the same number of optimization
steps as used in the padded example". Here, TRL's trainer pads and `PackedSFTTrainer` with
``packing=False`` does not. Both have the same seed, so every step has the same documents, and the
two loss curves coincide. At first, losses differ only by rounding; over many steps, small
differences grow, as they do between two GPUs. Seconds count the training steps only.

Expected on the demo (steps, documents and fill never vary; seconds were measured on 2 busy CPU
cores):

                  steps  docs/step       lr  seconds  speed-up    fill  eval loss
    padded           63        7.9  1.0e-03     19.7      1.0×   38.7%     2.4284
    padding-free     63        7.9  1.0e-03      9.1      2.2×  100.0%     2.4284

      step      padded  padding-free
         1    6.799330      6.799331
         8    5.048663      5.048663
        15    3.980105      3.980105
        22    3.129839      3.129839
        29    2.895807      2.895807
        36    2.712354      2.712354
        43    2.693331      2.693332
        50    2.428534      2.428534
        57    2.858645      2.858645
        63    2.362998      2.362998

    The losses of the 63 steps differ by 1e-06 at most.
"""

from trl_packing.recipes.compare_packing import DEMO, Result, Runs, compare, parse, table

from accelerate import PartialState
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer
from trl_packing.tools.options import exits_in_one_line

RUNS: Runs = {
    "padded": (SFTTrainer, {"packing": False}),
    "padding-free": (PackedSFTTrainer, {"packing": False}),
}
DEMO = {**DEMO, "output_dir": "outputs/padding_free", "per_device_train_batch_size": 8}


def main(argv: list[str] | None = None) -> dict[str, Result]:
    """Train both; print and return the results."""
    data_args, args, model_args = parse(argv, DEMO)
    args.logging_strategy, args.logging_steps = "steps", 1
    results = compare(RUNS, data_args, args, model_args)
    padded, free = (results[name].losses for name in RUNS)
    furthest = max(abs(a - b) for a, b in zip(padded, free, strict=True))
    say = PartialState().print
    say(table(results))
    say(f"\n{curves(padded, free)}")
    say(f"\nThe losses of the {len(padded):,} steps differ by {furthest:.0e} at most.")
    return results


def curves(padded: list[float], free: list[float], points: int = 9) -> str:
    """Return both loss curves as lines, at about `points` steps and the last one."""
    every = max(1, len(padded) // points)
    shown = sorted({*range(0, len(padded), every), len(padded) - 1})
    lines = [f"{step + 1:>6,}  {padded[step]:>10.6f}  {free[step]:>12.6f}" for step in shown]
    return "\n".join([f"{'step':>6}  {'padded':>10}  {'padding-free':>12}", *lines])


if __name__ == "__main__":
    exits_in_one_line(main)()
