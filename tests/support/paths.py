# SPDX-License-Identifier: Apache-2.0
"""Where tests find the repository, their own folder and the golden files."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
