"""Responses with several turns: one coroutine for each, in which the policy and a partner take turns.

`conversations.py` has the coroutine and its invariants. `turns.py` lets coroutines await turns of the policy,
`environment.py` is how an environment's messages become tokens, and `transcripts.py` how a conversation becomes one
response.
"""
