# SPDX-License-Identifier: Apache-2.0
"""Study of low-rank adapters: federations of a small language model, healthy and with planted problems of LoRA."""
