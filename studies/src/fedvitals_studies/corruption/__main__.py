# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.corruption [COUNT] [SEED]`: print the table, and what is wrong with each bad case."""

from __future__ import annotations

import sys

import click

from fedvitals_studies.corruption.study import run_study, table

cases = run_study(*(int(word) for word in (sys.argv[1:] or ["1000"])))
bad = [case for case in cases if case.outcome in ("silent", "untold", "traceback")]
for case in bad:
    click.echo(f"{case.outcome}: {case.kind}, seed {case.seed}: {case.why}", err=True)
click.echo(table(cases))
sys.exit(1 if bad else 0)
