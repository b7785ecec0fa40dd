"""Environments: what answers a model in a conversation of several turns, and the tools that it may call.

An environment is a class in your own file, named as `path/file.py:Class` or `package.module:Class`:

    class Calculator:
        def reset(self, answer, **row):
            self.answer, self.calls = float(answer), 0
            return "Use the tools."

        def add(self, a: float, b: float) -> float:
            '''Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            '''
            self.calls += 1
            return a + b

        def reward(self) -> dict:
            return {"score": float(self.calls > 0), "calls": self.calls}

- One object is created for each conversation, with the keyword arguments of the configuration.
- `reset(**row)` is called first, with the columns of the row that it has parameters for (all of them for `**row`). An
  environment with chance gets its `seed` in the same way, unless the data has such a column: it is below 2^31, the same
  for all responses to a prompt in a step, and the same again if a run resumes. `reset` returns None, text that is added
  to the prompt's last user message, or a list of messages that follow the prompt.
- Each public method is a tool. Its parameters need types and it needs a docstring, because the model sees both. What it
  returns becomes the tool's message: text as it is, everything else as JSON. If it raises, the model sees the error.
- `step(text)` is for environments without tools. It receives the model's text and returns the next observation, or
  `(observation, done)`. An observation is text (a user message), a list of messages, or None, which ends the
  conversation. The forms of Gym and Gymnasium are accepted too: `reset` may return `(observation, info)`, and `step`
  `(observation, reward, done, info)` or `(observation, reward, terminated, truncated, info)`.
  An environment may have both: a text without tool calls then goes to `step`. Without `step`, it ends the conversation.
- `reward()` returns what a reward function returns: a number, or a dict with the key "score". Without it, the reward is
  the sum of the rewards that `step` returned, if there were any.
- `close()` is called at the end.

Functions can be tools as well, with or without an environment: they are named in the same way.
"""
