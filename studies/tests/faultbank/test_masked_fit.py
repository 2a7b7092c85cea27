# SPDX-License-Identifier: Apache-2.0
"""The refit with masks: what is not measured stays unknown, and masked copies lose whole groups of signs."""

import numpy as np

from fedvitals.diagnosis.evidence.log_odds import VIEWS
from fedvitals.diagnosis.evidence.scores import FEWEST, Scorer
from fedvitals.diagnosis.evidence.vital_signs import ABSOLUTE, FIT, SIGNS, VitalSigns
from fedvitals_studies.faultbank.fit import Rows
from fedvitals_studies.faultbank.masked_fit import COLUMNS, GROUPS, MaskedScorer, with_masks

LOSS = SIGNS.index(FIT[0])


def signs(clients, measured, seed=0):
    """A round in which some clients measured how well the model fits their samples."""
    values = np.random.default_rng(seed).normal(size=(clients, len(SIGNS)))
    values[measured:, LOSS] = np.nan
    nothing = np.full(clients, np.nan)
    names = [f"c{number}" for number in range(clients)]
    absolute, pairs = np.zeros((clients, len(ABSOLUTE))), np.full((clients, 2), np.nan)
    return VitalSigns(names, values, nothing, nothing, absolute, pairs)


def test_what_is_measured_everywhere_is_scored_as_before():
    both = [scorer(signs(9, 9)) for scorer in (Scorer(), MaskedScorer())]
    np.testing.assert_allclose(both[1].peers, both[0].peers)
    np.testing.assert_allclose(both[1].lasting, both[0].lasting)


def test_missing_stays_missing_and_three_clients_are_no_peers():
    few, enough = (MaskedScorer()(signs(9, measured)) for measured in (FEWEST - 1, FEWEST))
    assert np.isnan(few.peers[:, LOSS]).all()
    assert np.isnan(few.lasting[:, LOSS]).all()
    assert np.isfinite(enough.peers[:FEWEST, LOSS]).all()
    assert np.isnan(enough.peers[FEWEST:, LOSS]).all()
    assert np.isfinite(few.peers[:, SIGNS.index("norm")]).all()


def test_a_masked_copy_lacks_whole_groups_and_nothing_else():
    found = {view: np.zeros((3, len(COLUMNS[view]))) for view in VIEWS}
    run = Rows("digits-mlp", True, "small", 1, ["a", "b", "c"], [""] * 3, found)
    copies = [with_masks(run, np.random.default_rng(seed)) for seed in range(20)]
    for copy in copies:
        gone = {name for name, value in zip(COLUMNS["flip"], copy.found["flip"][0], strict=True) if np.isnan(value)}
        assert gone == set().union(*(group for group in GROUPS.values() if group & gone)) & {*COLUMNS["flip"]}
    assert not np.isnan(found["server"]).any()
    assert any(np.isnan(copy.found["server"]).any() for copy in copies)
