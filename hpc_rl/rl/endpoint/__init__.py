"""Conversations that agents lead: programs of the user, which reach the policy by OpenAI's API.

`agents.py` responds to prompts, one session for each response. `sessions.py` has the sessions, `server.py` is what
agents see of them, and `processes.py` starts `agent.command`. `messages.py` and `answers.py` are the format of requests
and answers, and `rendering.py` converts between messages and tokens.
"""
