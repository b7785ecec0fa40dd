"""The formulas of reinforcement learning with language models: tensors and numbers in, tensors out, torch alone.

Shape suffixes: B responses of a step, T tokens of the longest, N tokens of all responses laid end to end, G groups.
Tensors [B, T] are padded on the right, and `mask_BT` is true at real tokens. `lengths_B` (int64) holds the tokens of
each response, `groups_B` (int64, any numbers) which prompt it answers. Everything else is float32; log-probabilities
are natural logarithms.
"""
