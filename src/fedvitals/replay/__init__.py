# SPDX-License-Identifier: Apache-2.0
"""Record runs on a tape, run recorded rounds again, debug them, and answer what-if questions."""
