"""Judge architectures and write the page: `python -m architectures --output docs/compatibility.md`.

`--part I N` judges one of N, from the I-th. Exit status 1 if a difference is silent.
"""

import argparse
from pathlib import Path

from architectures.compatibility import judge_all
from architectures.page import report, summary_table
from architectures.tiny_models import names, vision_names


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these architectures")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"))
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--output", metavar="FILE", help="Markdown file to write")
    arguments = parser.parse_args(words)
    known = [*names(), *vision_names()]
    chosen = (arguments.only or known)[arguments.part[0] :: arguments.part[1]]
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"--only {' '.join(unknown)}: transformers has no such architecture")
    verdicts = []
    for verdict in judge_all(chosen, processes=arguments.processes):
        verdicts.append(verdict)
        words = f"{verdict.name:28} {verdict.outcome:10} {verdict.backend:14}"
        images = verdict.images.outcome.replace("trl", "TRL's path")
        reason = f"with images: {images}; {verdict.reason}" if images else verdict.reason
        print(f"{words} {reason[:90]}", flush=True)
    print(f"\n{summary_table(verdicts)}")
    if arguments.output:
        Path(arguments.output).write_text(report(verdicts))
    # The negative control: packed by TRL, leaking models must be reported as different.
    blind = arguments.only is None and not any(v.by_trl.startswith("differs") for v in verdicts)
    return 1 if blind or any(v.is_silent_difference for v in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
