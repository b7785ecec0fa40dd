"""The formulas of reinforcement learning with language models. They depend on torch only.

Each extension point is a table. A new entry is a file with one function, and a row:

    estimators.ESTIMATORS            algorithm.advantage      AdvantageInputs -> Advantages
    policy_losses.POLICY_LOSSES      algorithm.loss           PolicyBatch -> PolicyLoss
    aggregation.LOSS_AGGREGATIONS    algorithm.loss_agg       (lengths_B, MiniBatchTotals) -> weights_B
    kl.KL_ESTIMATORS                 algorithm.kl.estimator   (logprobs, ref_logprobs) -> divergence

The names are also listed in hpc_rl/config/rl/algorithm.py, which is imported without torch; a test compares both.

Shape suffixes: B responses of a step, N tokens of all responses concatenated, T tokens of the longest response, G
groups. `lengths_B` (int64) holds the number of tokens of each response, `groups_B` (int64, any numbers) the prompt that
it answers. All other tensors are float32; log-probabilities are natural logarithms.

Tokens are those that the policy sampled. The caller leaves out observations (see rl/loop/experience.py), so the token
after the last one of a turn is the first one of the policy's next turn, and the tokens of a row have no gaps.
"""
