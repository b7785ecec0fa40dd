"""Rewards: a number for each response that tells how good it is.

`reward.function` names a built-in function (table.REWARDS: exact, format, gsm8k, math), or your own as
`package.module:function` or `path/file.py:function`:

    def score(response: str, answer, **kwargs) -> float:
        return float(response.strip() == answer)

- It is called as `score(response, answer, **reward.kwargs)`. `response` is the generated text without special tokens.
  `answer` is the row's column `data.answer_key`, or None if that is null.
- A parameter named `row` receives the whole row as a dict, one named `prompt` the prompt's text.
- It returns a finite number (anything that `float` accepts, except text), or a dict with the key "score" and further
  numbers. The mean of each further number is logged as the metric `reward/KEY`; other values in the dict are ignored.
- It runs in `reward.workers` separate processes. Calls are distributed over them in no fixed order, so keep no state
  between calls. If a call raises, takes longer than `reward.timeout_s`, ends its process, or returns no finite number,
  the failure is logged and the response is left out of training, or gets the score `reward.on_error`.
- A module is found among the installed ones, and then in the folder in which the job was submitted; one of yours with
  the name of an installed one is refused. A file may import the files beside it. All of reward.functions are loaded in
  each process, so files in different folders cannot import files of the same name beside them.
"""
