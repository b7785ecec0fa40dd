"""Rewards: how good a response is, as one number.

`reward.function` names one of the functions of this package (exact, format, gsm8k, math), or your own as
`package.module:function` or `path/file.py:function`:

    def score(response: str, answer, **kwargs) -> float:
        return float(response.strip() == answer)

- It is called as `score(response, answer, **reward.kwargs)`: the generated text without special tokens, the row's
  column `data.answer_key` (None where that is null), and what the configuration gives as keyword arguments.
- A parameter named `row` gets the whole row as a dict, one named `prompt` the prompt's text.
- It returns a finite number (anything that `float` takes, except text).
- It runs in processes of its own, `reward.workers` of them, which are never told apart: keep no state between calls. A
  call that raises, takes longer than `reward.timeout_s`, ends its process, or returns no finite number is logged, and
  the response is scored `reward.on_error`.
- A module is found from the folder that the job was submitted in, as with `python -m`; a file may import the files
  beside it.
"""
