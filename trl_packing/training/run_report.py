"""The report of a run that trains: kept up to date, and printed."""

from dataclasses import replace

from trl_packing.run.report import PackingReport, PrefixSavings
from trl_packing.run.stream import StreamBatches
from trl_packing.training.collators import RunCollators
from trl_packing.training.prefix_sharing import PrefixSharing

_FLOAT32 = "float32, by default on this CPU (use_cpu=True, bf16=True trains in bf16)"


class RunReport:
    """The report on the epoch that is planned, with what is known of the model by now."""

    planned: PackingReport

    def __init__(self, collators: RunCollators, sharing: PrefixSharing):
        self.collators, self.sharing = collators, sharing

    @property
    def current(self) -> PackingReport:
        """The report, with the attention, its check and the shapes in use."""
        mode, guard = self.sharing.mode, self.collators.guard
        reason = self.sharing.reason()
        prefixes = self.planned.prefixes
        if mode != "off":
            prefixes = replace(prefixes or PrefixSavings(mode), reason=reason)
        leaves_out = getattr(self.collators.run.args, "_leaves_bf16_out", False)
        return replace(
            self.planned,
            attention=str(guard.attention),
            precision=_FLOAT32 if leaves_out else None,
            checked=guard.checked,
            tokens_per_micro_batch=self.collators.tokens_per_micro_batch,
            prefixes=None if mode == "off" and reason else prefixes,
        )

    def print(self) -> None:
        """Print the report below the progress bar."""
        print(f"\n{self.current}", flush=True)

    def complete(self, stream: StreamBatches) -> None:
        """Report what a stream was found to hold, counted as it was read."""
        self.planned = replace(self.planned, preparation=stream.counts_of_all_ranks())
