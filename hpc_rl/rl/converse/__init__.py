"""Responses with several turns: one coroutine for each, in which the policy and a partner take turns.

`partner.py` has the coroutine and its invariants. `conversations.py` has environments as partners; agents are in
`hpc_rl.rl.endpoint`. `turns.py` lets coroutines await turns of the policy. `environment.py` is how an environment's
messages become tokens, and `transcripts.py` how a conversation becomes one response.
"""
