"""`Checked`: the verdict of the isolation check on a run, with its evidence, for the report."""

from dataclasses import dataclass

from trl_packing.isolation.check import IsolationReport
from trl_packing.isolation.fallback import CheckResult, Refusal

NO_MODEL = "a preview loads no model; trl-packing verify checks one"
_NOT_YET = "train() checks before its first step"
_OFF = "isolation_check='off'"
_PADDED = "rows are padded, as in TRL"
_WARNED = "isolation_check='warn' trains all the same"
_INCONCLUSIVE = "trl-packing verify --dtype float32 sees more"


@dataclass(frozen=True)
class Checked:
    """The check of a run on its model, or the reason why there was none.

    Attributes:
        verdict: "isolated", "leaks" or "inconclusive", as in `IsolationReport`; "refused" where the
            model raised an error; "not checked".
        reason: why nothing was checked, or why the run goes on although the verdict is not
            "isolated".
        evidence: the numbers behind the verdict; None where nothing was measured.
        error: of a model that refuses packed rows.
    """

    verdict: str = "not checked"
    reason: str = NO_MODEL
    evidence: IsolationReport | None = None
    error: str = ""

    @classmethod
    def from_result(
        cls, result: CheckResult | None, *, isolation_check: str, pads: bool
    ) -> "Checked":
        """Return the words and numbers for the last check of a run.

        Args:
            result: of the check; None if there was none.
            isolation_check: the setting.
            pads: whether rows are padded because of `result`.
        """
        if result is None:
            return cls(reason=_OFF if isolation_check == "off" else _NOT_YET)
        if isinstance(result, Refusal):
            return cls(result.verdict, _PADDED, error=result.error)
        reasons = {"isolated": "", "leaks": _WARNED, "inconclusive": _INCONCLUSIVE}
        return cls(result.verdict, _PADDED if pads else reasons[result.verdict], result)

    def __str__(self) -> str:
        if self.error:
            return f"{self.reason}: the model refuses packed ones ({self.error})"
        if self.evidence is None:
            return f"nothing ({self.reason})"
        numbers = (
            f"differs by {brief(self.evidence.difference)}, rounding allows "
            f"{brief(self.evidence.allowed)}, a leak would be {brief(self.evidence.leak)}"
        )
        if self.reason == _PADDED:
            return f"{_PADDED}, for documents would LEAK into each other: {numbers}"
        words = {
            "isolated": "isolated",
            "leaks": "documents LEAK into each other",
            "inconclusive": "isolation could not be shown",
        }
        return f"{words[self.verdict]}: {numbers}" + f"; {self.reason}" * bool(self.reason)


def brief(number: float) -> str:
    """Return a number of any size in a few characters.

    Example:
        >>> brief(0.0), brief(0.00068), brief(0.25), brief(20.3)
        ('0', '7e-4', '0.25', '20')
    """
    if number and abs(number) < 0.01:
        digits, exponent = f"{number:.0e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{number:.2g}" if abs(number) < 100 else f"{number:,.0f}"
