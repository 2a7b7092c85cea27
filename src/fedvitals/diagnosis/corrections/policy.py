# SPDX-License-Identifier: Apache-2.0
"""The user's policy for corrections: for each issue, do nothing, suggest, or try corrections automatically."""

from __future__ import annotations

from collections.abc import Mapping

from fedvitals.diagnosis.corrections.catalog import KINDS, OPT_IN_KINDS
from fedvitals.diagnosis.issues.table import FAMILIES, ISSUES_BY_CODE
from fedvitals.errors import ConfigError, unknown

WORDS = ("off", "suggest", "auto")
ALL = "all"


class CorrectionPolicy:
    """Which corrections may be suggested or tried: `CorrectionPolicy("auto")`, or by issue, family or kind of
    correction: `CorrectionPolicy({"NAN_UPDATE": "auto", "client": "off"})`.

    The narrower setting wins: a kind of correction before an issue, an issue before its family, a family before
    «all».

    Args:
        cure: «off», «suggest» or «auto», for everything, or by issue, family or kind of correction.
        watch: Rounds of a trial, after which a correction is kept or undone.
        term: Rounds without the finding after which a client is readmitted.
        confidence: The least confidence of a finding that is corrected automatically.
    """

    def __init__(
        self,
        cure: str | Mapping[str, str] = "suggest",
        *,
        watch: int = 3,
        term: int = 5,
        confidence: float = 0.8,
    ) -> None:
        if not isinstance(cure, str | Mapping):
            raise ConfigError(f'cure= takes "off", "suggest" or "auto", or a mapping of issues to these; got {cure!r}.')
        words_by_name = {ALL: cure} if isinstance(cure, str) else dict(cure)
        for name, word in words_by_name.items():
            if name not in (ALL, *FAMILIES, *ISSUES_BY_CODE, *KINDS):
                raise ConfigError(
                    unknown("issue, family or correction", name, (ALL, *FAMILIES, *ISSUES_BY_CODE, *KINDS))
                )
            if word not in WORDS:
                raise ConfigError(unknown(f"word in cure for {name}:", str(word), WORDS))
        if watch < 1 or term < 1:
            raise ConfigError(f"A trial needs at least 1 round to watch and 1 of term; got watch={watch}, term={term}.")
        self._words = words_by_name
        self.watch, self.term, self.confidence = watch, term, confidence

    @property
    def automatic(self) -> bool:
        """Whether anything may be corrected automatically; only then must a host wait and keep checkpoints."""
        return "auto" in self._words.values()

    def word(self, issue: str, kind: str | None = None) -> str:
        """Return «off», «suggest» or «auto» for an issue, or for one kind of correction of it.

        Args:
            issue: The code of an issue, such as NAN_UPDATE.
            kind: A kind of correction, such as «exclude»; None asks for the issue as a whole.
        """
        issue_entry = ISSUES_BY_CODE.get(issue)
        of_issue = [issue] if issue_entry is None else [issue, issue_entry.family]
        chosen = next((self._words[name] for name in (*of_issue, ALL) if name in self._words), "suggest")
        if kind is None or chosen == "off":
            return chosen
        return self._words.get(kind, "suggest" if kind in OPT_IN_KINDS else chosen)

    def described(self) -> dict[str, str]:
        """Return the policy as it is stored in the run's configuration.

        Returns:
            A dictionary of plain texts.
        """
        return dict(self._words)


def correction_policy_of(cure: str | Mapping[str, str] | CorrectionPolicy) -> CorrectionPolicy:
    """Return the policy for a value of `cure=`."""
    return cure if isinstance(cure, CorrectionPolicy) else CorrectionPolicy(cure)
